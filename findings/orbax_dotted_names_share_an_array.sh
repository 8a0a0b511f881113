#!/usr/bin/env bash
# Orbax 0.12.8 (JAX 0.10.2): two leaves whose keys, joined by dots, are equal are saved without an
# error, and both come back as one of them.
#
# Expected: {"a.b": ones, "a": {"b": zeros}} is restored as it was saved, or refused, as other trees
# are that a checkpointer cannot hold.
# Seen: `save` and `restore` succeed, and both leaves are ones, or both zeros: PyTreeCheckpointer, the
# v1 API and StandardCheckpointer. The names in _METADATA are apart; those of the arrays are not.
# Source: `'.'.join(str_keypath(keypath))` in orbax/checkpoint/_src/tree/utils.py names the arrays.
# Matters to: everybody whose keys may have dots, such as flat state dicts beside nested ones.
#
# Fails when the behavior changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q jax==0.10.2 orbax-checkpoint==0.12.8
cd "$folder"
cat > save.py <<'PYTHON'
import os
import sys

import numpy as np
from orbax import checkpoint as orbax
from orbax.checkpoint import v1

ways = {
    "PyTreeCheckpointer": orbax.PyTreeCheckpointer(),
    "StandardCheckpointer": orbax.StandardCheckpointer(),
}
ones, zeros = np.ones(2, np.float32), np.zeros(2, np.float32)
tree = {"a.b": ones, "a": {"b": zeros}}
are_equal = []


def show(name, found):
    values = found["a.b"].tolist(), found["a"]["b"].tolist()
    print(f"{name}: 'a.b' is {values[0]} (saved: [1, 1]), 'a' > 'b' is {values[1]} (saved: [0, 0])")
    are_equal.append(values[0] == values[1])


for name, checkpointer in ways.items():
    checkpointer.save(os.path.abspath(name), tree)
    getattr(checkpointer, "wait_until_finished", lambda: None)()
    show(name, checkpointer.restore(os.path.abspath(name)))
v1.save(os.path.abspath("v1"), tree)
show("v1", v1.load(os.path.abspath("v1")))
sys.exit(0 if all(are_equal) else 1)
PYTHON
venv/bin/python save.py 2> log || { cat log; echo "the behavior has changed"; exit 1; }
