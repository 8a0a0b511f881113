"""Requests of a load, compared between ranks and with the checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import length_hint
from typing import Any, get_args

from distckpt._base.errors import InvalidShardingError
from distckpt._base.messages import check_choice, check_num_bytes
from distckpt._base.options import LoadOptions, ShareReads, check_options
from distckpt._base.tree import at, leaves
from distckpt._format.marker import names_of_module
from distckpt._models import objects
from distckpt._models.restore import needs_stored, resolve, settings_of
from distckpt._models.whole import Coverage, coverage_of, refuse_left_out
from distckpt._operations.shard_source import ShardSource
from distckpt._plan.translate import decide_ties, match_flags, stored_names, warn_of_unmatched
from distckpt._ranks.collectives import Ranks
from distckpt._state import flatten
from distckpt._state.shards import Shard, ShardTable, find_ties, merge_tables, shard_table
from distckpt._state.stored_form import StoredEntry, may_be_complex
from distckpt._state.strictness import StrictHandling, handle_mismatch
from distckpt._state.validation import validate_shards
from distckpt.mapping._sharded_tensor import ShardedTensor
from distckpt.mapping._wrappers import ShardedStateDict, StateDict
from distckpt.rules._rule import Rule
from distckpt.rules._rules import Assemble, check_rules

_MODES_WITH_RULES = (StrictHandling.ASSUME_OK_UNEXPECTED, StrictHandling.RAISE_UNEXPECTED)
_MODES_OF_ALL = (*_MODES_WITH_RULES, StrictHandling.RAISE_ALL)
"""Modes in which no requested key may be left out."""


@dataclass(frozen=True, kw_only=True)
class LoadRequest:
    """The request to load a state dict.

    Attributes:
        path: path of the checkpoint.
        mode: handling of keys that only the checkpoint or only the request has.
        strict: the caller's word for `mode`, if it is another one.
        rules: rules that make the requested tensors from the stored ones.
        family: afterwards, the rules of the model's family.
        process_group: the ranks that load together.
        warns_of_values: warn of plain values for which nothing is stored, whatever the mode:
            Megatron leaves them out of its result.
        fills_values: put loaded plain values into the caller's state dict.
        options: options of the caller.
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
        """Whether no requested key may be left out."""
        return self.mode in _MODES_OF_ALL

    @property
    def compares_keys(self) -> bool:
        """Whether the keys of the checkpoint and of ranks are compared."""
        return self.mode is not StrictHandling.ASSUME_OK_UNEXPECTED

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
        check_choice("share_reads", options.share_reads, get_args(ShareReads))
        has_rules = bool(self.rules) or self.family is not None
        if has_rules and self.mode not in _MODES_WITH_RULES:
            raise ValueError(
                "With rules, strict can be 'assume_ok_unexpected' or 'raise_unexpected' only."
            )

    def of_all_ranks(self) -> dict[str, object]:
        """Return the settings that must be equal on all ranks."""
        options = self.options
        return {
            "strategy": options.strategy,
            "strict": self.mode.value if self.strict is None else self.strict,
            "verify": options.verify,
            "share_reads": options.share_reads,
            "validate_access_integrity": options.validate_access_integrity,
            # Ranks exchange more where there are some. Their type is checked afterwards.
            "number of rules": length_hint(self.rules),
            "use of family=": self.family is not None,
        }


