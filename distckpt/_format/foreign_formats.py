"""Formats of other programs that distckpt reads, without their readers.

The code of a format is in `_foreign`, the module of its reader in `_base/wings.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ForeignFormat:
    """A format of another program.

    Attributes:
        name: its name in manifests.
        reader: class of its reader, which is imported when a location is not a checkpoint of
            distckpt; `_base/wings.py` names the module.
        program: the program that writes it, in messages.
        marker: the file that every complete directory has; "" if there is none.
        data_suffix: suffix of the names of the files with data, if it tells the format; else "".
        names: suffixes of the names of all files that its reader reads.
        is_export: whether it holds a model alone, under the names of another program.
        is_given_to_save: whether programs also pass its name to a save, which means distckpt's own
            format then.
    """

    name: Literal["deepspeed", "huggingface", "orbax", "torch_dist"]
    reader: str
    program: str
    marker: str = ""
    data_suffix: str = ""
    names: tuple[str, ...]
    is_export: bool = False
    is_given_to_save: bool = False


TORCH_DIST = ForeignFormat(
    name="torch_dist",
    reader="TorchDistReader",
    program="torch",
    marker=".metadata",
    data_suffix=".distcp",
    names=(".metadata", ".distcp", "common.pt", "meta.pt", "metadata.json"),
    is_given_to_save=True,
)
HUGGING_FACE = ForeignFormat(
    name="huggingface",
    reader="HuggingFaceReader",
    program="transformers",
    marker="model.safetensors.index.json",
    names=(".safetensors", ".safetensors.index.json", "config.json"),
    is_export=True,
)
DEEPSPEED = ForeignFormat(
    name="deepspeed",
    reader="DeepSpeedReader",
    program="DeepSpeed",
    names=("latest", "latest_universal", ".pt"),
)
ORBAX = ForeignFormat(
    name="orbax",
    reader="OrbaxReader",
    program="Orbax",
    names=("_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt", "_strings.json"),
)

SEAL_NAME = "distckpt.seal"
"""Name of the file with checksums. Other programs look for their own names and endings."""

FORMATS: dict[str, ForeignFormat] = {
    known.name: known for known in (HUGGING_FACE, TORCH_DIST, DEEPSPEED, ORBAX)
}
"""Formats by name, in the order in which their readers look."""

MARKED = tuple(known for known in FORMATS.values() if known.marker)
"""Formats whose directories are known by a file."""

MARKED_CHECKPOINTS = tuple(known for known in MARKED if not known.is_export)


def is_export(name: object) -> bool:
    """Return whether a name is of a format for models alone."""
    return isinstance(name, str) and name in FORMATS and FORMATS[name].is_export
