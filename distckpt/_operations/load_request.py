"""What a load asks of a checkpoint, compared between the ranks and with what is stored."""

from __future__ import annotations

import importlib
import json
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import length_hint
from typing import Any, get_args

from distckpt._base.errors import InvalidShardingError, LoadMismatchError
from distckpt._base.messages import check_choice, check_num_bytes, summarize_keys
from distckpt._base.options import LoadOptions, ParallelLoad, check_options
from distckpt._base.tree import at, leaves
from distckpt._format.marker import names_of_module
from distckpt._mapping.sharded_tensor import ShardedTensor
from distckpt._mapping.wrappers import ShardedStateDict, StateDict
from distckpt._models import objects
from distckpt._models.resolve import needs_stored, resolve, settings_of
from distckpt._models.whole import Coverage, coverage_of, refuse_left_out
from distckpt._operations.shard_source import ShardSource
from distckpt._plan.translate import decide_ties, match_flags, stored_names
from distckpt._ranks.collectives import Ranks
from distckpt._rules.rule import Rule
from distckpt._rules.rules import Assemble, check_rules
from distckpt._state import flatten
from distckpt._state.shards import (
    Shard,
    ShardTable,
    find_ties,
    merge_tables,
    shard_table,
)
from distckpt._state.stored_form import StoredEntry, may_be_complex
from distckpt._state.strictness import StrictHandling, handle_mismatch
from distckpt._state.validation import validate_part, validate_shards

logger = logging.getLogger(__name__)

_MODES_WITH_RULES = (StrictHandling.ASSUME_OK_UNEXPECTED, StrictHandling.RAISE_UNEXPECTED)
_MODES_OF_ALL = (*_MODES_WITH_RULES, StrictHandling.RAISE_ALL)
"""Modes in which nothing that is requested may be left out."""


@dataclass(frozen=True, kw_only=True)
class LoadRequest:
    """How to load a state dict.

    Attributes:
        path: of the checkpoint.
        mode: how keys that only the checkpoint or only the request has are handled.
        strict: the same in the caller's words, if these are others.
        rules: how the requested tensors are made from those of the checkpoint.
        family: afterwards, the rules of the model's family.
        process_group: the ranks that load together.
        warns_of_values: warn of plain values for which nothing is stored, whatever the mode:
            Megatron leaves them out of what it returns.
        fills_values: put what is loaded for plain values into the state dict that was given.
        options: of the caller.
        made: is filled: places of modules that got memory, and have no values before the load.
    """

    path: str | os.PathLike[str]
    mode: StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED
    strict: str | None = None
    rules: Sequence[Rule] = ()
    family: str | os.PathLike[str] | None = None
    process_group: Any = None
    warns_of_values: bool = False
    fills_values: bool = False
    options: LoadOptions = field(default_factory=LoadOptions)
    made: list[Any] = field(default_factory=list)

    @property
    def asks_for_all(self) -> bool:
        """Tell whether nothing that is requested may be left out."""
        return self.mode in _MODES_OF_ALL

    def check(self) -> None:
        """Check the options.

        Raises:
            TypeError: a value is of a wrong type.
            ValueError: an option is not one of its values.
        """
        options = self.options
        check_options(options)
        check_rules(self.rules)
        check_num_bytes("max_inflight_bytes", options.max_inflight_bytes)
        check_choice("parallel_load", options.parallel_load, get_args(ParallelLoad))
        has_rules = bool(self.rules) or self.family is not None
        if has_rules and self.mode not in _MODES_WITH_RULES:
            raise ValueError(
                "With rules, strict can be 'assume_ok_unexpected' or 'raise_unexpected' only."
            )

    def of_all_ranks(self) -> dict[str, object]:
        """Return what must be the same on all ranks."""
        options = self.options
        return {
            "strategy": options.strategy,
            "strict": self.mode.value if self.strict is None else self.strict,
            "verify": options.verify,
            "parallel_load": options.parallel_load,
            "validate_access_integrity": options.validate_access_integrity,
            # Ranks exchange more where there are some. Their type is checked afterwards.
            "number of rules": length_hint(self.rules),
            "has a family": self.family is not None,
        }


