"""Comparing common state between ranks, where hashes of it differ."""

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
"""For each leaf by path, its hash, and whether it has tensors."""
_Samples: TypeAlias = Mapping[str, Sequence[str]]
"""For each tensor by path, its dtype, shape, and elements in hexadecimal."""
MAX_SAMPLES = 256
"""Tensors that differ of which samples are compared, one for each rank at least."""
SAMPLED_ELEMENTS = 256


def check_differences(ranks: Ranks, common: CommonStateDict, digest: int, warns: bool) -> None:
    """Compare common state: ranks exchange hashes, and look at single entries only if those differ.

    Collective operation: all ranks must call it. Values that differ are warned about, and so are
    tensors that have drifted apart; the coordinator's are saved.

    Raises:
        InvalidShardingError: on all ranks, if tensors have nothing in common, unless `warns`. Most
            of them are part of something.
    """
    if ranks.all_equal(digest):
        return
    own = _hashes(common)
    gathered = [json.loads(text) for text in ranks.gather(json.dumps(own).encode())]
    paths = ranks.decide_json("compare common state", lambda: _differing_tensors(gathered))
    samples = ranks.gather(json.dumps(_samples(common, paths)).encode()) if paths else []
    with ranks.phase("compare common state", decision=True):
        if ranks.is_coordinator:
            decoded = [json.loads(text) for text in samples] or [{}] * ranks.size
            for rank in range(1, ranks.size):
                pairs = _Pairs(gathered[0], gathered[rank], decoded[0], decoded[rank])
                _compare(rank, pairs, paths, warns)


class _Pairs(NamedTuple):
    """Common state of the coordinator and of another rank: hashes, and samples of tensors."""

    first: _Hashes
    other: _Hashes
    first_samples: _Samples
    other_samples: _Samples


def _hashes(common: CommonStateDict) -> dict[str, tuple[str, bool]]:
    """Return, for each leaf by path, its hash, and whether it has tensors: whether it has another
    hash without them.
    """
    with_tensors = codec.fingerprints(_plain(common, with_tensors=True))
    without = codec.fingerprints(_plain(common, with_tensors=False))
    return {path: (digest, digest != without.get(path)) for path, digest in with_tensors.items()}


def _differing_tensors(gathered: Sequence[_Hashes]) -> list[str]:
    """Return the paths of tensors whose samples are compared: evenly of those in which a rank
    differs from the coordinator, and one at least for each such rank.
    """
    first, *others = gathered
    of_ranks = {tuple(_tensors(first, other)) for other in others}
    share = max(1, MAX_SAMPLES // len(of_ranks))
    return sorted({path for paths in of_ranks for path in paths[:: 1 + len(paths) // share]})


def _tensors(first: _Hashes, other: _Hashes) -> list[str]:
    return [path for path in _differing(first, other) if _have_tensors((first, other), path)]


def _differing(first: _Hashes, other: _Hashes) -> list[str]:
    return sorted(path for path in {**first, **other} if first.get(path) != other.get(path))


def _samples(common: CommonStateDict, paths: Sequence[str]) -> dict[str, tuple[str, str, str]]:
    """Return the dtype and shape, and elements in hexadecimal, of those leaves that are tensors."""
    by_path = codec.leaves(_plain(common, with_tensors=True))
    found = {}
    for path in paths:
        _, leaf = by_path.get(path, ("", None))
        if isinstance(leaf, torch.Tensor) and leaf.dtype in TO_NAME:
            elements = leaf.detach().flatten()
            sample = elements[:: 1 + len(elements) // SAMPLED_ELEMENTS].cpu().resolve_conj()
            content = tensor_bytes(sample.resolve_neg().contiguous())
            found[path] = TO_NAME[leaf.dtype], str(tuple(leaf.shape)), bytes(content).hex()
    return found


def _compare(rank: int, pairs: _Pairs, sampled: Sequence[str], warns: bool) -> None:
    """Compare a rank with rank 0: warn of differences, and refuse tensors that have nothing in
    common, before anything is lost, unless `warns`.
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
    found = [_difference(pairs, path) for path in compared]
    differences = [difference for difference in found if difference is not None]
    are_alike = len(differences) == len(found)
    is_drift = are_alike and not any(difference.is_unrelated for difference in differences)
    if not (is_drift or warns):
        raise InvalidShardingError(
            f"The tensors {summarize_keys(paths)} differ between rank 0 and rank {rank}, and "
            "are neither shards nor part of an object: one rank's would be saved, the others "
            f"lost. {_WAY_OUT}"
        )
    logger.warning(
        "the tensors %s differ between rank 0 and rank %d%s%s; the checkpoint gets rank 0's. %s",
        summarize_keys(paths),
        rank,
        "" if are_alike else " in shape or dtype, or are on one of them alone",
        f", by {largest_of(differences)}" if differences else "",
        _WAY_OUT,
    )


_WAY_OUT = (
    "Put the model or the optimizer itself into the state dict, in place of its "
    "state_dict(). Or wrap what each rank has in a ShardedTensor or ShardedObject (copies, "
    "of which one is stored, in ShardedTensor.from_rank_offsets(key, tensor, "
    "replica_id=rank)), and what needs no saving in a LocalNonpersistentObject."
)


def _difference(pairs: _Pairs, path: str) -> Difference | None:
    """Compare the samples of two tensors; None if they have no elements to compare."""
    first, other = pairs.first_samples.get(path), pairs.other_samples.get(path)
    if first is None or other is None or first[:2] != other[:2]:
        return None
    return compare_samples(first[0], bytes.fromhex(first[2]), bytes.fromhex(other[2]))


def _have_tensors(gathered: Iterable[_Hashes], path: str) -> bool:
    return any(hashes[path][1] for hashes in gathered if path in hashes)


def _plain(common: Any, with_tensors: bool) -> Any:
    """Return a tree with dicts for what is a leaf for the codec and may hold tensors, and holes for
    tensors if they are left out.
    """

    def plain(_: Position, node: Any) -> Any:
        if isinstance(node, torch.Tensor) and not with_tensors:
            return HOLE
        if isinstance(node, tuple | deque) and len(node):
            return dict(enumerate(node))
        return dict(node) if isinstance(node, dict) else node

    return map_nodes(plain, common, is_plain_container)
