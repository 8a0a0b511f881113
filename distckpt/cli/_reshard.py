"""`distckpt reshard`, `import` and `convert`: rewrite a checkpoint."""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from typing import Any

from distckpt._base.errors import CheckpointingException
from distckpt._tools.reshard import ReshardReport, reshard
from distckpt.cli._arguments import is_in_parts
from distckpt.cli._output import Output, count_text, size_text
from distckpt.cli._selection import call, dtype_option, given, warn_of_overflows


def run(arguments: Namespace, output: Output) -> int:
    """Reshard, import or convert, and print a summary."""
    if "to" in arguments:
        return _convert(arguments, output)
    values = {
        "checkpoint_dir": arguments.checkpoint,
        "num_ranks": arguments.ranks,
        "overwrite": arguments.overwrite,
        **given(arguments, "max_inflight_bytes"),
    }
    doing = "resharding"
    if "hf_dir" in arguments:
        doing = "importing"
        values |= {
            "source_dir": arguments.hf_dir,
            "keys": arguments.keys,
            "rename": dict(arguments.rename),
            "dtype": dtype_option(arguments.dtype),
        }
    else:
        grids = dict(arguments.grid)
        values |= {"source_dir": arguments.source, "grids": grids, "verify": arguments.verify}
    return _reshard(arguments, output, values, doing)


def _reshard(arguments: Namespace, output: Output, values: dict[str, Any], doing: str) -> int:
    return call(
        arguments,
        output,
        reshard,
        values,
        partial(_print_report, doing),
        verb="reshard",
        doing=doing,
        place=arguments.checkpoint,
    )


def _print_report(doing: str, report: ReshardReport, output: Output) -> int:
    size = size_text(report.num_bytes)
    if doing == "converting":
        facts = ("location", "num_bytes", "seconds")
        output.json({name: getattr(report, name) for name in facts})
        output.line(f"{size} converted to {report.location} in {report.seconds:.2f} s")
        return 0
    output.json(vars(report))
    output.line(
        f"{count_text(report.num_tensors, 'tensor')} in {count_text(report.num_chunks, 'chunk')}, "
        f"{count_text(report.num_objects, 'object')}, "
        f"{size} in {count_text(report.num_files, 'file')} "
        f"in {report.location}, {report.seconds:.2f} s"
    )
    warn_of_overflows(report.overflows, output)
    return 0


# --- Formats of other programs --------------------------------------------------------------------

_FSDP_DEFAULTS: dict[str, Any] = {
    "gated": None,
    "rename": [],
    "local_experts": False,
    "expert_parallel": False,
    "fuse": False,
    "wrappers": 3,
    "without_optimizer": False,
}
"""Options that only conversions of `fsdp_dtensor` have."""


def _convert(arguments: Namespace, output: Output) -> int:
    if arguments.megatron_types:
        # Imported only for this option.
        from distckpt.megatron import interop as megatron

        megatron.register_types()
    if arguments.names or arguments.to == "fsdp_dtensor":
        return _convert_fsdp(arguments, output)
    _refuse_options_of_fsdp(arguments)
    if arguments.to == "torch_dist":
        return _export(arguments, output)
    values = {
        "source_dir": arguments.source,
        "checkpoint_dir": arguments.checkpoint,
        "common_state": {} if arguments.without_common_state else None,
        "overwrite": arguments.overwrite,
    }
    return _reshard(arguments, output, values, "converting")


def _refuse_options_of_fsdp(arguments: Namespace) -> None:
    for name, default in _FSDP_DEFAULTS.items():
        if getattr(arguments, name) != default:
            raise CheckpointingException(
                f"--{name.replace('_', '-')} is for fsdp_dtensor: give --from or --to fsdp_dtensor "
                "as well, or leave it out."
            )


def _convert_fsdp(arguments: Namespace, output: Output) -> int:
    # Imported only for these options.
    from distckpt.torch_dist import _fsdp_dtensor as conversion

    if is_in_parts(arguments) or arguments.without_common_state:
        raise CheckpointingException(
            "--part and --without-common-state are not available with fsdp_dtensor: leave them out."
        )
    if arguments.names and arguments.to == "fsdp_dtensor":
        raise CheckpointingException(
            "--from fsdp_dtensor --to fsdp_dtensor: leave out one of them."
        )
    names = {name: getattr(arguments, name) for name in _FSDP_DEFAULTS}
    names["rename"] = dict(arguments.rename)
    with_optimizer = not names.pop("without_optimizer")
    location = arguments.checkpoint
    if arguments.to == "distckpt":
        values = conversion.rewriting(arguments.source, names, with_optimizer)
        values |= {"checkpoint_dir": location, "overwrite": arguments.overwrite}
        return _reshard(arguments, output, values, "converting")
    values = {
        "checkpoint_dir": arguments.source,
        "output_dir": location,
        "to": arguments.to,
        "with_optimizer": with_optimizer,
        "overwrite": arguments.overwrite,
        **names,
    }
    with output.progress("converting") as progress:
        conversion.convert_fsdp_dtensor(**values, progress=progress)
    return _print_export(location, None, output)


def _export(arguments: Namespace, output: Output) -> int:
    if arguments.without_common_state:
        raise CheckpointingException(
            "--without-common-state is not available with --to torch_dist."
        )
    # Imported only for this option.
    from distckpt.torch_dist._export import export

    location = arguments.checkpoint
    values = {
        "checkpoint_dir": arguments.source,
        "output_dir": location,
        "overwrite": arguments.overwrite,
    }
    return call(
        arguments,
        output,
        export,
        values,
        partial(_print_export, location),
        verb="export_torch_dist",
        doing="exporting",
        place=location,
    )


def _print_export(location: str, report: None, output: Output) -> int:
    output.json({"location": location})
    output.line(f"converted to {location}")
    return 0
