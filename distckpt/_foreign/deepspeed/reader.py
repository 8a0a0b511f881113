"""Reader of DeepSpeed checkpoints."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from distckpt._checkpoint.stored_pieces import Reader, StoredPiece, build_manifest
from distckpt._foreign.deepspeed.files import find_states, is_checkpoint, read_states
from distckpt._foreign.deepspeed.universal import universal_contents
from distckpt._foreign.deepspeed.without_zero import numbered_values
from distckpt._foreign.deepspeed.zero import zero_contents
from distckpt._format import codec
from distckpt._format.foreign_formats import DEEPSPEED
from distckpt._format.manifest import OBJECT, Manifest
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import Region

_NOT_COMMON = {
    "module", "optimizer", "param_shapes", "buffer_names", "shared_params", "frozen_param_shapes",
    "frozen_param_fragments", "universal_checkpoint_info",
}  # fmt: skip


class DeepSpeedReader(Reader):
    """Reads the folder of one save, or of several with `latest`."""

    name = DEEPSPEED.name

    def detect(self, location: str, marker: Mapping[str, Any] | None) -> bool:
        return marker is None and is_checkpoint(location)

    def manifest(self, location: str) -> Manifest:
        states = find_states(location)
        find = universal_contents if states.is_universal else zero_contents
        pieces, aliases, settings, num_groups = find(location, states)
        fields: dict[str, Any] = {"common": states.model[min(states.model)]}
        if settings:
            # They come from several files, so they are kept here.
            fields["settings"] = base64.b64encode(codec.encode(settings)).decode()
            cell = Region((0,), (1,))
            file = pieces[0].file
            pieces.append(StoredPiece("optimizer.settings", OBJECT, cell, (1,), file, 0, 0))
        if num_groups:
            groups = [("optimizer", "param_groups", i, "params") for i in range(num_groups)]
            fields["paths"] = groups
        return build_manifest(self.name, location, pieces, None, fields, aliases)

    def load_objects(self, stored: StoredCheckpoint, chunks: Sequence[int]) -> list[Any]:
        return [codec.decode(base64.b64decode(stored.manifest.notes["settings"])) for _ in chunks]

    def load_common_state(self, stored: StoredCheckpoint) -> Any:
        """Load the values that belong to neither the model nor the optimizer.

        These are counters, the state of the scheduler, and additions of the program.
        """
        [file] = read_states(stored.location, [stored.manifest.notes["common"]])
        common = {
            key: file.values(value, repr(key))
            for key, value in file.content.items()
            if key not in _NOT_COMMON
        }
        if "paths" in stored.manifest.notes:
            common["optimizer"] = numbered_values(file)
        return common
