"""What a load asks of a checkpoint, compared between the ranks and with what is stored."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from distckpt._base.dtypes import FROM_NAME, TO_NAME
from distckpt._format.marker import names_of_module
from distckpt._mapping.wrappers import ShardedStateDict, ShardedTensor, StateDict
from distckpt._models import objects
from distckpt._models.optimizer.shards import StoredEntry
from distckpt._models.whole import Parts, parts_of, refuse_parts
from distckpt._plan.translate import stored_names
from distckpt._ranks.collectives import Ranks
from distckpt._rules.families import config_for, rules_for
from distckpt._rules.rules import Assemble, Rule
from distckpt._state import flatten
from distckpt._state.common_state import COMMON_KEY
from distckpt._state.shards import Shard, ShardTable, describe, find_ties, merge_tables
from distckpt._state.strictness import StrictHandling, handle_mismatch
from distckpt._state.validation import validate_shards
from distckpt.strategies.base import LoadShardedStrategy, Options
from distckpt.strategies.defaults import load_strategy
from distckpt.strategies.safetensors import SafetensorsLoadStrategy


class LoadRequest(NamedTuple):
    """What this rank wants of a checkpoint, and how it is read.

    Attributes:
        described: the state dict with its objects described.
        resolved: the same, with what the checkpoint has of them.
        split: the flattened state dict.
        entries: of the checkpoint by key; empty when they are not needed.
        stored: those that the request is compared with.
        ties: shards that are not stored, and the numbers of those whose values they get.
        table: its shards, without data.
        strategy: reads it.
        rules: from the keys of the request to those of the checkpoint.
    """

    described: objects.Described
    resolved: objects.Described
    split: flatten.SplitState
    entries: Mapping[str, StoredEntry]
    stored: Mapping[str, StoredEntry]
    ties: Mapping[int, int]
    table: ShardTable
    strategy: LoadShardedStrategy
    rules: Sequence[Rule]


def describe_request(
    ranks: Ranks,
    sharded_state_dict: ShardedStateDict,
    location: str,
    marker: Mapping[str, Any],
    sharded_strategy: LoadShardedStrategy | tuple[str, int] | None,
    mode: StrictHandling,
    materialize: Any,
    options: Options,
    family: str | os.PathLike[str] | None,
) -> LoadRequest:
    """Describe the targets of a load. Collective operation: all ranks must call it."""
    with ranks.phase("flatten the state dict") as vote:
        described = objects.describe(ranks, sharded_state_dict, loads=True, materialize=materialize)
        split = flatten.split(described.state_dict)
        if family is not None:
            keys = [shard.key for shard in split.shards if isinstance(shard, ShardedTensor)]
            on_disk = options.stored and options.stored.manifest.shapes_by_key
            made = rules_for(config_for(family, location), keys, on_disk)
            options = replace(options, rules=(*options.rules, *made))
        strategy = load_strategy(sharded_strategy, marker, location).configure(options)
        compares = StrictHandling.requires_explicit_ckpt_mismatch_check(mode)
        ties = {} if options.rules else find_ties(split.shards)
        has_ties = any(
            split.shards[tie].key != split.shards[first].key for tie, first in ties.items()
        )
        vote.number = objects.needs_stored(described) or compares or has_ties
    needed = vote.largest
    entries = stored_entries(ranks, strategy, location) if needed else {}
    settings: StateDict = {}
    if needed > 1:
        with ranks.phase("read the settings of optimizers"):
            settings = strategy.load(objects.settings_of(described, entries), location)
    with ranks.phase("describe the targets"):
        resolved = objects.resolve(ranks.rank, described, entries, settings)
        # A state of another number of ranks is neither loaded nor missing.
        skipped = {p.name for p in described.places} - {p.name for p in resolved.places}
        stored = {key: entry for key, entry in entries.items() if key not in skipped}
        if resolved.state_dict is not described.state_dict:
            split = flatten.split(resolved.state_dict)
        table = describe(split.shards)
        ties = _absent_ties(split.shards, stored) if not options.rules else {}
    return LoadRequest(
        described, resolved, split, entries, stored, ties, table, strategy, options.rules
    )


def check_request(
    ranks: Ranks,
    request: LoadRequest,
    mode: StrictHandling,
    validates: bool,
    marker: Mapping[str, Any],
    location: str,
) -> tuple[set[str], set[str]]:
    """Refuse requests that contradict each other or ask for parts of objects; return missing and
    unexpected keys.
    """
    requested = {shard.key for i, shard in enumerate(request.split.shards) if i not in request.ties}
    validates = validates and ranks.size > 1
    messages = ranks.gather_once(request.table.to_messages()) if validates else []
    with ranks.phase("check the requested shards", decision=True) as vote:
        if validates and ranks.is_coordinator:
            validate_shards(merge_tables(ShardTable.all_from_messages(*messages)))
        compared = request.stored if mode is StrictHandling.ASSUME_OK_UNEXPECTED else ()
        parts = _parts(request, requested, compared, names_of_module(marker))
        vote.number = len(parts.of_modules | parts.of_optimizers | parts.of_nobody)
    missing, unexpected = set[str](), set[str]()
    if not request.rules:
        missing, unexpected = _compare_keys(ranks, mode, requested, request.stored, location)
    if vote.largest:
        refuse_parts(ranks, parts, request.entries, location)
    return missing, unexpected


def _parts(
    request: LoadRequest,
    requested: Collection[str],
    compared: Collection[str],
    names: Collection[str],
) -> Parts:
    """Find what the objects leave out; through rules, what they surely should have is what a
    configuration says.
    """
    rules = request.rules
    if not rules or not compared:
        return parts_of(request.resolved, requested, request.entries, compared, names)
    shapes = {
        s.key: tuple(s.global_shape) for s in request.split.shards if isinstance(s, ShardedTensor)
    }
    of_config = {
        key: shape
        for rule in rules
        if isinstance(rule, Assemble)
        for key, shape in rule.sources.items()
    }
    parts = parts_of(
        request.resolved, stored_names(rules, shapes), request.entries, compared, names
    )
    known = stored_names(rules, of_config) & parts.of_modules
    return parts._replace(of_modules=known, of_nobody=parts.of_nobody | (parts.of_modules - known))


def _absent_ties(shards: Sequence[Shard], stored: Mapping[str, StoredEntry]) -> dict[int, int]:
    """Return the shards that are not stored but tied to one that is, whose number is the value:
    export stores one.
    """
    by_first: dict[int, list[int]] = {}
    for tie, first in (find_ties(shards) if stored else {}).items():
        by_first.setdefault(first, [first]).append(tie)
    absent: dict[int, int] = {}
    for group in by_first.values():
        there = [i for i in group if shards[i].key in stored]
        absent |= {i: there[0] for i in group if there and shards[i].key not in stored}
    return absent


def _compare_keys(
    ranks: Ranks,
    mode: StrictHandling,
    requested: set[str],
    entries: Mapping[str, StoredEntry],
    location: str,
) -> tuple[set[str], set[str]]:
    """Find missing keys (the same on all ranks) and this rank's unexpected keys, and do what the
    mode says.
    """
    if not StrictHandling.requires_explicit_ckpt_mismatch_check(mode):
        return set(), set()
    stored = set(entries)
    requested_by_all = [
        set(json.loads(text)) for text in ranks.all_gather(json.dumps(sorted(requested)).encode())
    ]
    unexpected = requested - stored
    # Every rank compares the keys of all, so that all raise the same error.
    of_all = set().union(*requested_by_all)
    unexpected_of_all = of_all - stored
    missing: set[str] = set()
    if StrictHandling.requires_global_app_metadata(mode):
        missing = stored - of_all - {part for key in of_all & stored for part in entries[key].parts}
        # What is only computed is not missing: its parts are.
        missing -= {key for key, entry in entries.items() if entry.parts and key not in entry.parts}
    handle_mismatch(mode, missing, unexpected_of_all, stored, location)
    return missing, unexpected


def stored_entries(
    ranks: Ranks, strategy: LoadShardedStrategy, location: str
) -> dict[str, StoredEntry]:
    """Return dtypes and shapes of the tensors and objects in a checkpoint, without common state, by
    key.

    Collective operation: all ranks must call it; rank 0 reads.
    """

    def read() -> list[tuple[str, str | None, tuple[int, ...], tuple[str, ...]]]:
        shards = {shard.key: shard for shard in strategy.load_sharded_metadata(location).values()}
        parts = strategy.load_quantized_metadata(location)
        shards.update((key, shard) for key, (shard, _) in parts.items())
        return [
            (
                key,
                TO_NAME[shard.dtype] if isinstance(shard, ShardedTensor) else None,
                tuple(shard.global_shape),
                parts[key][1] if key in parts else (),
            )
            for key, shard in shards.items()
            if key != COMMON_KEY
        ]

    if isinstance(strategy, SafetensorsLoadStrategy) and strategy.options.stored is not None:
        with ranks.phase("read the keys of the checkpoint"):
            found = read()
    else:
        found = ranks.decide_json("read the keys of the checkpoint", read)
    return {
        key: StoredEntry(None if dtype is None else FROM_NAME[dtype], tuple(shape), tuple(parts))
        for key, dtype, shape, parts in found
    }
