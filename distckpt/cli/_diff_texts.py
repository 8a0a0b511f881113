"""The differences between two checkpoints as text."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from distckpt._base.messages import key_pattern, without_numbers
from distckpt._geometry.region import whole
from distckpt._state.common_state import COMMON_KEY
from distckpt._tools.diff import DiffReport, ObjectDifference
from distckpt._tools.tensor_differences import TensorDifference
from distckpt.cli._output import count_text, shape_text

# --- Tensors --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DifferenceGroup:
    """A row of the table: tensors that differ in the same way.

    Their keys differ in numbers only.

    Attributes:
        pattern: their keys.
        changes: the kinds of difference, such as shape or values.
        largest: the largest absolute difference, if values differ.
        relative: the largest relative difference, if values differ.
        place: where the values of a single tensor differ.
    """

    pattern: str
    changes: str
    largest: str = ""
    relative: str = ""
    place: str = ""

    @property
    def cells(self) -> list[str]:
        """The cells of its row."""
        return [self.pattern, self.changes, self.largest, self.relative, self.place]


def divided_by_owner(report: DiffReport) -> tuple[DiffReport, DiffReport]:
    """Divide the differences into models and optimizers."""
    names = report.optimizer_keys

    def part(is_wanted: Callable[[str], bool]) -> DiffReport:
        return replace(
            report,
            tensors=tuple(tensor for tensor in report.tensors if is_wanted(tensor.key)),
            only_in_a=tuple(filter(is_wanted, report.only_in_a)),
            only_in_b=tuple(filter(is_wanted, report.only_in_b)),
        )

    return part(lambda key: key not in names), part(lambda key: key in names)


def optimizer_text(report: DiffReport) -> str:
    """Sum up the differences of optimizers in one line, perhaps empty."""
    counts = {
        "differ": len(report.tensors),
        "only in A": len(report.only_in_a),
        "only in B": len(report.only_in_b),
    }
    parts = [f"{count:,} {name}" for name, count in counts.items() if count]
    if not parts:
        return ""
    rates = []
    for tensor in report.tensors:
        if tensor.num_different:
            rates.append(tensor.relative_difference)
    largest = ""
    if rates:
        largest = f", largest rel L2 {_largest(rates):.1e}"
    return f"optimizer: {', '.join(parts)}{largest} (--keys lists them)"


def group_differences(report: DiffReport) -> list[DifferenceGroup]:
    """Group the tensors that differ, with the largest relative difference first.

    Tensors whose values are not compared, or that only one side has, come last.
    """
    alike: dict[object, list[TensorDifference]] = {}
    for tensor in report.tensors:
        kind = (without_numbers(tensor.key), tensor.shapes, tensor.dtypes, tensor.num_different > 0)
        alike.setdefault(kind, []).append(tensor)
    by_size = sorted(alike.values(), key=_order)
    return [
        *map(_group_of, by_size),
        *_groups_on_one_side("A", report.only_in_a),
        *_groups_on_one_side("B", report.only_in_b),
    ]


def _order(members: Sequence[TensorDifference]) -> float:
    relative = _largest(tensor.relative_difference for tensor in members)
    if math.isfinite(relative):
        return -relative
    return -math.inf


def _group_of(members: Sequence[TensorDifference]) -> DifferenceGroup:
    pattern = key_pattern([tensor.key for tensor in members])
    changes = changes_of(members)
    if not members[0].num_different:
        return DifferenceGroup(pattern, changes)
    return DifferenceGroup(
        pattern,
        changes,
        largest=f"{_largest(tensor.max_difference for tensor in members):.1e}",
        relative=f"{_largest(tensor.relative_difference for tensor in members):.1e}",
        place=place_of(members[0]) if len(members) == 1 else "",
    )


def _groups_on_one_side(side: str, keys: Iterable[str]) -> list[DifferenceGroup]:
    alike: dict[object, list[str]] = {}
    for key in keys:
        alike.setdefault(without_numbers(key), []).append(key)
    groups = []
    for names in alike.values():
        groups.append(DifferenceGroup(key_pattern(names), f"only in {side}"))
    return groups


def _largest(numbers: Iterable[float]) -> float:
    """Return the largest number, or NaN if there is one."""
    values = list(numbers)
    if any(map(math.isnan, values)):
        return math.nan
    return max(values)


def changes_of(members: Sequence[TensorDifference]) -> str:
    """Format the common difference of some tensors: shapes, dtypes and number of values."""
    first = members[0]
    parts = []
    if first.shapes[0] != first.shapes[1]:
        parts.append("shape {} / {}".format(*map(shape_text, first.shapes)))
    if first.dtypes[0] != first.dtypes[1]:
        parts.append("dtype {} / {}".format(*first.dtypes))
    if first.num_different:
        num_different = sum(tensor.num_different for tensor in members)
        num_elements = sum(tensor.num_elements for tensor in members)
        parts.append(f"{num_different:,} of {num_elements:,}")
    elif first.num_elements:
        parts.append("values equal")
    return ", ".join(parts)


def place_of(tensor: TensorDifference) -> str:
    """Return the place where a tensor differs; an empty string for everywhere."""
    if tensor.num_different == 1 or not tensor.region:
        return json.dumps(tensor.first_index)
    if tensor.region == str(whole(tensor.shapes[0])):
        return ""
    return tensor.region


# --- Objects --------------------------------------------------------------------------------------


def describe_object(difference: ObjectDifference) -> str:
    """Format the difference of an object as one line."""
    place = place_of_object(difference)
    a, b = difference.values
    if difference.where != "both":
        value = a or b
        return f"{place}: only in {difference.where.upper()}" + (f" ({value})" if value else "")
    if a == b:
        return f"{place} differs"
    return f"{place}: {a} -> {b}"


def place_of_object(difference: ObjectDifference) -> str:
    """Name the place of a difference."""
    part = ""
    if difference.offset not in (None, (0,)):
        part = f" part {json.dumps(difference.offset)}"
    name = difference.key
    if difference.key == COMMON_KEY:
        name = "common state"
    return f"{name}{part}" + (f": {difference.path}" if difference.path else "")


# --- The whole ------------------------------------------------------------------------------------


def counts_of(report: DiffReport) -> dict[str, int]:
    """Count the tensors by how they compare."""
    num_different = sum(tensor.shapes[0] == tensor.shapes[1] for tensor in report.tensors)
    return {
        "equal": report.num_compared - num_different,
        "differ": num_different,
        "of another shape": len(report.tensors) - num_different,
        "only in A": len(report.only_in_a),
        "only in B": len(report.only_in_b),
    }


def outcome(report: DiffReport) -> str:
    """Format how the checkpoints compare as one line."""
    counts = counts_of(report)
    num_equal = counts.pop("equal")
    num_different = counts.pop("differ")
    rest = [f"{count:,} {name}" for name, count in counts.items() if count]
    if report.objects:
        differences = count_text(len(report.objects), "difference")
        rest.append(f"{differences} in common state and objects")
    compared = count_text(report.num_compared, "tensor")
    verb = "differ"
    if num_different == 1:
        verb = "differs"
    text = f"{compared} compared: {num_equal:,} equal, {num_different:,} {verb}"
    if rest:
        return "; ".join([text, ", ".join(rest)])
    return text
