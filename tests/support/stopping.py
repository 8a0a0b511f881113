"""Saves that stop where a test wants them to, until it answers: in the caller's thread, or in the
background.
"""

from __future__ import annotations

from distckpt.strategies.safetensors import SafetensorsSaveStrategy, ShardSave
from tests.support.harness import ask_parent


class StopsBefore(ShardSave):
    """Waits for the test before anything is written."""

    def write(self, checkpoint_dir, ranks):
        ask_parent()
        return super().write(checkpoint_dir, ranks)


class StopsWithin(ShardSave):
    """Waits for the test when its own files are written, and those of others perhaps."""

    def write_own(self, checkpoint_dir, ranks):
        own = super().write_own(checkpoint_dir, ranks)
        ask_parent()
        return own


class StopsAfter(ShardSave):
    """Waits for the test when everything is written, before it is committed."""

    def write(self, checkpoint_dir, ranks):
        fields = super().write(checkpoint_dir, ranks)
        ask_parent()
        return fields


def stopping(kind: type[ShardSave]) -> SafetensorsSaveStrategy:
    """Return a strategy whose saves are of this kind."""
    return type("Stopping", (_Stopping,), {"kind": kind})()


class _Stopping(SafetensorsSaveStrategy):
    kind: type[ShardSave]

    def prepare(self, sharded_state_dict):
        prepared = super().prepare(sharded_state_dict)
        return self.kind(**vars(prepared))
