"""`distckpt consolidate` and `distckpt merge`: write a Hugging Face directory."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from distckpt._base.interrupts import paused_garbage_collection
from distckpt._base.options import ExportOptions
from distckpt._compute.merge import merge, plan_merge
from distckpt._operations.consolidate import ExportReport, consolidate, plan_consolidation
from distckpt._operations.export_plan import ExportPlan
from distckpt._plan.export import OutputTensor
from distckpt.cli._output import Output, count_text, shape_text, size_text
from distckpt.cli._selection import call, dtype_option, given, warn_of_overflows

_OPTIONS = (
    "family",
    "layout",
    "tied",
    "like",
    "merge_adapter",
    "verify",
    "extra_files_from",
    "extra_code",
    "max_file_bytes",
    "max_inflight_bytes",
)
"""Options that the functions have under the same names."""


@paused_garbage_collection()
def run(arguments: Namespace, output: Output) -> int:
    """Consolidate, or merge, and print a summary."""
    options = _options(arguments)
    output_dir = arguments.output_dir
    plan: Callable[..., ExportPlan] = plan_consolidation
    function: Callable[..., ExportReport] = consolidate
    sources: dict[str, Any] = {}
    if "checkpoints" in arguments:
        plan = plan_merge
        function = merge
        checkpoints = arguments.checkpoints
        if output_dir is None:
            *checkpoints, output_dir = checkpoints
        sources["checkpoints"] = checkpoints
        sources |= {"weights": arguments.weights, "ema": arguments.ema}
    else:
        sources["checkpoint"] = arguments.checkpoint
    if arguments.dry_run:
        _show_plan(plan(**sources, options=options), output)
        return 0
    how = {"output_dir": output_dir, "overwrite": arguments.overwrite, "options": options}
    return call(
        arguments,
        output,
        function,
        {**sources, **how},
        partial(_print_report, output_dir),
        verb=function.__name__,
        doing="writing",
        place=output_dir,
    )


def _options(arguments: Namespace) -> ExportOptions:
    return ExportOptions(
        keys=["*"] if arguments.all else arguments.keys,
        rename=dict(arguments.rename),
        dtype=dtype_option(arguments.dtype),
        quantize=dict(arguments.quantize) if arguments.quantize else None,
        **given(arguments, *_OPTIONS),
    )


def _print_report(output_dir: str, report: ExportReport, output: Output) -> int:
    output.json({"output_dir": output_dir, **vars(report)})
    dtypes = ", ".join(f"{count} {name}" for name, count in sorted(report.dtypes.items()))
    output.line(
        f"{count_text(report.num_tensors, 'tensor')} ({dtypes}), {report.num_parameters:,} "
        f"parameters, {size_text(report.num_bytes)} in {count_text(len(report.files), 'file')} in "
        f"{output_dir}, {report.seconds:.2f} s"
    )
    _print_left_out(report.left_out, output)
    warn_of_overflows(report.overflows, output)
    return 0


def _print_left_out(left_out: Sequence[str], output: Output) -> None:
    if left_out:
        count = count_text(len(left_out), "tensor")
        output.line(f"left out: {count}; --dry-run names them, --all exports an optimizer's")


# --- Without writing ------------------------------------------------------------------------------


def _show_plan(plan: ExportPlan, output: Output) -> None:
    """Print each tensor of an export, with its regions."""
    tensors = []
    for tensor in plan.outputs:
        sources = _sources_of(tensor, plan)
        first = "empty"
        more = ""
        if sources:
            first = sources[0]
        if len(sources) > 1:
            more = f" and {len(sources) - 1:,} more"
        output.line(f"{tensor.name}  {tensor.dtype} {shape_text(tensor.shape)}  <- {first}{more}")
        facts = {"name": tensor.name, "dtype": tensor.dtype, "shape": tensor.shape}
        tensors.append({**facts, "sources": sources})
    output.json({"tensors": tensors, "left_out": [*plan.dropped, *plan.left_out]})
    for key in plan.dropped:
        output.line(f"left out: {key}")
    _print_left_out(plan.left_out, output)
    num_bytes = sum(tensor.num_bytes for tensor in plan.outputs)
    output.line(
        f"{count_text(len(plan.outputs), 'tensor')}, {size_text(num_bytes)}; nothing was written"
    )


def _sources_of(tensor: OutputTensor, plan: ExportPlan) -> list[str]:
    regions = []
    for part in tensor.mapped.parts:
        change = ""
        if part.factor != 1.0:
            change = f" * {part.factor:g}"
        if part.add:
            change += f" + {part.add:g}"
        regions.append(f"{part.key} {part.source}{change}")
    return [*regions, *plan.source.keys_besides(tensor)]
