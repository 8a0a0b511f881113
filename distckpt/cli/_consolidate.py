"""`distckpt consolidate` and `distckpt merge`: write a Hugging Face directory."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from distckpt._base.interrupts import paused_garbage_collection
from distckpt._base.options import ExportOptions
from distckpt._compute.merge import merge, plan_merge
from distckpt._operations.consolidate import consolidate, plan_consolidation
from distckpt._operations.export_plan import ExportPlan
from distckpt._operations.export_write import ExportReport
from distckpt._plan.export import OutputTensor
from distckpt.cli._arguments import is_in_parts
from distckpt.cli._output import Output, count_text, shape_text, size_text
from distckpt.cli._selection import dtype_option, given, run_parts, warn_of_overflows


@paused_garbage_collection()
def run(arguments: Namespace, output: Output) -> int:
    """Consolidate, or merge, and print a summary."""
    options = _options(arguments)
    if "checkpoints" in arguments:
        return _merge(arguments, options, output)
    if arguments.dry_run:
        _show_plan(plan_consolidation(arguments.checkpoint, options), output)
        return 0
    if is_in_parts(arguments):
        values = {"checkpoint": arguments.checkpoint}
        return _run_parts(arguments, "consolidate", values, arguments.output_dir, options, output)
    with output.progress("writing") as progress:
        report = consolidate(
            arguments.checkpoint,
            arguments.output_dir,
            overwrite=arguments.overwrite,
            options=replace(options, progress=progress),
        )
    return _print_report(arguments.output_dir, report, output)


def _merge(arguments: Namespace, options: ExportOptions, output: Output) -> int:
    checkpoints = arguments.checkpoints
    output_dir = arguments.output_dir
    if output_dir is None:
        *checkpoints, output_dir = checkpoints
    if arguments.dry_run:
        plan = plan_merge(checkpoints, arguments.weights, arguments.ema, options)
        _show_plan(plan, output)
        return 0
    if is_in_parts(arguments):
        how = {"weights": arguments.weights, "ema": arguments.ema}
        values = {"checkpoints": checkpoints, **how}
        return _run_parts(arguments, "merge", values, output_dir, options, output)
    with output.progress("writing") as progress:
        report = merge(
            checkpoints,
            output_dir,
            weights=arguments.weights,
            ema=arguments.ema,
            overwrite=arguments.overwrite,
            options=replace(options, progress=progress),
        )
    return _print_report(output_dir, report, output)


def _run_parts(
    arguments: Namespace,
    verb: str,
    values: Mapping[str, Any],
    output_dir: str,
    options: ExportOptions,
    output: Output,
) -> int:
    """Run, show, finish or abandon work in parts, as the arguments say."""
    where = {"output_dir": output_dir, "overwrite": arguments.overwrite, "options": options}
    show = partial(_print_report, output_dir)
    return run_parts(arguments, output, verb, {**values, **where}, output_dir, show)


def _options(arguments: Namespace) -> ExportOptions:
    return ExportOptions(
        keys=["*"] if arguments.all else arguments.keys,
        family=arguments.family,
        rename=dict(arguments.rename),
        dtype=dtype_option(arguments.dtype),
        quantize=dict(arguments.quantize) if arguments.quantize else None,
        tied=arguments.tied,
        like=arguments.like,
        merge_adapter=arguments.merge_adapter,
        extra_files_from=arguments.extra_files_from,
        extra_code=arguments.extra_code,
        verify=arguments.verify,
        **given(arguments, "max_file_bytes", "max_inflight_bytes"),
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
        output.line(f"left out: {count} of the optimizer; --all exports them, too")


# --- Without writing ------------------------------------------------------------------------------


def _show_plan(plan: ExportPlan, output: Output) -> None:
    """Print each tensor of an export, with its regions."""
    sources = {}
    for tensor in plan.outputs:
        sources[tensor.name] = _sources_of(tensor, plan)
    output.json(
        {
            "tensors": [_facts(tensor, sources[tensor.name]) for tensor in plan.outputs],
            "left_out": [*plan.dropped, *plan.left_out],
        }
    )
    for tensor in plan.outputs:
        output.line(_line_of(tensor, sources[tensor.name]))
    for key in plan.dropped:
        output.line(f"left out: {key}")
    _print_left_out(plan.left_out, output)
    num_bytes = sum(tensor.num_bytes for tensor in plan.outputs)
    output.line(
        f"{count_text(len(plan.outputs), 'tensor')}, {size_text(num_bytes)}; nothing was written"
    )


def _facts(tensor: OutputTensor, sources: Sequence[str]) -> dict[str, object]:
    return {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": tensor.shape,
        "sources": sources,
    }


def _line_of(tensor: OutputTensor, sources: Sequence[str]) -> str:
    first = "empty"
    if sources:
        first = sources[0]
    more = ""
    if len(sources) > 1:
        more = f" and {len(sources) - 1:,} more"
    return f"{tensor.name}  {tensor.dtype} {shape_text(tensor.shape)}  <- {first}{more}"


def _sources_of(tensor: OutputTensor, plan: ExportPlan) -> list[str]:
    regions = []
    for part in tensor.mapped.parts:
        added = ""
        if part.add:
            added = f" + {part.add:g}"
        regions.append(f"{part.key} {part.source}{added}")
    return [*regions, *plan.source.keys_besides(tensor)]