@dataclass(frozen=True)
class Targets:
    """What this rank wants of a checkpoint.

    Attributes:
        described: the state dict with its objects described.
        resolved: the same, with what the checkpoint has of them.
        split: the flattened state dict.
        entries: of the checkpoint by key; empty when they are not needed.
        stored: those that the request is compared with.
        ties: shards that are not stored, and the numbers of those whose values they get.
        table: its shards, without data; None where they are not compared between ranks.
        rules: from the keys of the request to those of the checkpoint.
    """

    described: objects.Description
    resolved: objects.Description
    split: flatten.SplitState
    entries: Mapping[str, StoredEntry]
    stored: Mapping[str, StoredEntry]
    ties: Mapping[int, int]
    table: ShardTable | None
    rules: Sequence[Rule]

    @property
    def requested(self) -> set[str]:
        """Keys of the shards that are looked for in the checkpoint."""
        return {s.key for number, s in enumerate(self.split.shards) if number not in self.ties}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Global shapes of the tensors by key."""
        tensors = (shard for shard in self.split.shards if isinstance(shard, ShardedTensor))
        return {tensor.key: tuple(tensor.global_shape) for tensor in tensors}


@dataclass(frozen=True)
class Differences:
    """Keys that only the checkpoint or only the request has.

    Attributes:
        missing: only the checkpoint has them; the same on all ranks.
        left_out: of them, where keys are not compared, what objects do not take.
        unexpected: this rank requests them.
        unexpected_of_all: some rank requests them.
    """

    missing: frozenset[str] = frozenset()
    unexpected: frozenset[str] = frozenset()
    unexpected_of_all: frozenset[str] = frozenset()
    left_out: frozenset[str] = frozenset()


def describe_targets(
    ranks: Ranks,
    state_dict: ShardedStateDict,
    request: LoadRequest,
    location: str,
    choose_source: Callable[[], ShardSource],
) -> tuple[ShardSource, Targets]:
    """Describe the targets of a load, and choose their source.

    Collective operation: all ranks must call it.
    """
    with ranks.phase("flatten the state dict") as vote:
        source = choose_source()
        described = objects.describe_objects(
            ranks,
            state_dict,
            loads=True,
            materialize=request.options.materialize,
            made=request.made,
        )
        split = flatten.split(described.state_dict)
        _check_modules_are_different(described, split)
        ties = find_ties(split.shards)
        rules = _rules(request, location, split.shards, ties, source)
        are_complex = may_be_complex(split.shards)
        depends = are_complex or (not rules and _are_of_other_keys(ties, split))
        vote.number = _how_much_is_needed(described, request.mode, depends)
    source, entries, settings = _look_up(ranks, source, described, request, vote.largest)
    with ranks.phase("describe the targets"):
        resolved = resolve(ranks.rank, described, entries, settings, source.shared_value)
        if resolved.state_dict is not described.state_dict or are_complex:
            split = flatten.split(resolved.state_dict, {} if rules else entries)
            ties = find_ties(split.shards)
        stored = _without_skipped(entries, described, resolved)
        absent = absent_ties(split.shards, ties, stored) if not rules else {}
        table = None if source.is_live else shard_table(split.shards, ties)
    return source, Targets(described, resolved, split, entries, stored, absent, table, rules)


def _check_modules_are_different(described: objects.Description, split: flatten.SplitState) -> None:
    """Refuse modules of a list that would all get the tensors of one.

    Lists hold stages, which may have copies of a tensor, but not of all.
    """
    modules = [place for place in described.places if place.kind is objects.Kind.MODULE]
    if len({place.prefix for place in modules}) == len(modules):
        return
    tensors = [leaves(at(described.state_dict, place.path)) for place in modules]
    keys = [frozenset(shard.key for _, shard in each if hasattr(shard, "key")) for each in tensors]
    if len(set(keys)) < len(keys):
        flatten.check_keys_are_different(split, [place.path for place in modules])


def _rules(
    request: LoadRequest,
    location: str,
    shards: Sequence[Shard],
    ties: Mapping[int, int],
    source: ShardSource,
) -> Sequence[Rule]:
    """Return the rules from the names of the request to those of the source."""
    shapes = {
        shard.key: tuple(shard.global_shape) for shard in shards if isinstance(shard, ShardedTensor)
    }
    of_family: Sequence[Rule] = ()
    if request.family is not None:
        of_family = source.rules_of_family(request.family, location, list(shapes))
    stored = source.shapes() if request.rules or of_family else None
    if stored is None:
        return (*request.rules, *of_family)
    pairs = ((shards[tie].key, shards[first].key) for tie, first in ties.items())
    shared = {key: to for key, to in pairs if key != to}
    return decide_ties(request.rules, of_family, shapes, shared, stored)


def _how_much_is_needed(described: objects.Description, mode: StrictHandling, depends: bool) -> int:
    """Return 0 when the keys of the checkpoint need not be known, 2 when stored settings are needed
    as well. `depends` tells whether what the shards are depends on the keys.
    """
    of_objects = needs_stored(described)
    compares = StrictHandling.requires_explicit_ckpt_mismatch_check(mode)
    return of_objects or compares or depends


def _look_up(
    ranks: Ranks,
    source: ShardSource,
    described: objects.Description,
    request: LoadRequest,
    needed: int,
) -> tuple[ShardSource, Mapping[str, StoredEntry], StateDict]:
    """Return the source for the objects, its entries, and their stored settings.

    `needed` is that of `_how_much_is_needed`, the largest of all ranks.
    """
    if not needed:
        return source, {}, {}
    if request.family is None and not request.rules:
        source = source.for_objects(described, needed > 1)
    entries = source.entries()
    settings = _stored_settings(ranks, source, described, entries) if needed > 1 else {}
    return source, entries, settings


def _are_of_other_keys(ties: Mapping[int, int], split: flatten.SplitState) -> bool:
    shards = split.shards
    return any(shards[tie].key != shards[first].key for tie, first in ties.items())


def _stored_settings(
    ranks: Ranks,
    source: ShardSource,
    described: objects.Description,
    entries: Mapping[str, StoredEntry],
) -> StateDict:
    with ranks.phase("read the settings of optimizers"):
        wanted = settings_of(described, entries)
        values = source.read_objects(list(wanted.values()))
    return dict(zip(wanted, values, strict=True))


def _without_skipped(
    entries: Mapping[str, StoredEntry],
    described: objects.Description,
    resolved: objects.Description,
) -> dict[str, StoredEntry]:
    """Leave out states of another number of ranks, of which no shard is requested or missing."""
    kept = {(place.name, place.kind) for place in resolved.places}
    skipped = {place.name for place in described.places if (place.name, place.kind) not in kept}
    return {key: entry for key, entry in entries.items() if key not in skipped}


def check_targets(
    ranks: Ranks, request: LoadRequest, location: str, source: ShardSource, targets: Targets
) -> Differences:
    """Refuse requests that contradict each other or ask for parts of objects; compare keys.

    Collective operation: all ranks must call it.

    Raises:
        InvalidShardingError: the requests of the ranks contradict each other.
        LoadMismatchError: keys differ, and the mode of the request raises.
    """
    validates = request.options.validate_access_integrity
    table = targets.table if validates is not False else None
    messages = _messages_of_all(ranks, table)
    requested = targets.requested
    with ranks.phase("check the requested shards", decision=True) as vote:
        if table is not None and ranks.is_coordinator:
            _validate(table, messages, whole=bool(validates))
        is_lenient = request.mode is StrictHandling.ASSUME_OK_UNEXPECTED
        compared = targets.stored if is_lenient else ()
        flags = match_flags(request.rules, targets.shapes) if request.rules else b""
        coverage = _coverage(targets, requested, compared, source)
        vote.number = len(coverage.of_modules | coverage.of_optimizers | coverage.unclaimed)
    # The members of a move may have rules of their own.
    if request.rules and not source.is_live:
        _warn_of_unmatched(request.rules, ranks.gather(flags))
    differences = Differences()
    compares = StrictHandling.requires_explicit_ckpt_mismatch_check(request.mode)
    if compares and not targets.rules:
        differences = _compare_keys(ranks, request, requested, targets, location)
    if vote.largest:
        left_out = refuse_left_out(ranks, coverage, targets.entries, location, source.is_live)
        return replace(differences, left_out=left_out)
    return differences


def _warn_of_unmatched(rules: Sequence[Rule], flags: Sequence[bytes]) -> None:
    """Name rules without a tensor on any rank, on the coordinator: others get no `flags`."""
    for rule, *matched in zip(rules, *flags, strict=False) if flags else ():
        if not any(matched) and not rule.optional:
            logger.warning(
                "%s matches no tensor that is requested: nothing is loaded through it. Correct the "
                "pattern, or set optional=True.",
                rule,
            )


def _messages_of_all(ranks: Ranks, table: ShardTable | None) -> Sequence[list[bytes]]:
    """Gather the tables of several ranks on the coordinator; nothing where there is one rank."""
    if table is None or ranks.size == 1:
        return ()
    return ranks.gather_once(table.to_messages())


def _validate(table: ShardTable, messages: Sequence[list[bytes]], *, whole: bool) -> None:
    """Validate the tables of all ranks, `messages`, or that of the only one: it may ask for parts
    unless it must ask for the `whole`.
    """
    tables, validate = [table], validate_shards if whole else validate_part
    if messages:
        tables, validate = ShardTable.all_from_messages(*messages), validate_shards
    try:
        validate(merge_tables(tables))
    except InvalidShardingError as error:
        if "validate_access_integrity" in str(error):
            raise
        raise InvalidShardingError(
            f"{error}\nWith validate_access_integrity=False, a load gives each rank what it "
            "requests, without this check."
        ) from None


def _coverage(
    targets: Targets,
    requested: Collection[str],
    compared: Collection[str],
    source: ShardSource,
) -> Coverage:
    """Find what the objects leave out; through rules, what they surely should have is what a
    configuration says.
    """
    rules = targets.rules
    find = partial(
        coverage_of,
        targets.resolved,
        entries=targets.entries,
        wanted=compared,
        names=names_of_module(source.marker),
        optimizer_keys=source.optimizer_keys,
    )
    if not rules or not compared:
        return find(requested)
    of_config: dict[str, tuple[int, ...]] = {}
    for rule in rules:
        if isinstance(rule, Assemble):
            of_config.update(rule.sources)
    taken = stored_names(rules, targets.shapes)
    found = find(taken)
    known = stored_names(rules, of_config) & found.of_modules
    return found._replace(of_modules=known, unclaimed=found.unclaimed | (found.of_modules - known))


def absent_ties(
    shards: Sequence[Shard], ties: Mapping[int, int], stored: Collection[str]
) -> dict[int, int]:
    """Return the shards that are not stored but tied to one that is, whose number is the value:
    export stores one.
    """
    by_first: dict[int, list[int]] = {}
    for tie, first in (ties if stored else {}).items():
        by_first.setdefault(first, [first]).append(tie)
    absent: dict[int, int] = {}
    for group in by_first.values():
        stored_ones = [number for number in group if shards[number].key in stored]
        if stored_ones:
            others = (number for number in group if shards[number].key not in stored)
            absent.update(dict.fromkeys(others, stored_ones[0]))
    return absent


def _compare_keys(
    ranks: Ranks,
    request: LoadRequest,
    requested: set[str],
    targets: Targets,
    location: str,
) -> Differences:
    """Find keys that differ, and do what the mode says."""
    mode, stored = request.mode, frozenset(targets.stored)
    own_garbage = _without_values(request, targets, requested - stored)
    sent = ranks.all_gather(json.dumps([sorted(requested), own_garbage]).encode())
    # Every rank compares the keys of all, so that all raise the same error.
    received = [json.loads(each) for each in sent]
    of_all = frozenset[str]().union(*(keys for keys, _ in received))
    missing = frozenset[str]()
    if StrictHandling.requires_global_app_metadata(mode):
        missing = _missing(targets.stored, of_all)
    handle_mismatch(mode, missing, of_all - stored, stored, location)
    _refuse_garbage(frozenset[str]().union(*(keys for _, keys in received)), location)
    return Differences(missing, frozenset(requested - stored), of_all - stored)


def _without_values(
    request: LoadRequest, targets: Targets, absent: Collection[str]
) -> Sequence[str]:
    """Return the absent keys of tensors that got memory for this load."""
    if not (request.made and absent):
        return []
    materializing = importlib.import_module("distckpt._models.materialize")
    keys: list[str] = materializing.keys_without_values(targets.split.shards, absent, request.made)
    return keys


def _refuse_garbage(keys: frozenset[str], location: str) -> None:
    if keys:
        raise LoadMismatchError(
            f"materialize= has no values for {summarize_keys(keys)}, of which the checkpoint "
            f"{location!r} holds none: make the module on a device with memory, where it "
            "initializes them, or give these tensors memory and values before the load.",
            unexpected=keys,
        )


def _missing(entries: Mapping[str, StoredEntry], requested: frozenset[str]) -> frozenset[str]:
    """Return the stored keys that no rank requests, neither themselves nor as parts of others."""
    taken = set(requested)
    for key in requested & entries.keys():
        taken.update(entries[key].parts)
    # What is only computed from its parts is not missing: they are.
    of_their_own = (key for key, entry in entries.items() if not entry.parts or key in entry.parts)
    return frozenset(of_their_own) - taken
