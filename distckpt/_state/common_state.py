"""Common state: everything in a state dict that is not sharded.

It is saved once, from rank 0, and compared between ranks.
"""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from distckpt._base.errors import InvalidShardingError
from distckpt._base.messages import summarize_keys
from distckpt._base.tree import HOLE, Position, copied, is_plain_container, map_nodes
from distckpt._format import codec
from distckpt._format.checksum import checksum
from distckpt._mapping.wrappers import CommonStateDict, StateDict
from distckpt._ranks.collectives import Ranks

logger = logging.getLogger(__name__)

COMMON_KEY = "distckpt.common_state"
"""Key of the object that holds common state in a checkpoint; reserved."""
CONTENT_METADATA = "content_metadata"
"""Entry of common state that describes the content of a checkpoint."""

_Hashes: TypeAlias = Mapping[str, Sequence[Any]]
"""For each leaf by path, its hash, and whether it has tensors."""


def object_text(key: str) -> str:
    """Name an object at the beginning of a message."""
    return "Common state" if key == COMMON_KEY else f"The object {key!r:.300}"


def storable_metadata(metadata: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a copy of content metadata without the process group, which cannot be stored."""
    if metadata is None:
        return None
    return {name: value for name, value in metadata.items() if name != "dp_cp_group"}


def comparable(
    common: CommonStateDict, preprocess: Callable[[CommonStateDict], StateDict] | None
) -> CommonStateDict:
    """Prepare common state for comparison. The caller's function gets a copy, so it cannot change
    what is saved.
    """
    if preprocess is None:
        return common
    return preprocess(copied(common))


def digest(common: CommonStateDict) -> int:
    """Return a hash of common state, of 61 bits, for `check_differences`."""
    return checksum(codec.encode(common)) >> 3


def check_differences(ranks: Ranks, common: CommonStateDict, digest: int) -> None:
    """Compare common state: ranks exchange hashes, and look at single entries only if those differ.

    Values that differ are warned about.

    Raises:
        InvalidShardingError: on all ranks, if tensors differ, as most of them are part of
            something.
    """
    if ranks.all_equal(digest):
        return
    gathered = ranks.gather(json.dumps(_hashes(common)).encode())
    with ranks.phase("compare common state", decision=True):
        if ranks.is_coordinator:
            first, *others = [json.loads(text) for text in gathered]
            for rank, other in enumerate(others, start=1):
                _compare(first, rank, other)


def _hashes(common: CommonStateDict) -> dict[str, tuple[str, bool]]:
    """Return, for each leaf by path, its hash, and whether it has tensors: whether it has another
    hash without them.
    """
    with_tensors = codec.fingerprints(_plain(common, with_tensors=True))
    without = codec.fingerprints(_plain(common, with_tensors=False))
    return {path: (digest, digest != without.get(path)) for path, digest in with_tensors.items()}


def _compare(first: _Hashes, rank: int, other: _Hashes) -> None:
    """Compare a rank with rank 0: refuse tensors that differ, and warn of other values."""
    paths = sorted(path for path in {**first, **other} if first.get(path) != other.get(path))
    tensors = [path for path in paths if _has_tensors(first, path) or _has_tensors(other, path)]
    if tensors:
        raise InvalidShardingError(
            f"The tensors {summarize_keys(tensors)} differ between rank 0 and rank {rank}, and "
            "are neither shards nor part of an object: one rank's would be saved, the others "
            "lost. Put the model or the optimizer itself into the state dict, in place of its "
            "state_dict(). Or wrap what each rank has in a ShardedTensor or ShardedObject (copies, "
            "of which one is stored, in ShardedTensor.from_rank_offsets(key, tensor, "
            "replica_id=rank)), and what needs no saving in a LocalNonpersistentObject."
        )
    if paths:
        # "" is all of it: worth naming only when no part differs.
        named = list(filter(None, paths)) or paths
        logger.warning(
            "common state differs between rank 0 and rank %d in %s; the checkpoint gets rank 0's. "
            "Per-rank values belong in a ShardedObject, values that need no saving in a "
            "LocalNonpersistentObject.",
            rank,
            summarize_keys(named),
        )


def _has_tensors(hashes: _Hashes, path: str) -> bool:
    return path in hashes and bool(hashes[path][1])


def _plain(common: Any, with_tensors: bool) -> Any:
    """Return a tree with dicts for OrderedDicts, which are leaves for the codec, and holes for
    tensors if they are left out.
    """

    def plain(_: Position, node: Any) -> Any:
        if isinstance(node, torch.Tensor) and not with_tensors:
            return HOLE
        return dict(node) if type(node) is OrderedDict else node

    return map_nodes(plain, common, is_plain_container)
