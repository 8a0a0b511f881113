"""Reader of checkpoints of DeepSpeed."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from distckpt._checkpoint.reader import Reader
from distckpt._checkpoint.stored_pieces import StoredPiece, build_manifest
from distckpt._foreign.deepspeed.files import find_states, is_checkpoint, read_states
from distckpt._foreign.deepspeed.universal import describe_universal
from distckpt._foreign.deepspeed.zero import describe_zero
from distckpt._format import codec
from distckpt._format.manifest import OBJECT, Manifest
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import Region

_NOT_COMMON = {
    "module", "optimizer", "param_shapes", "buffer_names", "shared_params", "frozen_param_shapes",
    "frozen_param_fragments", "universal_checkpoint_info",
}  # fmt: skip


class DeepSpeedReader(Reader):
    """Reads the folder of one save, and a folder of several in which `latest` names one."""

    name = "deepspeed"

    def detect(self, location: str, marker: Mapping[str, Any] | None) -> bool:
        return marker is None and is_checkpoint(location)

    def manifest(self, location: str) -> Manifest:
        states = find_states(location)
        pieces, aliases, settings = (describe_universal if states.is_universal else describe_zero)(
            location, states
        )
        fields: dict[str, Any] = {"common": states.model[min(states.model)]}
        if settings:
            # Put together from several files, they are kept here.
            fields["settings"] = base64.b64encode(codec.encode(settings)).decode()
            pieces.append(
                StoredPiece(
                    "optimizer.settings", OBJECT, Region((0,), (1,)), (1,), pieces[0].file, 0, 0
                )
            )
        return build_manifest(self.name, location, pieces, None, fields, aliases)

    def load_objects(self, stored: StoredCheckpoint, chunks: Sequence[int]) -> list[Any]:
        return [
            codec.decode(base64.b64decode((stored.manifest.origin or {})["settings"]))
            for _ in chunks
        ]

    def load_common_state(self, stored: StoredCheckpoint) -> Any:
        """Load what is not of the model or the optimizer: counters, the scheduler's state, that of
        the program.
        """
        [file] = read_states(stored.location, [(stored.manifest.origin or {})["common"]])
        return {
            key: file.values(value, repr(key))
            for key, value in file.content.items()
            if key not in _NOT_COMMON
        }
