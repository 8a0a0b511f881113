"""What a process remembers of its saves and loads: some faults are errors at the first save
alone.
"""

from __future__ import annotations

import sys

_MEMORIES = {
    "distckpt._plan.layout": "loaded_plans",
}


def forget_saves() -> None:
    """Let the next save be the first one of this process."""
    for module, name in _MEMORIES.items():
        if module in sys.modules:
            getattr(sys.modules[module], name).clear()
