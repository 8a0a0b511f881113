"""The interface for reading other formats: say where the bytes of a checkpoint are, and everything
can read it.

A `Reader` recognizes the directories of its format, and says which bytes of which files hold which
regions of tensors:

    class RawReader(Reader):
        name = "raw"

        def detect(self, location, marker):
            return location.endswith(".raw")

        def manifest(self, location):
            place = Region((0, 0), (4, 8))
            piece = StoredPiece(
                "w", "F32", place, (4, 8), file="w.bin", first_byte=0, num_bytes=128
            )
            return build_manifest(self.name, location, [piece])

    register_reader(RawReader())

`distckpt.load` with any parallel layout, `consolidate`, `reshard`, `verify`, `diff` and the command
line then take such directories. Hugging Face folders and checkpoints of
`torch.distributed.checkpoint` are read in the same way.
"""

from __future__ import annotations

from distckpt._base.public import set_public_home
from distckpt._checkpoint.opening import register_reader
from distckpt._checkpoint.stored_pieces import Reader, StoredPiece, build_manifest
from distckpt._format.manifest import OBJECT
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import Region
from distckpt._io.read import read_chunks

__all__ = [
    "OBJECT",
    "Reader",
    "Region",
    "StoredCheckpoint",
    "StoredPiece",
    "build_manifest",
    "read_chunks",
    "register_reader",
]

set_public_home(globals())
