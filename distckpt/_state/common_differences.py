"""Comparison of common state between ranks, where hashes of it differ."""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from distckpt._base.dtypes import TO_NAME
from distckpt._base.errors import InvalidShardingError
from distckpt._base.memory import tensor_bytes
from distckpt._base.messages import summarize_keys
from distckpt._base.tree import HOLE, Position, is_plain_container, map_nodes
from distckpt._format import codec
from distckpt._mapping.wrappers import CommonStateDict
from distckpt._ranks.collectives import Ranks
from distckpt._state.drift import Difference, compare_samples, largest_of

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
                pairs = _Pairs(gathered[0], gathered[rank], decoded[0], decoded[rank])
                _compare(rank, pairs, paths, warns)


class _Pairs(NamedTuple):
    """Common state of two ranks, as hashes and samples of tensors.

    The first one is the coordinator.
    """

    first: _Hashes
    other: _Hashes
    first_samples: _Samples
    other_samples: _Samples


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
    lists_of_ranks = {tuple(_tensors(first, other)) for other in others}
    share = max(1, MAX_SAMPLES // len(lists_of_ranks))
    selected: set[str] = set()
    for paths in lists_of_ranks:
        selected.update(paths[:: 1 + len(paths) // share])
    return sorted(selected)


def _tensors(first: _Hashes, other: _Hashes) -> list[str]:
    return [path for path in _differing(first, other) if _have_tensors((first, other), path)]


def _differing(first: _Hashes, other: _Hashes) -> list[str]:
    return sorted(path for path in {**first, **other} if first.get(path) != other.get(path))


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


def _compare(rank: int, pairs: _Pairs, sampled: Sequence[str], warns: bool) -> None:
    """Compare a rank with rank 0, and warn of differences.

    Unless `warns`, refuse tensors that have nothing in common, before anything is lost.
    """
    paths = _differing(pairs.first, pairs.other)
    tensors = _tensors(pairs.first, pairs.other)
    if tensors:
        _compare_tensors(rank, tensors, pairs, sampled, warns)
    # "" is all of it: worth naming only when no part differs.
    values = [path for path in paths if path not in tensors]
    named = list(filter(None, values)) or values
    if named:
        logger.warning(
            "common state differs between rank 0 and rank %d in %s; the checkpoint gets rank 0's. "
            "Per-rank values belong in a ShardedObject, values that need no saving in a "
            "LocalNonpersistentObject.",
            rank,
            summarize_keys(named),
        )


def _compare_tensors(
    rank: int, paths: Sequence[str], pairs: _Pairs, sampled: Sequence[str], warns: bool
) -> None:
    compared = sorted({*paths} & {*sampled})
    differences = []
    for path in compared:
        difference = _difference(pairs, path)
        if difference is not None:
            differences.append(difference)
    are_alike = len(differences) == len(compared)
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


_WAY_OUT = (
    "Put the model or the optimizer itself into the state dict, in place of its "
    "state_dict(). Or wrap what each rank has in a ShardedTensor or ShardedObject (copies, "
    "of which one is stored, in ShardedTensor.from_rank_offsets(key, tensor, "
    "replica_id=rank)), and what needs no saving in a LocalNonpersistentObject."
)


def _difference(pairs: _Pairs, path: str) -> Difference | None:
    """Compare the samples of two tensors; None without common elements."""
    first = pairs.first_samples.get(path)
    other = pairs.other_samples.get(path)
    if first is None or other is None or first[:2] != other[:2]:
        return None
    return compare_samples(first[0], bytes.fromhex(first[2]), bytes.fromhex(other[2]))


def _have_tensors(gathered: Iterable[_Hashes], path: str) -> bool:
    return any(hashes[path][1] for hashes in gathered if path in hashes)


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
