"""Rules between Hugging Face directories and checkpoints of MaxText.

`consolidate(..., family=...)` finds them by itself where a checkpoint has MaxText's names, and with
`layout="jax"` it writes them.
"""

from distckpt._base.public import set_public_home
from distckpt.jax._rules import from_maxtext, to_maxtext

__all__ = ["from_maxtext", "to_maxtext"]

set_public_home(globals())
