"""`distckpt completion`: the script in a real shell."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from tests.support.cli_command import call, call_error

COMPLETE = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
"$(complete -p distckpt | sed 's/.* -F \\([^ ]*\\) .*/\\1/')"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
def test_bash_completes_verbs_options_choices_and_files(tmp_path, capsys):
    script = tmp_path / "distckpt.bash"
    script.write_text(call(capsys, "completion", "bash"))
    (tmp_path / "checkpoints").mkdir()

    def complete(*words):
        line = ["bash", "-c", COMPLETE, "bash", str(script), "distckpt", *words]
        ended = subprocess.run(
            line, capture_output=True, text=True, cwd=tmp_path, timeout=200, check=True
        )
        return ended.stdout.split()

    assert complete("ver") == ["verify"]
    assert complete("re") == ["reshard", "reject"]
    assert complete("verify", "--f") == ["--fast", "--full", "--finish"]
    assert complete("prune", "root", "--best-mode", "m") == ["min", "max"]
    assert complete("verify", "check") == ["checkpoints"]
    assert complete("inspect", "x", "--html", "dist") == ["distckpt.bash"]
    assert complete("bench", "check") == ["checkpoints"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells(tmp_path, capsys, shell):
    script = tmp_path / "script"
    script.write_text(call(capsys, "completion", shell))
    assert "reshard" in script.read_text()
    assert "--abandoned-after" in script.read_text()
    if shutil.which(shell):
        subprocess.run([shell, "-n", script], check=True, timeout=200)


def test_without_the_library_there_is_a_clear_message(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert "pip install 'distckpt[cli]'" in call_error(capsys, "completion", "bash")
