"""The command line: `distckpt VERB ...` or `python -m distckpt VERB ...`.

`distckpt._cli` has the verbs.
"""

from distckpt._base.public import set_public_home
from distckpt._cli.main import main

__all__ = ["main"]

set_public_home(globals())
