"""The changes of a run's layers by step, for `distckpt ls --html`."""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from distckpt._checkpoint.model_keys import optimizer_keys
from distckpt._format.manifest import STATS_VALUES
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._pages.charts import heat_map, html_table, ramp
from distckpt._plan.selection import names_of_tensors
from distckpt._tools.stats import TensorStats, compute_stats, saved_stats
from distckpt.cli._output import count_text
from distckpt.cli._selection import opened_at
from distckpt.manager._listing import CheckpointInfo


class _Layer(NamedTuple):
    """A layer at one step.

    It has the norm of its tensors, the norm of their change since the step before if tensors were
    read, and the number of NaN among its values.
    """

    norm: float
    change: float | None
    num_nan: int


_Layers: TypeAlias = Mapping[str, _Layer]
_NO_LAYERS: _Layers = {}
_NOTE = (
    "<p class=note>From statistics that the saves have stored. A layer can change while its norm "
    "stays: <code>--recompute</code> reads the tensors and shows the relative change.</p>"
)


def figures_of_layers(
    infos: Sequence[CheckpointInfo],
    keys: Sequence[str] | None,
    known: Mapping[str, Any],
    is_reading: bool,
) -> dict[str, Any]:
    """Return the figures of the layers of each step, in its order.

    The save may have stored them. With `is_reading`, or where it has not, they are computed from
    the tensors, unless they are known already.
    """
    figures = {}
    for before, info in zip([None, *infos], infos, strict=False):
        layers = None
        if not is_reading:
            layers = _saved_layers(info.location, keys)
        name = _name_of(info, before, keys, layers is None)
        if layers is None:
            layers = known.get(name)
        if layers is None:
            layers = _read_layers(info, before, keys)
        figures[name] = layers
    return figures


def _name_of(
    info: CheckpointInfo, before: CheckpointInfo | None, keys: Sequence[str] | None, is_read: bool
) -> str:
    """Return a cache key for the figures of a step."""
    steps = []
    for one_info in (before, info):
        if one_info:
            steps.append([one_info.location, one_info.saved_at, one_info.num_bytes])
    return json.dumps([*steps, keys, is_read])


