"""Comparison of common state between ranks, where hashes of it differ."""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from distckpt._base.dtypes import FROM_NAME, TO_NAME, to_numpy
from distckpt._base.errors import InvalidShardingError
from distckpt._base.memory import tensor_bytes
from distckpt._base.messages import summarize_keys
from distckpt._base.tree import HOLE, Position, is_plain_container, map_nodes
from distckpt._format import codec
from distckpt._ranks.collectives import Ranks
from distckpt.mapping._wrappers import CommonStateDict

logger = logging.getLogger(__name__)

_Hashes: TypeAlias = Mapping[str, Sequence[Any]]
"""Path of a leaf -> its hash, and whether it has tensors."""
_Samples: TypeAlias = Mapping[str, Sequence[str]]
"""Path of a tensor -> its dtype, shape, and elements in hexadecimal."""
MAX_SAMPLES = 256
"""Maximum of differing tensors with compared samples, at least one per rank."""
SAMPLED_ELEMENTS = 256


def check_differences(ranks: Ranks, common: CommonStateDict, digest: int, warns: bool) -> None:
    """Compare common state between ranks, and warn of differences.

    Ranks exchange hashes, and look at single entries only if those differ.

    Collective operation: all ranks must call it. Tensors that have drifted apart are warned about,
    too; the coordinator's values are saved.

    Raises:
        InvalidShardingError: on all ranks, if tensors have nothing in common, unless `warns`. Most
            of them are part of something.
    """
    if ranks.all_equal(digest):
        return
    own = _hashes(common)
    gathered = [json.loads(text) for text in ranks.gather(json.dumps(own).encode())]
    paths = ranks.decide_json("compare common state", lambda: _differing_tensors(gathered))
    samples: list[bytes] = []
    if paths:
        samples = ranks.gather(json.dumps(_samples(common, paths)).encode())
    with ranks.phase("compare common state", decision=True):
        if ranks.is_coordinator:
            decoded = [json.loads(text) for text in samples] or [{}] * ranks.size
            for rank in range(1, ranks.size):
                differing = _differing(gathered[0], gathered[rank])
                compared = sorted({*differing.tensors} & {*paths})
                differences = _differences(decoded[0], decoded[rank], compared)
                if differing.tensors:
                    _report_tensors(rank, differing.tensors, len(compared), differences, warns)
                _warn_of_values(rank, differing.values)


class _Differing(NamedTuple):
    """The paths at which a rank differs from the coordinator: of tensors, and of other values."""

    tensors: list[str]
    values: list[str]


def _hashes(common: CommonStateDict) -> dict[str, tuple[str, bool]]:
    """Return, for each leaf by path, its hash and tensor flag.

    A leaf has tensors if it has another hash without them.
    """
    with_tensors = codec.fingerprints(_plain(common, with_tensors=True))
    without = codec.fingerprints(_plain(common, with_tensors=False))
    return {path: (digest, digest != without.get(path)) for path, digest in with_tensors.items()}


