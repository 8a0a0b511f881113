"""Moves of a state dict between the memories of ranks."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from distckpt._base.messages import check_num_bytes, check_path
from distckpt._base.options import LoadOptions, MoveOptions, MoveReport, check_options, publish
from distckpt._checkpoint.opening import find_checkpoint
from distckpt._move.agreements import Agreements
from distckpt._move.host_memory import HostMemory
from distckpt._move.live_source import LiveSource, describe_given, with_shards
from distckpt._operations.load import read_targets, restore
from distckpt._operations.load_request import LoadRequest, check_targets, describe_targets
from distckpt._operations.shard_source import ShardSource, source_of
from distckpt._ranks.collectives import PhaseTimer, Ranks
from distckpt._storage import locations
from distckpt.mapping._wrappers import ShardedStateDict
from distckpt.rules._rule import Rule
from distckpt.rules._rules import check_rules

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class MoveRequest:
    """The request to move a state dict.

    Attributes:
        rules: rules from the names of this rank's state to the names of the move.
        target_rules: rules from the names of this rank's targets to the names of the move.
        family: afterwards, the rules of the model's family, for both.
        process_group: the ranks that move together.
        fallback: location of a checkpoint with the tensors that no rank gives.
        options: options of the caller.
        place: name of the route, for reports.
        version: version of the state.
        compares: whether values that arrive are compared with the values that were sent.
        verb: name of the call in the journal.
    """

    rules: Sequence[Rule] = ()
    target_rules: Sequence[Rule] = ()
    family: str | os.PathLike[str] | None = None
    process_group: Any = None
    fallback: str | os.PathLike[str] | None = None
    options: MoveOptions = field(default_factory=MoveOptions)
    place: str = "in memory"
    version: int | None = None
    compares: bool = False
    verb: str = "redistribute"

    def check(self) -> None:
        """Check the options.

        Raises:
            TypeError: a value is of a wrong type.
            ValueError: an option is not one of its values.
        """
        check_options(self.options)
        check_rules(self.rules)
        check_rules(self.target_rules)
        check_path("family", self.family)
        check_path("fallback", self.fallback)
        check_num_bytes("max_inflight_bytes", self.options.max_inflight_bytes)
        if self.family == "auto" and self.fallback is None:
            # A Route has no fallback.
            auto = " reads the config.json of `fallback`: give it, or"
            if self.verb != "redistribute":
                auto = " has no directory to read here: give"
            raise ValueError(f"family='auto'{auto} the path of a config.json as family.")

    def of_all_ranks(self) -> dict[str, object]:
        """Return the settings that must be equal on all ranks."""
        options = asdict(replace(self.options, on_report=None))
        has_fallback = self.fallback is not None
        return {"has_fallback": has_fallback, "verify": self.compares, **options}

    @property
    def directory(self) -> str:
        """The location of the fallback; empty if there is none."""
        return "" if self.fallback is None else locations.normalize(self.fallback)

    @property
    def as_load(self) -> LoadRequest:
        """The request for this rank's targets."""
        options = LoadOptions(
            validate_access_integrity=False,
            allow_dtype_cast=self.options.allow_dtype_cast,
            max_inflight_bytes=self.options.max_inflight_bytes,
        )
        return LoadRequest(
            path=self.place,
            rules=self.target_rules,
            family=self.family,
            process_group=self.process_group,
            fills_values=True,
            options=options,
        )


def run_move(
    ranks: Ranks,
    old_state: ShardedStateDict,
    new_state: ShardedStateDict,
    request: MoveRequest,
    agreements: Agreements,
    memory: HostMemory,
) -> MoveReport:
    """Fill a state dict from the states of all ranks.

    See `redistribute`. Collective operation: all ranks must call it.
    """
    timer = PhaseTimer(request.verb, ranks.rank, request.place)
    load = request.as_load
    directory = request.directory
    with timer.phase("plan"):
        given = describe_given(ranks, old_state, request.rules, request.family, directory)
        fallback = _fallback(ranks, load, directory)
        source = LiveSource(
            ranks, given, fallback, request.options, agreements, memory, request.compares
        )
        targets_state = with_shards(new_state, ranks.rank)
        targets = describe_targets(
            ranks, targets_state, load, request.place, lambda: source, directory
        )
        differences = check_targets(ranks, targets)
    with timer.phase("move"):
        read = read_targets(ranks, targets, differences)
    assert source.plan is not None
    moved = replace(read, num_bytes=source.plan.num_bytes)
    figures = restore(ranks, new_state, moved, timer, "move").figures
    report = MoveReport(
        request.place, *figures, sent_bytes=source.plan.sent_bytes, version=request.version
    )
    if ranks.is_coordinator:
        logger.info("%s", report)
    if request.options.on_report is not None:
        publish(report, request.options.on_report)
    return report


def _fallback(ranks: Ranks, request: LoadRequest, location: str) -> ShardSource | None:
    """Return the checkpoint with tensors that no rank holds.

    Collective operation: all ranks must call it.
    """
    if not location:
        return None
    checkpoint = find_checkpoint(ranks, location)
    with ranks.phase("open the fallback"):
        return source_of(ranks, checkpoint, request.options, request.process_group)