def changes_of_layers(
    infos: Sequence[CheckpointInfo], figures: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yield the charts about the layers of the steps."""
    steps = [f"{info.step:,}" for info in infos]
    layers_by_step: list[_Layers] = []
    for layers in figures.values():
        layers_by_step.append({name: _Layer(*layer) for name, layer in layers.items()})
    names = list(dict.fromkeys(itertools.chain.from_iterable(layers_by_step)))
    if not names:
        yield "Changes", "<p>These steps have no tensors.</p>"
        return
    began = []
    for name in names:
        began += _beginning_of_nan(steps, layers_by_step, name)
    if began:
        yield "NaN", html_table(["layer", "first seen at step"], began)
    drawn = _Drawn("relative change", names, steps, layers_by_step)
    if _lacks_changes(layers_by_step):
        changes = _with_changes_of_norms(layers_by_step)
        drawn = _Drawn("relative change of the norm", names, steps, changes)
    if len(infos) > 1:
        yield "Most changed", _most_changed(drawn)
        yield f"{drawn.title.capitalize()} since the step before", _map_of_changes(drawn)
    yield "Norm, relative to the largest of the layer", _map_of_norms(drawn)


class _Drawn(NamedTuple):
    """The contents of maps: the name of the change, and the layers of each step."""

    title: str
    names: Sequence[str]
    steps: Sequence[str]
    layers_by_step: Sequence[_Layers]


def _lacks_changes(layers_by_step: Sequence[_Layers]) -> bool:
    later = itertools.chain.from_iterable(layers.values() for layers in layers_by_step[1:])
    return any(layer.change is None for layer in later)


def _with_changes_of_norms(layers_by_step: Sequence[_Layers]) -> list[_Layers]:
    """Return the layers with the changes of their norms.

    No tensors are read for these.
    """
    changed: list[_Layers] = []
    for before, layers in zip([_NO_LAYERS, *layers_by_step], layers_by_step, strict=False):
        with_changes = {}
        for name, layer in layers.items():
            change = None
            if name in before:
                change = abs(layer.norm - before[name].norm)
            with_changes[name] = layer._replace(change=change)
        changed.append(with_changes)
    return changed


def _map_of_changes(drawn: _Drawn) -> str:
    later = drawn._replace(steps=drawn.steps[1:], layers_by_step=drawn.layers_by_step[1:])
    ratios: list[float] = []
    for layers in later.layers_by_step:
        ratios.extend(filter(None, map(_ratio, layers.values())))
    least = min(ratios, default=0.1)
    most = max(ratios, default=1.0)

    def shade(_: str, layer: _Layer) -> float | None:
        ratio = _ratio(layer)
        if not ratio:
            return ratio
        if least == most:
            return 1.0
        return math.log(ratio / least) / math.log(most / least)

    legend = ramp(f"{least:.2g}", f"{most:.2g}", "NaN or infinite")
    note = ""
    if drawn.title != "relative change":
        note = _NOTE
    return heat_map(later.steps, _cells(later, shade)) + legend + note


def _map_of_norms(drawn: _Drawn) -> str:
    largest: dict[str, float] = {}
    for layers in drawn.layers_by_step:
        for name, layer in layers.items():
            largest[name] = max(layer.norm, largest.get(name, 0.0))
    cells = _cells(drawn, lambda name, layer: layer.norm / (largest[name] or 1.0))
    return heat_map(drawn.steps, cells) + ramp("0", "1", "NaN")


def _saved_layers(location: str, keys: Sequence[str] | None) -> dict[str, _Layer] | None:
    """Return the layers that a save stored with its checkpoint, or None."""
    with opened_at(location) as stored:
        if STATS_VALUES not in stored.manifest.figures:
            return None
        if _has_none(stored, keys):
            return {}
        stats = saved_stats(stored, keys or _all_but_optimizers(stored))
    if stats is None:
        return None
    return _by_layer(stats, None)


def _read_layers(
    info: CheckpointInfo, before: CheckpointInfo | None, keys: Sequence[str] | None
) -> dict[str, _Layer]:
    """Return the layers of a checkpoint, in order, computed from its tensors."""
    with opened_at(info.location) as stored:
        if _has_none(stored, keys):
            return {}
        patterns = keys or _all_but_optimizers(stored)
        stats = list(compute_stats(stored, patterns))
    distances: dict[str, float] | None = None
    if before is not None:
        from distckpt._tools.diff import diff

        report = diff(before.location, info.location, keys=patterns)
        distances = {tensor.key: tensor.difference_norm for tensor in report.tensors}
    return _by_layer(stats, distances)


def _has_none(stored: StoredCheckpoint, keys: Sequence[str] | None) -> bool:
    return keys is None and not names_of_tensors(stored.manifest)


def _by_layer(
    stats: Sequence[TensorStats], distances: Mapping[str, float] | None
) -> dict[str, _Layer]:
    """Combine the tensors of each layer; `distances` holds the changed ones."""
    members = defaultdict(list)
    for tensor in stats:
        members[_layer_of(tensor.key)].append(tensor)
    layers = {}
    for name, tensors in members.items():
        change = None
        if distances is not None:
            change = math.hypot(*(distances.get(tensor.key, 0.0) for tensor in tensors))
        norm = math.hypot(*filter(math.isfinite, (tensor.norm for tensor in tensors)))
        layers[name] = _Layer(norm, change, sum(tensor.num_nan for tensor in tensors))
    return layers


def _all_but_optimizers(stored: StoredCheckpoint) -> list[str] | None:
    """Return patterns that leave out optimizers' tensors, or None without any."""
    keys = (key for key in optimizer_keys(stored) if not stored.is_object(key))
    parts = (key.partition(".state.") for key in keys)
    return sorted({f"!{entry}{state}" for entry, state, _ in parts}) or None


def _layer_of(key: str) -> str:
    """Return a key up to its first number, or its module."""
    names = key.split(".")
    for place, name in enumerate(names, 1):
        if name.isdecimal():
            return ".".join(names[:place])
    return ".".join(names[:-1] or names)


def _beginning_of_nan(
    steps: Sequence[str], layers_by_step: Sequence[_Layers], name: str
) -> list[list[str]]:
    """Return a row with the first NaN step, or none."""
    for step, layers in zip(steps, layers_by_step, strict=True):
        if name in layers and layers[name].num_nan:
            return [[name, f"{step} ({count_text(layers[name].num_nan, 'value')})"]]
    return []


def _most_changed(drawn: _Drawn) -> str:
    ordered = sorted(drawn.layers_by_step[-1].items(), key=lambda item: -(_ratio(item[1]) or 0.0))
    rows = []
    for name, layer in ordered[:5]:
        rows.append([name, _ratio_text(layer)])
    return html_table(["layer", f"{drawn.title} at step {drawn.steps[-1]}"], rows)


def _ratio(layer: _Layer) -> float | None:
    """Return the change relative to the norm; None if it is not a number."""
    ratio = (layer.change or 0.0) / layer.norm if layer.norm else 0.0
    if math.isfinite(ratio) and not layer.num_nan:
        return ratio
    return None


def _ratio_text(layer: _Layer) -> str:
    ratio = _ratio(layer)
    if ratio is None:
        return "NaN or infinite"
    return f"{ratio:.3g}"


def _cells(
    drawn: _Drawn, value_of: Callable[[str, _Layer], float | None]
) -> dict[str, list[tuple[float | None, str]]]:
    """Return the values and texts of each layer, step by step."""
    rows: dict[str, list[tuple[float | None, str]]] = {name: [] for name in drawn.names}
    for name, cells in rows.items():
        for step, layers in zip(drawn.steps, drawn.layers_by_step, strict=True):
            layer = layers.get(name)
            if layer is None:
                cells.append((0.0, f"{name} is not in step {step}"))
                continue
            text = f"{name}, step {step}: norm {layer.norm:.4g}"
            if layer.change is not None:
                text += f", {drawn.title} {_ratio_text(layer)}"
            if layer.num_nan:
                cells.append((None, f"{text}, {count_text(layer.num_nan, 'value')} NaN"))
            else:
                cells.append((value_of(name, layer), text))
    return rows
