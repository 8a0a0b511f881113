"""What a load finds out besides reading: whether requests fit each other and the checkpoint, and if it was removed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

from distckpt import _storage, core, validation
from distckpt._collectives import Ranks
from distckpt._common_state import COMMON_KEY
from distckpt._shards import ShardTable, merge_tables
from distckpt.strategies.base import LoadShardedStrategy
from distckpt.validation import StrictHandling, handle_mismatch


def compare_requests(ranks: Ranks, table: ShardTable) -> None:
    """Check that the main replicas of all ranks cover each requested tensor exactly once.

    Collective: every rank calls. One process alone may ask for any part.
    """
    if ranks.size == 1:
        return
    tables = ranks.gather(table.to_bytes())
    with ranks.phase("check the requested shards", decision=True):
        if ranks.is_coordinator:
            validation.validate_shards(merge_tables(ShardTable.all_from_bytes(tables)))


def compare_keys(
    ranks: Ranks, mode: StrictHandling, asked: set[str], strategy: LoadShardedStrategy, location: str
) -> tuple[set[str], set[str]]:
    """Find missing keys (the same on all ranks) and this rank's unexpected keys, and do what the mode says."""
    if not StrictHandling.requires_explicit_ckpt_mismatch_check(mode):
        return set(), set()
    names = b""
    with ranks.phase("read the keys of the checkpoint", decision=True):
        if ranks.is_coordinator:
            stored = {shard.key for shard in strategy.load_sharded_metadata(location).values()} - {COMMON_KEY}
            names = json.dumps(sorted(stored)).encode()
    known = set(json.loads(ranks.broadcast(names)))
    asked_by_all = [set(json.loads(text)) for text in ranks.all_gather(json.dumps(sorted(asked)).encode())]
    unexpected = asked - known
    missing = known.difference(*asked_by_all) if StrictHandling.requires_global_app_metadata(mode) else set()
    # Every rank judges the keys of all, so that all raise the same error.
    unexpected_of_all = set().union(*asked_by_all) - known
    handle_mismatch(mode, missing, unexpected_of_all, known, location, is_speaker=ranks.is_coordinator)
    return missing, unexpected


@contextlib.contextmanager
def noticing_removal(ranks: Ranks, location: str) -> Iterator[None]:
    """Say that a checkpoint was removed while it was read, instead of calling it damaged."""
    try:
        yield
    except (core.CorruptCheckpointError, OSError) as error:
        if ranks.is_known_to_all(error) or _storage.exists(location):
            raise
        raise core.CheckpointNotFoundError(
            f"{location!r} was removed while it was being loaded, by whatever limits how many checkpoints are kept, "
            "perhaps. What was loaded so far is incomplete: load another checkpoint."
        ) from error
