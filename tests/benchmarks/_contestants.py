"""The ways to save and load that are compared: those of `distckpt bench`."""

from __future__ import annotations

from distckpt._bench.contestants import Contestant, contestants
from distckpt._bench.state import Part, State, local_bytes

__all__ = ["Contestant", "Part", "State", "contestants", "local_bytes"]
