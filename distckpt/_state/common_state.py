"""Common state: everything in a state dict that is not sharded. Saved once, from rank 0, and
compared between ranks.
"""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from distckpt._base.errors import InvalidShardingError
from distckpt._base.messages import summarize_keys
from distckpt._base.tree import copied
from distckpt._format import codec
from distckpt._format.checksum import checksum
from distckpt._format.codec import HOLE
from distckpt._mapping.wrappers import CommonStateDict, StateDict
from distckpt._ranks.collectives import Ranks

logger = logging.getLogger(__name__)

COMMON_KEY = "distckpt.common_state"
"""Key of the object that holds common state in a checkpoint; reserved."""
CONTENT_METADATA = "content_metadata"
"""Entry of common state that describes the content of a checkpoint."""


def object_text(key: str) -> str:
    """Name an object at the beginning of a message."""
    return "Common state" if key == COMMON_KEY else f"The object {key!r:.300}"


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
    """Compare common state: ranks exchange hashes, and describe the entries only where those
    differ.

    Values that differ are warned about. InvalidShardingError on all ranks for tensors: most are a
    part of something.
    """
    if ranks.all_equal(digest):
        return
    # The path of a leaf, its hash, and whether it has tensors: then it has another hash without
    # them.
    own, bare = (codec.fingerprints(_plain(common, with_tensors)) for with_tensors in (True, False))
    described = {path: (digest, digest != bare.get(path)) for path, digest in own.items()}
    gathered = ranks.gather(json.dumps(described).encode())
    with ranks.phase("compare common state", decision=True):
        if ranks.is_coordinator:
            first, *others = [json.loads(text) for text in gathered]
            for rank, other in enumerate(others, start=1):
                paths = sorted(
                    path for path in {**first, **other} if first.get(path) != other.get(path)
                )
                tensors = [
                    path
                    for path in paths
                    if any(found.get(path, (0, False))[1] for found in (first, other))
                ]
                if tensors:
                    raise InvalidShardingError(
                        f"The tensors {summarize_keys(tensors)} differ between rank 0 and rank "
                        f"{rank}, and are neither shards nor part of an object: one rank's would "
                        "be saved, the others lost. Put the model or the optimizer itself into "
                        "the state dict, in place of its state_dict(); or wrap what each rank has "
                        "in a ShardedTensor or ShardedObject, copies of which one is enough in "
                        "ShardedTensor.from_rank_offsets(key, tensor, replica_id=rank), and what "
                        "needs no saving in a LocalNonpersistentObject."
                    )
                if paths:
                    # "" is all of it: worth naming only when no part differs.
                    logger.warning(
                        "common state differs between rank 0 and rank %d in %s; the checkpoint "
                        "gets that of rank 0. Per-rank values belong in a ShardedObject, values "
                        "that need no saving in a LocalNonpersistentObject.",
                        rank, summarize_keys(filter(None, paths) if any(paths) else paths),
                    )  # fmt: skip


def _plain(node: Any, with_tensors: bool) -> Any:
    """Return a tree with dicts for OrderedDicts, which are leaves for the codec, and holes for
    tensors if asked to.
    """
    if isinstance(node, torch.Tensor):
        return node if with_tensors else HOLE
    if type(node) in (dict, OrderedDict):
        return {key: _plain(value, with_tensors) for key, value in node.items()}
    return (
        type(node)(_plain(item, with_tensors) for item in node)
        if type(node) in (list, tuple)
        else node
    )
