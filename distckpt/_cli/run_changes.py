"""How the layers of a run change from step to step, for the page of `distckpt ls --html`."""

from __future__ import annotations

import importlib
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from distckpt._checkpoint.model_keys import optimizer_keys
from distckpt._checkpoint.opening import opened
from distckpt._cli.charts import heat_map, html_table, ramp
from distckpt._cli.output import count_text
from distckpt._format.manifest import STATS_VALUES
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._format.tensor_stats import TensorStats
from distckpt._manager.listing import CheckpointInfo
from distckpt._operations.saved_stats import saved_stats
from distckpt._ranks.collectives import Ranks


class _Layer(NamedTuple):
    """A layer at one step: the norm of its tensors, that of their change since the step before if
    tensors were read, and how many of its values are NaN.
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
    found: Sequence[CheckpointInfo],
    keys: Sequence[str] | None,
    known: Mapping[str, Any],
    is_reading: bool = False,
) -> dict[str, Any]:
    """Return the figures of the layers of each step, in its order: those that the save has stored,
    unless `is_reading`, or else those of the tensors, where they are not known already.
    """
    figures = {}
    for before, info in zip([None, *found], found, strict=False):
        layers = None if is_reading else _saved_layers(info.location, keys)
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
    """Return a text that is another one when the step, the one before, the keys or the source of
    the figures are others.
    """
    steps = [[each.location, each.saved_at, each.num_bytes] for each in (before, info) if each]
    return json.dumps([*steps, keys, is_read])


def changes_of_layers(
    found: Sequence[CheckpointInfo], figures: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yield what the figures of steps say about their layers."""
    steps = [f"{info.step:,}" for info in found]
    of_steps: list[_Layers] = [
        {name: _Layer(*layer) for name, layer in layers.items()} for layers in figures.values()
    ]
    names = list(dict.fromkeys(itertools.chain.from_iterable(of_steps)))
    if not names:
        yield "Changes", "<p>These steps have no tensors.</p>"
        return
    began = list(filter(None, (_beginning_of_nan(steps, of_steps, name) for name in names)))
    if began:
        yield "NaN", html_table(["layer", "first seen at step"], began)
    drawn = _drawn(names, steps, of_steps)
    if len(found) > 1:
        yield "Most changed", _most_changed(drawn)
        yield f"{drawn.what.capitalize()} since the step before", _map_of_changes(drawn)
    yield "Norm, relative to the largest of the layer", _map_of_norms(drawn)


class _Drawn(NamedTuple):
    """What maps show: the name of the change, and the layers of each step."""

    what: str
    names: Sequence[str]
    steps: Sequence[str]
    of_steps: Sequence[_Layers]


def _drawn(names: Sequence[str], steps: Sequence[str], of_steps: Sequence[_Layers]) -> _Drawn:
    if any(layer.change is None for layers in of_steps[1:] for layer in layers.values()):
        changes = _with_changes_of_norms(of_steps)
        return _Drawn("relative change of the norm", names, steps, changes)
    return _Drawn("relative change", names, steps, of_steps)


def _with_changes_of_norms(of_steps: Sequence[_Layers]) -> list[_Layers]:
    """Return the layers with the changes of their norms, which need no tensors, as changes."""
    changed: list[_Layers] = []
    for before, layers in zip([_NO_LAYERS, *of_steps], of_steps, strict=False):
        norms = {name: before[name].norm for name in layers if name in before}
        changed.append(
            {
                name: layer._replace(
                    change=abs(layer.norm - norms[name]) if name in norms else None
                )
                for name, layer in layers.items()
            }
        )
    return changed


def _map_of_changes(drawn: _Drawn) -> str:
    later = drawn._replace(steps=drawn.steps[1:], of_steps=drawn.of_steps[1:])
    ratios = [_ratio(layer) for layers in later.of_steps for layer in layers.values()]
    shade = _Shade.of([ratio for ratio in ratios if ratio])
    cells = _cells(later, lambda _, layer: shade(_ratio(layer)))
    legend = ramp(f"{shade.least:.2g}", f"{shade.most:.2g}", "NaN or infinite")
    note = "" if drawn.what == "relative change" else _NOTE
    return heat_map(later.steps, cells) + legend + note


def _map_of_norms(drawn: _Drawn) -> str:
    of_steps = drawn.of_steps
    largest = {name: max(_norm_in(layers, name) for layers in of_steps) for name in drawn.names}
    cells = _cells(drawn, lambda name, layer: layer.norm / (largest[name] or 1.0))
    return heat_map(drawn.steps, cells) + ramp("0", "1", "NaN")


def _saved_layers(location: str, keys: Sequence[str] | None) -> dict[str, _Layer] | None:
    """Return the layers of a checkpoint as its save has stored them; None if it has not."""
    with opened(Ranks.alone(), location) as stored:
        if STATS_VALUES not in stored.manifest.figures:
            return None
        if _has_none(stored, keys):
            return {}
        stats = saved_stats(stored, keys or _all_but_optimizers(stored))
    return None if stats is None else _by_layer(stats, None)


