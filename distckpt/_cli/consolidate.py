"""`distckpt consolidate`: merge the shards of a checkpoint into a Hugging Face directory."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from functools import partial

from distckpt._base.memory import paused_garbage_collection
from distckpt._checkpoint.opening import open_checkpoint
from distckpt._cli.output import Output, count_text, size_text
from distckpt._cli.selection import dtype_option, given, warn_of_overflows
from distckpt._operations.consolidate import ExportReport, consolidate
from distckpt._operations.export_plan import ExportPlan, Selection, check_is_adapter, plan_export
from distckpt._operations.merge import merge
from distckpt._storage import locations


@paused_garbage_collection()
def run(arguments: Namespace, output: Output) -> int:
    """Consolidate, or merge, and print a summary."""
    selection = Selection(
        keys=arguments.keys,
        family=arguments.family,
        rename=dict(arguments.rename),
        dtype=dtype_option(arguments.dtype),
        quantize=dict(arguments.quantize) if arguments.quantize else None,
        tied=arguments.tied,
        like=arguments.like,
    )
    function: Callable[..., ExportReport]
    output_dir = arguments.output_dir
    if "checkpoints" in arguments:
        checkpoints = arguments.checkpoints
        if output_dir is None:
            *checkpoints, output_dir = checkpoints
        function = partial(merge, checkpoints, weights=arguments.weights, ema=arguments.ema)
    elif arguments.dry_run:
        stored, adapter = open_checkpoint(locations.normalize(arguments.checkpoint)), None
        if arguments.merge_adapter is not None:
            check_is_adapter(location := locations.normalize(arguments.merge_adapter))
            adapter = open_checkpoint(location)
        _show_plan(plan_export(stored, selection, adapter=adapter), output)
        return 0
    else:
        function = partial(consolidate, arguments.checkpoint)
    with output.progress("writing") as progress:
        report = function(
            output_dir,
            **selection._asdict(),
            merge_adapter=arguments.merge_adapter,
            extra_files_from=arguments.extra_files_from,
            extra_code=arguments.extra_code,
            overwrite=arguments.overwrite,
            verify=arguments.verify,
            progress=progress,
            **given(arguments, "max_file_bytes", "max_inflight_bytes"),
        )
    _print_report(report, output_dir, output)
    return 0


def _print_report(report: ExportReport, output_dir: str, output: Output) -> None:
    fields = {**vars(report), "dtypes": dict(report.dtypes), "overflows": dict(report.overflows)}
    output.json({"output_dir": output_dir, **fields})
    dtypes = ", ".join(f"{count} {name}" for name, count in sorted(report.dtypes.items()))
    output.line(
        f"{count_text(report.num_tensors, 'tensor')} ({dtypes}), {report.num_parameters:,} "
        f"parameters, {size_text(report.num_bytes)} in {count_text(len(report.files), 'file')} in "
        f"{output_dir}, {report.seconds:.2f} s"
    )
    warn_of_overflows(report.overflows, output)


def _show_plan(plan: ExportPlan, output: Output) -> None:
    """Print each tensor of an export, and the regions that it is made of."""
    sources = {
        t.name: [
            f"{part.key} {part.source}" + f" + {part.add:g}" * bool(part.add)
            for part in t.mapped.parts
        ]
        for t in plan.outputs
    }
    for tensor in plan.outputs:
        if change := tensor.change:
            sources[tensor.name] += [
                f"{key} of the adapter" for key in (change.replacement, change.a, change.b) if key
            ]
    if output.as_json:
        tensors = [
            {"name": t.name, "dtype": t.dtype, "shape": t.shape, "sources": sources[t.name]}
            for t in plan.outputs
        ]
        output.json({"tensors": tensors, "left_out": plan.left_out})
        return
    for tensor in plan.outputs:
        regions = sources[tensor.name]
        more = f" and {len(regions) - 1:,} more" if len(regions) > 1 else ""
        shape = "x".join(map(str, tensor.shape)) or "()"
        output.line(
            f"{tensor.name}  {tensor.dtype} {shape}  <- {regions[0] if regions else 'empty'}{more}"
        )
    for key in plan.left_out:
        output.line(f"left out: {key}")
    num_bytes = sum(tensor.num_bytes for tensor in plan.outputs)
    output.line(
        f"{count_text(len(plan.outputs), 'tensor')}, {size_text(num_bytes)}; nothing was written"
    )