def _differing_tensors(gathered: Sequence[_Hashes]) -> list[str]:
    """Return the paths of the tensors whose samples are compared.

    They are evenly selected from the tensors in which a rank differs from the coordinator, at least
    one for each such rank.
    """
    first, *others = gathered
    lists_of_ranks = {tuple(_differing(first, other).tensors) for other in others}
    share = max(1, MAX_SAMPLES // len(lists_of_ranks))
    selected: set[str] = set()
    for paths in lists_of_ranks:
        selected.update(paths[:: 1 + len(paths) // share])
    return sorted(selected)


def _differing(first: _Hashes, other: _Hashes) -> _Differing:
    differing = _Differing([], [])
    for path in sorted({**first, **other}):
        one = first.get(path)
        two = other.get(path)
        if one == two:
            continue
        if (one and one[1]) or (two and two[1]):
            differing.tensors.append(path)
        else:
            differing.values.append(path)
    return differing


def _samples(common: CommonStateDict, paths: Sequence[str]) -> dict[str, tuple[str, str, str]]:
    """Return dtype, shape and hexadecimal elements of leaves that are tensors."""
    by_path = codec.leaves(_plain(common, with_tensors=True))
    samples = {}
    for path in paths:
        _, leaf = by_path.get(path, ("", None))
        if isinstance(leaf, torch.Tensor) and leaf.dtype in TO_NAME:
            elements = leaf.detach().flatten()
            sample = elements[:: 1 + len(elements) // SAMPLED_ELEMENTS].cpu().resolve_conj()
            content = tensor_bytes(sample.resolve_neg().contiguous())
            samples[path] = TO_NAME[leaf.dtype], str(tuple(leaf.shape)), bytes(content).hex()
    return samples


def _differences(first: _Samples, other: _Samples, paths: Iterable[str]) -> list[Difference]:
    """Compare the samples of tensors, except those of different dtypes or shapes."""
    differences = []
    for path in paths:
        one = first.get(path)
        two = other.get(path)
        if one and two and one[:2] == two[:2]:
            samples = bytes.fromhex(one[2]), bytes.fromhex(two[2])
            differences.append(compare_samples(one[0], *samples))
    return differences


def _report_tensors(
    rank: int, paths: list[str], num_compared: int, differences: list[Difference], warns: bool
) -> None:
    """Warn of tensors that differ from those of rank 0.

    Unless `warns`, refuse them where they have nothing in common, before anything is lost.
    """
    are_alike = len(differences) == num_compared
    is_drift = are_alike and not any(difference.is_unrelated for difference in differences)
    if not (is_drift or warns):
        raise InvalidShardingError(
            f"The tensors {summarize_keys(paths)} differ between rank 0 and rank {rank}, and "
            "are neither shards nor part of an object: one rank's would be saved, the others "
            f"lost. {_WAY_OUT}"
        )
    contrast = ""
    if not are_alike:
        contrast = " in shape or dtype, or are on one of them alone"
    if differences:
        contrast += f", by {largest_of(differences)}"
    logger.warning(
        "the tensors %s differ between rank 0 and rank %d%s; the checkpoint gets rank 0's. %s",
        summarize_keys(paths),
        rank,
        contrast,
        _WAY_OUT,
    )


def _warn_of_values(rank: int, paths: list[str]) -> None:
    # "" is all of it: worth naming only when no part differs.
    named = list(filter(None, paths)) or paths
    if named:
        logger.warning(
            "common state differs between rank 0 and rank %d in %s; the checkpoint gets rank 0's. "
            "Per-rank values belong in a ShardedObject, values that need no saving in a "
            "LocalNonpersistentObject.",
            rank,
            summarize_keys(named),
        )


_WAY_OUT = (
    "Put the model or the optimizer itself into the state dict, in place of its "
    "state_dict(). Or wrap what each rank has in a ShardedTensor or ShardedObject (copies, "
    "of which one is stored, in ShardedTensor.from_rank_offsets(key, tensor, "
    "replica_id=rank)), and what needs no saving in a LocalNonpersistentObject."
)


def _plain(common: Any, with_tensors: bool) -> Any:
    """Return a tree with dicts for leaves that may hold tensors.

    They are leaves for the codec. Tensors become holes if they are left out.
    """

    def plain(_: Position, node: Any) -> Any:
        if isinstance(node, torch.Tensor) and not with_tensors:
            return HOLE
        if isinstance(node, tuple | deque) and len(node):
            return dict(enumerate(node))
        if isinstance(node, dict):
            return dict(node)
        return node

    return map_nodes(plain, common, is_plain_container)


# --- Drift ----------------------------------------------------------------------------------------


UNRELATED_SHARE = 0.5
"""Share of difference from which two tensors are unrelated. It is the share of the energy of both
(1 for independent values around 0), or of their integers.
"""


class Difference(NamedTuple):
    """The difference of two samples.

    Attributes:
        absolute: the largest difference of two elements; infinite or NaN next to a number count
            as infinite.
        relative: the largest difference as a share of the largest element.
        is_unrelated: the samples have nothing in common.
    """

    absolute: float
    relative: float
    is_unrelated: bool


def largest_of(differences: Iterable[Difference]) -> str:
    """Describe the largest difference of some samples."""
    absolute = max(difference.absolute for difference in differences)
    relative = max(difference.relative for difference in differences)
    return f"up to {absolute:.3g} ({relative:.3g} of the largest element), in samples of them"


def compare_samples(dtype: str, first: bytes, second: bytes) -> Difference:
    """Compare the elements of two samples; `dtype` is a safetensors name."""
    one = _numbers(dtype, first)
    other = _numbers(dtype, second)
    differs = (one != other) & ~(np.isnan(one) & np.isnan(other))
    if not differs.any():
        return Difference(0.0, 0.0, False)
    with np.errstate(all="ignore"):
        distance = np.abs(one - other)
        absolute = float(np.where(np.isnan(distance), np.inf, distance)[differs].max())
    numbers = np.abs(np.concatenate((one, other)))
    largest = float(numbers.max(where=np.isfinite(numbers), initial=0.0))
    relative = np.inf
    if np.isfinite(absolute):
        relative = absolute / largest
    is_exact = not FROM_NAME[dtype].is_floating_point and not FROM_NAME[dtype].is_complex
    if is_exact:
        return Difference(absolute, relative, bool(differs.mean() > UNRELATED_SHARE))
    return Difference(absolute, relative, _are_unrelated(one, other))


def _numbers(dtype: str, sample: bytes) -> npt.NDArray[np.float64]:
    items = torch.frombuffer(bytearray(sample), dtype=FROM_NAME[dtype])
    if items.is_complex():
        items = torch.view_as_real(items)
    array: npt.NDArray[Any] = to_numpy(items)
    return array.ravel().astype(np.float64)


def _are_unrelated(one: npt.NDArray[np.float64], other: npt.NDArray[np.float64]) -> bool:
    # Where a run has diverged on both, it has the same values.
    are_equal = (one == other) | (np.isnan(one) & np.isnan(other))
    are_finite = np.isfinite(one) & np.isfinite(other)
    if (are_finite | are_equal).mean() < UNRELATED_SHARE:
        return True
    one = one[are_finite]
    other = other[are_finite]
    return bool(((one - other) ** 2).sum() >= UNRELATED_SHARE * (one**2 + other**2).sum())
