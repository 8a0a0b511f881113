"""Checkpoints that are open for reading, without a state dict. Any rank may read, alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch

from distckpt._base.dtypes import FROM_NAME
from distckpt._base.errors import CheckpointingException, LoadMismatchError
from distckpt._base.interrupts import operation
from distckpt._base.messages import nearest_names, summarize_keys
from distckpt._base.options import LoadOptions
from distckpt._base.public import SaysOtherNames
from distckpt._checkpoint.consistent_read import reading_unchanged
from distckpt._checkpoint.opening import open_undisturbed
from distckpt._checkpoint.shards import ReadSettings, load_shards
from distckpt._checkpoint.stored_values import load_common_state
from distckpt._format.fingerprint import Fingerprint
from distckpt._format.marker import replaced
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import Region, whole
from distckpt._plan.codes import AS_STORED
from distckpt._plan.decoded import decoded
from distckpt._ranks.collectives import Ranks
from distckpt._state import flatten
from distckpt._state.common_state import COMMON_KEY, CONTENT_METADATA
from distckpt._storage import locations
from distckpt._storage.open_files import OpenFiles
from distckpt.mapping._sharded_tensor import ShardedTensor
from distckpt.mapping._wrappers import StateDict


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a checkpoint.

    Attributes:
        key: its name.
        shape: its global shape.
        dtype: its stored dtype; for a quantized tensor, the dtype of its values.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Checkpoint(SaysOtherNames):
    """A checkpoint that is open for reading, see `distckpt.open`.

    It stays on the checkpoint that it has opened: reads raise an error after that was replaced or
    removed. It can be sent to other processes, which open it there: pickles and copies hold its
    location, and nothing of its content.

    Attributes:
        location: path or URL.
        tensors: name, shape and dtype of each tensor, by key.
        objects: the number of parts along each axis of each sharded object, by key.
        common_state: everything that was saved without being sharded. An object of a class that is
            not registered is an `UnknownObject`.
        metadata: the `content_metadata` that was given to `save`, None without any.
    """

    def __init__(self, stored: StoredCheckpoint, as_stored: bool = False) -> None:
        self.location = stored.location
        self._stored = stored
        self._as_stored = as_stored
        self._decoded: dict[str, Any] = {}

    def __reduce__(self) -> tuple[Callable[..., Checkpoint], tuple[Any, ...]]:
        """Open the same checkpoint again where it is unpickled."""
        marker = None
        if self._stored.manifest.origin is None:
            marker = self._stored.marker
        return _open_again, (self.location, self._as_stored, marker)

    def __repr__(self) -> str:
        """Name the location, and count tensors and sharded objects."""
        counts = f"{len(self.tensors)} tensors, {len(self.objects)} sharded objects"
        return f"<Checkpoint {self.location!r}: {counts}>"

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Describe each tensor, by key."""
        stored = self._stored
        tensors = {}
        for key in stored.manifest.key_index:
            if not (stored.is_object(key) or key.endswith(AS_STORED)):
                dtype = FROM_NAME[stored.dtype_name(key)]
                tensors[key] = TensorInfo(key, stored.global_shape(key), dtype)
        return MappingProxyType(tensors)

    @cached_property
    def objects(self) -> Mapping[str, tuple[int, ...]]:
        """Return each sharded object's number of parts per axis, by key."""
        stored = self._stored
        keys = filter(stored.is_object, stored.manifest.key_index)
        shapes = {}
        for key in keys:
            if key != COMMON_KEY:
                shapes[key] = stored.global_shape(key)
        return MappingProxyType(shapes)

    @cached_property
    def common_state(self) -> StateDict:
        """Return everything that was saved without being sharded.

        It is read once. Copy values before you change them.
        """
        with reading_unchanged(Ranks.alone(), [self._stored]):
            compacted: StateDict = flatten.compact(load_common_state(self._stored))
        return compacted

    @property
    def metadata(self) -> dict[str, Any] | None:
        """Return the `content_metadata` that was given to `save`, None without any."""
        return self.common_state.get(CONTENT_METADATA)

    def read(self, key: str, region: tuple[slice, ...] | None = None) -> torch.Tensor:
        """Read a tensor, or a region of it, onto the CPU. Nothing else is read.

            checkpoint = distckpt.open("checkpoints/step_100")
            rows = checkpoint.read("embedding.weight", (slice(0, 8),))

        Args:
            key: key of the tensor.
            region: a slice without a step for each of the first axes; the others are read whole.
                Negative numbers count from the end, as usual. None for the whole tensor.

        Raises:
            LoadMismatchError: there is no tensor of this key, or it does not have the region.
            CheckpointingException: the checkpoint was replaced after it was opened.
            CorruptCheckpointError: files are missing, cut off or changed.
        """
        if not isinstance(key, str):
            raise TypeError(f"key is the name of a tensor, got {key!r:.100}.")
        tensor = self._find([key])[0]
        return self._read([_requested(tensor, _region_of(self.location, tensor, region))])[0]

    def read_tensors(self, keys: Collection[str] | None = None) -> dict[str, torch.Tensor]:
        """Read tensors whole onto the CPU, in one pass over the files.

            weights = distckpt.open("checkpoints/step_100").read_tensors()

        Args:
            keys: keys of the tensors; None for all.

        Raises:
            LoadMismatchError: there are no tensors of some keys.
            CheckpointingException: the checkpoint was replaced after it was opened.
            CorruptCheckpointError: files are missing, cut off or changed.
        """
        check_keys(keys)
        tensors = list(self.tensors.values()) if keys is None else self._find(keys)
        values = self._read([_requested(tensor, whole(tensor.shape)) for tensor in tensors])
        return {tensor.key: value for tensor, value in zip(tensors, values, strict=True)}

    def fingerprints(
        self, keys: Collection[str] | None = None, *, stored: bool = False
    ) -> dict[str, Fingerprint]:
        """Compute the fingerprint of each tensor, see `distckpt.fingerprint`; all are read, in
        pieces.

            live = distckpt.fingerprint(state)
            assert distckpt.open("checkpoints/step_100").fingerprints() == live

        Args:
            keys: keys of the tensors; None for all.
            stored: return the fingerprints that `fingerprint=True` has stored at the save, from the
                tensors in memory, and read nothing.

        Raises:
            LoadMismatchError: there are no tensors of some keys.
            CheckpointingException: the checkpoint was replaced after it was opened, or holds
                quantized tensors, which have fingerprints with `open(..., as_stored=True)`. Or,
                with `stored`, it has no fingerprints of some of them.
            CorruptCheckpointError: files are missing, cut off or changed.
        """
        check_keys(keys)
        if self._stored.quantized:
            raise CheckpointingException(
                f"{self.location!r} holds quantized tensors, and fingerprints are of what is "
                "stored: open it with as_stored=True."
            )
        names = list(self.tensors) if keys is None else [tensor.key for tensor in self._find(keys)]
        from distckpt._operations.fingerprint import computed_fingerprints, saved_fingerprints

        if stored:
            return saved_fingerprints(self._stored, names)
        with reading_unchanged(Ranks.alone(), [self._stored]):
            return computed_fingerprints(self._stored, names)

    def _find(self, keys: Collection[str]) -> list[TensorInfo]:
        unknown = []
        for key in keys:
            if key not in self.tensors:
                unknown.append(key)
        if unknown:
            hint = nearest_names(unknown, self.tensors)
            if unknown[0] in self.objects:
                hint = f" ({unknown[0]!r} is a sharded object)"
            raise LoadMismatchError(
                f"There are no tensors of these keys in {self.location!r}: "
                f"{summarize_keys(unknown)}{hint}",
                unexpected=unknown,
            )
        return [self.tensors[key] for key in keys]

    @operation
    def _read(self, shards: Sequence[ShardedTensor]) -> list[torch.Tensor]:
        settings = ReadSettings(LoadOptions())
        ranks = Ranks.alone()
        with reading_unchanged(ranks, [self._stored]), OpenFiles() as files:
            files.decoded = self._decoded
            return load_shards(ranks, self._stored.with_files(files), shards, settings)


