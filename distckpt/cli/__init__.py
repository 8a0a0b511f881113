"""The command line: `distckpt VERB ...` or `python -m distckpt VERB ...`.

Each verb has a file in this folder.
"""

from distckpt._base.public import set_public_home
from distckpt.cli._main import main

__all__ = ["main"]

set_public_home(globals())