def _read_layers(
    info: CheckpointInfo, before: CheckpointInfo | None, keys: Sequence[str] | None
) -> dict[str, _Layer]:
    """Return the layers of a checkpoint, in its order, of the tensors themselves."""
    with opened(Ranks.alone(), info.location) as stored:
        if _has_none(stored, keys):
            return {}
        chosen = keys or _all_but_optimizers(stored)
        computing = importlib.import_module("distckpt._operations.stats")
        stats = list(computing.compute_stats(stored, chosen))
    distances: dict[str, float] | None = None
    if before is not None:
        comparing = importlib.import_module("distckpt._operations.diff")
        report = comparing.diff(before.location, info.location, keys=chosen)
        distances = {tensor.key: tensor.difference_norm for tensor in report.tensors}
    return _by_layer(stats, distances)


def _has_none(stored: StoredCheckpoint, keys: Sequence[str] | None) -> bool:
    return keys is None and all(map(stored.is_object, stored.manifest.key_index))


def _by_layer(
    stats: Sequence[TensorStats], distances: Mapping[str, float] | None
) -> dict[str, _Layer]:
    members = defaultdict(list)
    for tensor in stats:
        members[_layer_of(tensor.key)].append(tensor)
    return {name: _layer(tensors, distances) for name, tensors in members.items()}


def _all_but_optimizers(stored: StoredCheckpoint) -> list[str] | None:
    """Return patterns that leave out the tensors of optimizers; None where there are none."""
    keys = (key for key in optimizer_keys(stored) if not stored.is_object(key))
    parts = (key.partition(".state.") for key in keys)
    return sorted({f"!{entry}{state}" for entry, state, _ in parts}) or None


def _layer(tensors: Sequence[TensorStats], distances: Mapping[str, float] | None) -> _Layer:
    """Put the tensors of a layer together; `distances` has those that have changed."""
    change = None
    if distances is not None:
        change = math.hypot(*(distances.get(each.key, 0.0) for each in tensors))
    finite = [each.norm for each in tensors if math.isfinite(each.norm)]
    num_nan = sum(each.num_nan for each in tensors)
    return _Layer(norm=math.hypot(*finite), change=change, num_nan=num_nan)


def _layer_of(key: str) -> str:
    """Return the part of a key up to its first number, or the module."""
    names = key.split(".")
    numbers = [place for place, name in enumerate(names) if name.isdecimal()]
    return ".".join(names[: numbers[0] + 1] if numbers else names[:-1] or names)


def _beginning_of_nan(steps: Sequence[str], of_steps: Sequence[_Layers], name: str) -> list[str]:
    """Return a row that says when NaN began, an empty one if there is none."""
    for step, layers in zip(steps, of_steps, strict=True):
        if name in layers and layers[name].num_nan:
            return [name, f"{step} ({count_text(layers[name].num_nan, 'value')})"]
    return []


def _most_changed(drawn: _Drawn) -> str:
    ordered = sorted(drawn.of_steps[-1].items(), key=lambda item: -(_ratio(item[1]) or 0.0))
    rows = [[name, _ratio_text(layer)] for name, layer in ordered[:5]]
    return html_table(["layer", f"{drawn.what} at step {drawn.steps[-1]}"], rows)


def _ratio(layer: _Layer) -> float | None:
    """Return the change relative to the norm; None if it is not a number."""
    ratio = (layer.change or 0.0) / layer.norm if layer.norm else 0.0
    return ratio if math.isfinite(ratio) and not layer.num_nan else None


def _ratio_text(layer: _Layer) -> str:
    ratio = _ratio(layer)
    return "NaN or infinite" if ratio is None else f"{ratio:.3g}"


class _Shade(NamedTuple):
    """The logarithmic scale of changes, between the least and the most."""

    least: float
    most: float

    @classmethod
    def of(cls, ratios: Sequence[float]) -> _Shade:
        """Return the scale for changes above 0."""
        return cls(min(ratios, default=0.1), max(ratios, default=1.0))

    def __call__(self, ratio: float | None) -> float | None:
        if not ratio:
            return ratio
        if self.least == self.most:
            return 1.0
        return math.log(ratio / self.least) / math.log(self.most / self.least)


def _norm_in(layers: _Layers, name: str) -> float:
    return layers[name].norm if name in layers else 0.0


def _cells(
    drawn: _Drawn, value_of: Callable[[str, _Layer], float | None]
) -> dict[str, list[tuple[float | None, str]]]:
    """Return for each layer the value and the text of each step."""
    rows: dict[str, list[tuple[float | None, str]]] = {name: [] for name in drawn.names}
    for name, cells in rows.items():
        for step, layers in zip(drawn.steps, drawn.of_steps, strict=True):
            layer = layers.get(name)
            if layer is None:
                cells.append((0.0, f"{name} is not in step {step}"))
                continue
            text = f"{name}, step {step}: norm {layer.norm:.4g}"
            if layer.change is not None:
                text += f", {drawn.what} {_ratio_text(layer)}"
            bad = value_of(name, layer) if not layer.num_nan else None
            cells.append((bad, text + _count_of_nan(layer)))
    return rows


def _count_of_nan(layer: _Layer) -> str:
    """Say how many values are NaN, if some are."""
    return f", {count_text(layer.num_nan, 'value')} NaN" if layer.num_nan else ""