@operation
def open(path: str | os.PathLike[str], *, as_stored: bool = False) -> Checkpoint:
    """Open a checkpoint, to inspect it and to read tensors.

    No state dict is needed.

        checkpoint = distckpt.open("checkpoints/step_100")
        checkpoint.tensors["embedding.weight"].shape
        checkpoint.common_state["step"]
        rows = checkpoint.read("embedding.weight", (slice(0, 8),))

    Any rank may call, alone. Nothing but the manifest is read at first, and there is nothing to
    close.

    Args:
        path: a path or fsspec URL of anything that `distckpt.load` reads.
        as_stored: with True, quantized tensors are the codes and scales that they are stored as,
            else values.

    Raises:
        CheckpointNotFoundError: no complete checkpoint is there.
        CheckpointingException: it was saved with a strategy of your own, which `distckpt.load`
            takes.
        CorruptCheckpointError: the manifest is missing or damaged.
    """
    location = locations.normalize(path)
    stored = open_undisturbed(Ranks.alone(), location)
    return Checkpoint(stored if as_stored else decoded(stored), as_stored)


def _open_again(location: str, as_stored: bool, marker: Mapping[str, Any] | None) -> Checkpoint:
    """Open a checkpoint that another process, or a copy, has opened before.

    Raises:
        CheckpointingException: it was replaced since.
    """
    checkpoint = open(location, as_stored=as_stored)
    if marker is not None and checkpoint._stored.marker != marker:
        raise replaced(location)
    return checkpoint