@dataclass(frozen=True)
class Targets:
    """The targets that this rank fills from a checkpoint.

    Attributes:
        request: the request of the caller.
        source: source of the values.
        described: the state dict with its objects described.
        resolved: the same, with the entries that the checkpoint has for them.
        split: the flattened state dict.
        entries: entries of the checkpoint by key; empty when they are not needed.
        stored: entries that the request is compared with.
        ties: numbers of shards that are not stored -> numbers of the shards whose values they get.
        table: shards without data; None where they are not compared between ranks.
        rules: rules from the keys of the request to the keys of the checkpoint.
    """

    request: LoadRequest
    source: ShardSource
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
        """Keys of the shards that the checkpoint is searched for."""
        requested = set()
        for number, shard in enumerate(self.split.shards):
            if number not in self.ties:
                requested.add(shard.key)
        return requested

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Global shapes of the tensors by key."""
        return _shapes_of(self.split.shards)


@dataclass(frozen=True)
class Differences:
    """Keys that only the checkpoint or only the request has.

    Attributes:
        missing: keys that only the checkpoint has, or where keys are not compared, stored keys that
            objects do not take; the same on all ranks.
        unexpected: keys that this rank requests.
        unexpected_of_all: keys that some rank requests.
    """

    missing: frozenset[str] = frozenset()
    unexpected: frozenset[str] = frozenset()
    unexpected_of_all: frozenset[str] = frozenset()


def describe_targets(
    ranks: Ranks,
    state_dict: ShardedStateDict,
    request: LoadRequest,
    choose_source: Callable[[], ShardSource],
) -> Targets:
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
        rules = _rules(request, split.shards, ties, source)
        are_complex = may_be_complex(split.shards)
        # 0 where the keys of the checkpoint need not be known, 2 where the stored settings of
        # optimizers are needed as well.
        vote.number = (
            needs_stored(described)
            or request.compares_keys
            or are_complex
            or (not rules and bool(_other_keys(split.shards, ties)))
        )
    source, entries, settings = _look_up(ranks, source, described, request, vote.largest)
    with ranks.phase("describe the targets"):
        resolved = resolve(ranks.rank, described, entries, settings, source.shared_value)
        if resolved.state_dict is not described.state_dict or are_complex:
            split = flatten.split(resolved.state_dict, {} if rules else entries)
            ties = find_ties(split.shards)
        stored = _without_skipped(entries, described, resolved)
        absent = {}
        if not rules:
            absent = absent_ties(split.shards, ties, stored)
        table = None
        if not source.is_live:
            table = shard_table(split.shards, ties)
    return Targets(
        request=request,
        source=source,
        described=described,
        resolved=resolved,
        split=split,
        entries=entries,
        stored=stored,
        ties=absent,
        table=table,
        rules=rules,
    )


def _check_modules_are_different(described: objects.Description, split: flatten.SplitState) -> None:
    """Refuse modules of a list that would all get the same tensors.

    Lists hold stages, which may have copies of a tensor, but not of all.
    """
    modules = []
    for place in described.places:
        if place.kind is objects.Kind.MODULE:
            modules.append(place)
    if len({place.prefix for place in modules}) == len(modules):
        return
    keys = set()
    for place in modules:
        shards = leaves(at(described.state_dict, place.path))
        keys.add(frozenset(shard.key for _, shard in shards if hasattr(shard, "key")))
    if len(keys) < len(modules):
        flatten.check_keys_are_different(split, [place.path for place in modules])


def _shapes_of(shards: Iterable[Shard]) -> dict[str, tuple[int, ...]]:
    shapes = {}
    for shard in shards:
        if isinstance(shard, ShardedTensor):
            shapes[shard.key] = tuple(shard.global_shape)
    return shapes


def _rules(
    request: LoadRequest,
    shards: Sequence[Shard],
    ties: Mapping[int, int],
    source: ShardSource,
) -> Sequence[Rule]:
    """Return the rules from the request's names to the source's names."""
    if request.family is None and not request.rules:
        return ()
    shapes = _shapes_of(shards)
    family_rules: Sequence[Rule] = ()
    if request.family is not None:
        family_rules = source.rules_of_family(request.family, list(shapes))
    stored = None
    if request.rules or family_rules:
        stored = source.shapes()
    if stored is None:
        return (*request.rules, *family_rules)
    shared = _other_keys(shards, ties)
    return decide_ties(request.rules, family_rules, shapes, shared, stored)


def _other_keys(shards: Sequence[Shard], ties: Mapping[int, int]) -> dict[str, str]:
    """Return keys of tied shards -> keys with the same memory."""
    others = {}
    for tie, first in ties.items():
        if shards[tie].key != shards[first].key:
            others[shards[tie].key] = shards[first].key
    return others


def _look_up(
    ranks: Ranks,
    source: ShardSource,
    described: objects.Description,
    request: LoadRequest,
    needed: int,
) -> tuple[ShardSource, Mapping[str, StoredEntry], StateDict]:
    """Return the source for the objects, its entries, and their stored settings.

    `needed` is the largest number of `describe_targets` on all ranks.
    """
    if not needed:
        return source, {}, {}
    if request.family is None and not request.rules:
        source = source.for_objects(described, needed > 1)
    entries = source.entries()
    if needed == 1:
        return source, entries, {}
    with ranks.phase("read the settings of optimizers"):
        cells = settings_of(described, entries)
        values = source.read_objects(list(cells.values()))
    return source, entries, dict(zip(cells, values, strict=True))


def _without_skipped(
    entries: Mapping[str, StoredEntry],
    described: objects.Description,
    resolved: objects.Description,
) -> dict[str, StoredEntry]:
    """Leave out states of another number of ranks.

    No shard of them is requested or missing.
    """
    remaining = {(place.name, place.kind) for place in resolved.places}
    skipped = set()
    for place in described.places:
        if (place.name, place.kind) not in remaining:
            skipped.add(place.name)
    return {key: entry for key, entry in entries.items() if key not in skipped}


def check_targets(ranks: Ranks, targets: Targets) -> Differences:
    """Refuse contradicting requests and parts of objects; compare keys.

    Collective operation: all ranks must call it.

    Raises:
        InvalidShardingError: the requests of the ranks contradict each other.
        LoadMismatchError: keys differ, and the mode of the request raises.
    """
    request = targets.request
    source = targets.source
    validates = request.options.validate_access_integrity
    table = targets.table if validates is not False else None
    messages: Sequence[list[bytes]] = ()
    if table is not None and ranks.size > 1:
        messages = ranks.gather_once(table.to_messages())
    requested = targets.requested
    with ranks.phase("check the requested shards", decision=True) as vote:
        if table is not None and ranks.is_coordinator:
            _validate(table, messages, whole=bool(validates))
        flags = b""
        if request.rules:
            flags = match_flags(request.rules, targets.shapes)
        coverage = _coverage(targets, requested)
        vote.number = len(coverage.of_modules | coverage.of_optimizers | coverage.unclaimed)
    # The members of a move may have rules of their own.
    if request.rules and not source.is_live:
        warn_of_unmatched(request.rules, ranks.gather(flags))
    differences = _compare_keys(ranks, targets, requested)
    if vote.largest:
        entries = targets.entries
        left_out = refuse_left_out(ranks, coverage, entries, source.location, source.is_live)
        return replace(differences, missing=differences.missing | left_out)
    return differences


def _validate(table: ShardTable, messages: Sequence[list[bytes]], *, whole: bool) -> None:
    """Validate the tables of all ranks, or of the only one.

    `messages` are the tables of all ranks. A single rank may request parts, unless the request must
    be `whole`.
    """
    tables = [table]
    allow_gaps = not whole
    if messages:
        tables = ShardTable.all_from_messages(*messages)
        allow_gaps = False
    try:
        validate_shards(merge_tables(tables), allow_gaps=allow_gaps)
    except InvalidShardingError as error:
        if "validate_access_integrity" in str(error):
            raise
        raise InvalidShardingError(
            f"{error}\nWith validate_access_integrity=False, a load gives each rank what it "
            "requests, without this check."
        ) from None


def _coverage(targets: Targets, requested: Collection[str]) -> Coverage:
    """Find the parts of a checkpoint that objects leave out.

    Through rules, an object should surely have the tensors that a configuration names.
    """
    rules = targets.rules
    source = targets.source
    compared = () if targets.request.compares_keys else targets.stored
    find = partial(
        coverage_of,
        targets.resolved,
        entries=targets.entries,
        wanted=compared,
        names=names_of_module(source.marker),
        optimizer_keys=source.optimizer_keys,
    )
    codes = _shapes_of(filter(may_be_codes, targets.split.shards))
    if not rules or not compared:
        return find(requested, codes)
    config_shapes: dict[str, tuple[int, ...]] = {}
    for rule in rules:
        if isinstance(rule, Assemble):
            config_shapes.update(rule.sources)
    taken = stored_names(rules, targets.shapes)
    coverage = find(taken, stored_names(rules, codes))
    if not coverage.of_modules:
        return coverage
    known = stored_names(rules, config_shapes) & coverage.of_modules
    return coverage._replace(
        of_modules=known, unclaimed=coverage.unclaimed | (coverage.of_modules - known)
    )


def may_be_codes(shard: Shard) -> bool:
    """Whether a shard has 8 bits, as quantized codes have."""
    return isinstance(shard, ShardedTensor) and shard.dtype.itemsize == 1


def absent_ties(
    shards: Sequence[Shard], ties: Mapping[int, int], stored: Collection[str]
) -> dict[int, int]:
    """Return shards that are not stored, with their stored tie.

    An export stores one name of tied tensors. The keys and values are numbers of shards.
    """
    if not stored:
        return {}
    by_first: dict[int, list[int]] = {}
    for tie, first in ties.items():
        by_first.setdefault(first, [first]).append(tie)
    absent: dict[int, int] = {}
    for group in by_first.values():
        stored_ones = []
        for number in group:
            if shards[number].key in stored:
                stored_ones.append(number)
        if stored_ones:
            others = (number for number in group if shards[number].key not in stored)
            absent.update(dict.fromkeys(others, stored_ones[0]))
    return absent


def _compare_keys(ranks: Ranks, targets: Targets, requested: set[str]) -> Differences:
    """Find keys that differ, and handle them as the mode says."""
    request = targets.request
    if targets.rules or not request.compares_keys:
        return Differences()
    location = targets.source.location
    mode = request.mode
    stored = frozenset(targets.stored)
    own_garbage: list[str] = []
    if request.made:
        from distckpt._models.materialize import keys_without_values

        own_garbage = keys_without_values(targets.split.shards, requested - stored, request.made)
    sent = ranks.all_gather(json.dumps([sorted(requested), own_garbage]).encode())
    # Every rank compares the keys of all, so that all raise the same error.
    received = [json.loads(message) for message in sent]
    keys_of_all = frozenset[str]().union(*(keys for keys, _ in received))
    missing = frozenset[str]()
    if StrictHandling.requires_global_app_metadata(mode):
        missing = _missing(targets.stored, keys_of_all)
    handle_mismatch(mode, missing, keys_of_all - stored, stored, location)
    garbage = frozenset[str]().union(*(keys for _, keys in received))
    if garbage:
        from distckpt._models.materialize import error_without_values

        raise error_without_values(garbage, location)
    return Differences(missing, frozenset(requested - stored), keys_of_all - stored)


def _missing(entries: Mapping[str, StoredEntry], requested: frozenset[str]) -> frozenset[str]:
    """Return stored keys that no rank requests, also not in parts."""
    taken = set(requested)
    for key in requested & entries.keys():
        taken.update(entries[key].parts)
    # A tensor that is only computed from its parts is not missing: its parts are.
    own_keys = (key for key, entry in entries.items() if not entry.parts or key in entry.parts)
    return frozenset(own_keys) - taken