def check_keys(keys: Collection[str] | None) -> None:
    """Refuse anything but whole keys in a collection, or None for all."""
    if keys is None:
        return
    is_listed = isinstance(keys, Collection) and not isinstance(keys, str)
    if not is_listed or any(not isinstance(key, str) for key in keys):
        hint = ""
        if isinstance(keys, str):
            hint = f"; for one tensor, keys={[keys]!r}"
        raise TypeError(f"keys is a list of whole keys, not of patterns, got {keys!r:.200}{hint}.")


def _requested(tensor: TensorInfo, region: Region) -> ShardedTensor:
    return ShardedTensor(
        tensor.key, None, tensor.dtype, region.shape, tensor.shape, region.offset, None
    )


def _region_of(
    location: str,
    tensor: TensorInfo,
    slices: tuple[slice, ...] | None,
) -> Region:
    """Convert slices to a region of a tensor."""
    own_slices = () if slices is None else slices
    if not isinstance(own_slices, tuple) or not all(isinstance(s, slice) for s in own_slices):
        raise TypeError(f"region is a tuple of slices, got {slices!r:.200}.")
    shape = tensor.shape
    if len(own_slices) > len(shape) or not all(map(_is_within, own_slices, shape)):
        raise LoadMismatchError(
            f"Key {tensor.key!r} in {location!r} has the shape {shape}: it has no region "
            f"[{', '.join(map(_text_of, own_slices))}].",
            unexpected=[tensor.key],
        )
    rest = [slice(None)] * (len(shape) - len(own_slices))
    ranges = []
    for size, axis_slice in zip(shape, [*own_slices, *rest], strict=True):
        ranges.append(range(size)[axis_slice])
    return Region(tuple(indices.start for indices in ranges), tuple(map(len, ranges)))


def _is_within(piece: slice, size: int) -> bool:
    """Whether a slice without a step lies inside an axis."""
    selected = range(size)[piece]
    ends = [end for end in (piece.start, piece.stop) if end is not None]
    is_inside = all(-size <= end <= size for end in ends)
    return is_inside and selected.step == 1 and selected.start <= selected.stop


def _text_of(piece: slice) -> str:
    ends = [piece.start, piece.stop]
    if piece.step is not None:
        ends.append(piece.step)
    texts = []
    for end in ends:
        texts.append("" if end is None else str(end))
    return ":".join(texts)
