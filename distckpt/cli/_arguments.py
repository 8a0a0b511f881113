"""The arguments of all verbs.

Nothing here imports torch or numpy, so that help, completion and messages about mistakes come at
once.
"""

from __future__ import annotations

from argparse import ArgumentParser, BooleanOptionalAction, Namespace, _ActionsContainer
from collections.abc import Mapping
from typing import Any

from distckpt.cli._argument_types import (
    FORMATS,
    not_negative,
    pair,
    parse_decay,
    parse_dtype,
    parse_format,
    parse_grid,
    parse_layout,
    parse_part,
    parse_size,
    parse_storage,
    parse_tolerance,
    parse_weight,
    positive,
)


def inspect(parser: ArgumentParser) -> None:
    _add_shared(parser, "path", "--html")
    parser.add_argument(
        "--key", metavar="K", help="show the chunks of this tensor and which ranks wrote them"
    )
    _add_flag(parser, "--tree", "list each module and tensor, layers one by one")
    parser.add_argument(
        "--depth", type=positive, metavar="N", help="show N levels of modules, with their totals"
    )
    parser.add_argument(
        "--sort", choices=("key", "size"), default="key", help="order of modules (default: key)"
    )


def ls(parser: ArgumentParser) -> None:
    parser.add_argument(
        "root", help="a directory that holds checkpoints, such as a manager's: a path or URL"
    )
    _add_shared(parser, "--html")
    parser.add_argument(
        "--changes",
        type=positive,
        metavar="N",
        help="on the page, how the layers of the newest N steps have changed; reads the tensors of "
        "those that were saved without stats=True",
    )
    _add_shared(parser, "--keys", "--recompute")


def cat(parser: ArgumentParser) -> None:
    _add_shared(parser, "path")
    parser.add_argument(
        "key",
        metavar="KEY[SLICE]",
        nargs="?",
        help="a tensor, or part of it as in 'up.weight[0:4, :, 3]', or an object (default: common "
        "state)",
    )
    parser.add_argument(
        "--npy", metavar="FILE", help="save all values of the tensor as a numpy file"
    )


def verify(parser: ArgumentParser) -> None:
    parser.add_argument("path", help="a checkpoint: a path or URL")
    mode = parser.add_mutually_exclusive_group()
    _add_flag(mode, "--fast", "marker, manifest, file sizes and headers only")
    _add_flag(mode, "--full", "read every byte once (the default)")
    _add_shared(parser, "--jobs")
    _add_parts(parser)
    _add_shared(parser, "--journal")


def seal(parser: ArgumentParser) -> None:
    parser.add_argument("path", help="a directory that another program wrote: a path or URL")
    _add_flag(parser, "--overwrite", "replace a seal whose files have changed since")
    _add_shared(parser, "--jobs")


def stats(parser: ArgumentParser) -> None:
    _add_shared(parser, "path")
    _add_flag(parser, "--tree", "list each tensor, layers one by one")
    _add_shared(parser, "--keys", "--recompute")
    _add_parts(parser)
    _add_shared(parser, "--journal")


def diff(parser: ArgumentParser) -> None:
    parser.add_argument(
        "a", metavar="A", help="a checkpoint, or a Hugging Face directory: a path or URL"
    )
    parser.add_argument("b", metavar="B", help="another checkpoint or Hugging Face directory")
    _add_shared(parser, "--keys", "--rename", "--html")
    parser.add_argument(
        "--atol",
        type=parse_tolerance,
        default=0.0,
        help="tolerated absolute difference (default: 0)",
    )
    parser.add_argument(
        "--rtol",
        type=parse_tolerance,
        default=0.0,
        help="tolerated difference relative to B (default: 0)",
    )
    _add_parts(parser)
    _add_shared(parser, "--journal")


def consolidate(parser: ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="a checkpoint, or a folder of shards: a path or URL")
    parser.add_argument(
        "output_dir", help="directory for model.safetensors, or several files and their index"
    )
    _add_export(parser)


def merge(parser: ArgumentParser) -> None:
    paths = (
        "checkpoints of any format, then the output directory unless --output names it: paths or "
        "URLs"
    )
    parser.add_argument("checkpoints", nargs="+", metavar="PATH", help=paths)
    output = "the output directory; --overwrite needs it here, not behind the checkpoints"
    parser.add_argument("-o", "--output", dest="output_dir", metavar="DIR", help=output)
    _add_export(parser)
    how = parser.add_mutually_exclusive_group()
    weights = "one for each checkpoint, behind all paths (default: equal)"
    how.add_argument("--weights", nargs="+", type=parse_weight, metavar="W", help=weights)
    how.add_argument(
        "--ema",
        type=parse_decay,
        metavar="DECAY",
        help="moving average, from the oldest to the newest",
    )


def contradiction(arguments: Namespace) -> str:
    """Return a contradiction between the arguments, or an empty string."""
    return (
        _contradiction_of_pages(arguments)
        or _contradiction_of_parts(arguments)
        or _contradiction_of_merge(arguments)
    )


def _contradiction_of_pages(arguments: Namespace) -> str:
    if "journals" in arguments and arguments.output is None and arguments.html is None:
        return "trace writes a trace (-o FILE), a page (--html FILE), or both"
    if "changes" in arguments:
        return _contradiction_of_changes(arguments)
    return ""


def _contradiction_of_changes(arguments: Namespace) -> str:
    if arguments.html is None and (arguments.changes or arguments.keys or arguments.recompute):
        return "--changes, --keys and --recompute are for the page that --html writes"
    if arguments.recompute and not arguments.changes:
        return "--recompute goes with --changes N"
    return ""


def _contradiction_of_parts(arguments: Namespace) -> str:
    if "part" not in arguments:
        return ""
    if arguments.watch and not arguments.status:
        return "--watch goes with --status"
    if "journal" in arguments and is_in_parts(arguments) != (arguments.journal is not None):
        return (
            "work in parts needs --journal DIR, the same for all, and --journal one of --part, "
            "--status, --finish and --abandon"
        )
    return ""


def _contradiction_of_merge(arguments: Namespace) -> str:
    if "checkpoints" not in arguments:
        return ""
    count = len(arguments.checkpoints) - (arguments.output_dir is None)
    if count < 2:
        return "merge takes two checkpoints or more, and an output directory"
    if arguments.weights and len(arguments.weights) != count:
        return f"--weights has {len(arguments.weights)} numbers for {count} checkpoints"
    if arguments.overwrite and arguments.output_dir is None:
        last = arguments.checkpoints[-1]
        return (
            f"with --overwrite, --output must name the output directory: {last!r} could be a "
            "checkpoint to merge"
        )
    return ""


def _add_export(parser: ArgumentParser) -> None:
    _add_flag(parser, "--dry-run", "list the tensors of the export and their sources, and stop")
    which = parser.add_mutually_exclusive_group()
    _add_shared(which, "--keys")
    everything = "export the state of the optimizer, too, which is left out otherwise"
    _add_flag(which, "--all", everything)
    _add_shared(parser, "--rename", "--dtype")
    parser.add_argument(
        "--family",
        metavar="auto|PATH",
        help="convert names and shapes of Megatron Core, MaxText or transformers, by the "
        "config.json of --like, or at PATH",
    )
    layout = "names and shapes of MaxText, with layers stacked or not; --family tells the model"
    parser.add_argument("--layout", choices=("jax", "jax-layers"), help=layout)
    tied = "leave out or write tied copies of a tensor (default: drop)"
    parser.add_argument("--tied", choices=("drop", "write"), default="drop", help=tied)
    parser.add_argument(
        "--max-file-bytes",
        type=parse_size,
        metavar="SIZE",
        help="largest size of a file, such as 5GB",
    )
    parser.add_argument(
        "--quantize",
        action="append",
        type=parse_format,
        metavar="[PATTERN=]FORMAT",
        help="quantize the usual weights of models, or tensors by pattern, to one of "
        f"{', '.join(FORMATS)}; can be repeated",
    )
    parser.add_argument(
        "--merge-adapter", metavar="DIR", help="add the LoRA that PEFT saved there to the weights"
    )
    parser.add_argument(
        "--like",
        metavar="DIR",
        help="divide tensors among files as this Hugging Face directory does",
    )
    parser.add_argument(
        "--extra-files-from",
        metavar="DIR",
        help="copy config, tokenizer and similar files from there",
    )
    _add_flag(parser, "--extra-code", "copy *.py files from there too")
    _add_shared(parser, "--overwrite", "--max-inflight-bytes", "--no-verify")
    _add_parts(parser)


def completion(parser: ArgumentParser) -> None:
    parser.add_argument(
        "shell", choices=("bash", "zsh", "fish"), help="the shell that reads the script"
    )


def import_hf(parser: ArgumentParser) -> None:
    parser.add_argument("hf_dir", help="a Hugging Face directory: a path or URL")
    _add_shared(parser, "checkpoint")
    _add_shared(parser, "--keys", "--rename", "--dtype")
    _add_shared(parser, "--ranks", "--overwrite", "--max-inflight-bytes")
    _add_parts(parser)


def convert(parser: ArgumentParser) -> None:
    parser.add_argument(
        "source",
        help="a checkpoint, a directory with a .metadata file, or a Hugging Face directory",
    )
    _add_shared(parser, "checkpoint")
    to = (
        "format of the new checkpoint; torch_dist is Megatron Core's, which PyTorch reads as well, "
        "fsdp_dtensor Megatron-FSDP's"
    )
    formats = ("distckpt", "torch_dist", "fsdp_dtensor")
    parser.add_argument("--to", choices=formats, default="distckpt", help=to)
    source = "the source is Megatron-FSDP's, and gets Megatron Core's names"
    parser.add_argument("--from", dest="names", choices=("fsdp_dtensor",), help=source)
    gated = "for --to fsdp_dtensor: MLPs are gated (default: what the run's arguments say)"
    parser.add_argument("--gated", action=BooleanOptionalAction, default=None, help=gated)
    rename = "for fsdp_dtensor: text in Megatron Core's names, and in Megatron-FSDP's"
    parser.add_argument(
        "--rename", action="append", metavar="OLD=NEW", type=pair, default=[], help=rename
    )
    _add_flag(parser, "--local-experts", "Megatron-FSDP's experts are modules of their own")
    _add_flag(parser, "--expert-parallel", "for --from fsdp_dtensor: experts have an optimizer")
    _add_flag(parser, "--fuse", "join projections that Megatron-FSDP has as one")
    wrappers = "for --to fsdp_dtensor: 2 for runs in 32 bits (default: 3)"
    parser.add_argument("--wrappers", type=positive, metavar="N", default=3, help=wrappers)
    _add_flag(parser, "--without-optimizer", "for fsdp_dtensor: leave out the optimizer")
    _add_flag(parser, "--overwrite", "replace an existing checkpoint")
    _add_flag(parser, "--megatron-types", "import Megatron Core, register its Enum classes")
    _add_flag(parser, "--without-common-state", "leave out values that are not sharded")
    _add_parts(parser)


def reshard(parser: ArgumentParser) -> None:
    parser.add_argument("source", help="a checkpoint: a path or URL")
    _add_shared(parser, "checkpoint")
    grid = "divide matching tensors into A x B parts, part i written by rank i; can be repeated"
    parser.add_argument(
        "--grid", action="append", metavar="PATTERN=AxB", type=parse_grid, default=[], help=grid
    )
    _add_shared(parser, "--ranks", "--overwrite", "--max-inflight-bytes", "--no-verify")
    _add_parts(parser)


def plan(parser: ArgumentParser) -> None:
    parser.add_argument("path", help="a checkpoint, or a model directory: a path or URL")
    parser.add_argument(
        "--ranks", type=positive, metavar="N", required=True, help="number of ranks"
    )
    parser.add_argument(
        "--nodes", type=positive, metavar="M", default=1, help="number of nodes (default: 1)"
    )
    layout = (
        "degrees of parallelism: fsdp, tp=T, pp=P, ep=E, with commas; ranks that are left are "
        "replicas (default: fsdp)"
    )
    parser.add_argument(
        "--layout", type=parse_layout, metavar="DEGREES", default={"fsdp": 0}, help=layout
    )
    family = (
        "plan for the tensors that a model of transformers has in memory, by the config.json "
        "there, or at PATH"
    )
    parser.add_argument("--family", metavar="auto|PATH", help=family)
    storage = "bandwidth of each node, and latency of a request, for seconds: 2GB/s,1ms"
    parser.add_argument("--storage", type=parse_storage, metavar="SPEED", help=storage)


def reject(parser: ArgumentParser) -> None:
    parser.add_argument("root", help="the directory of a checkpoint manager: a path or URL")
    parser.add_argument("step", metavar="STEP", type=int, help="number of the step")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--reason", metavar="TEXT", help="the finding of the check")
    _add_flag(action, "--undo", "let the step count again")


def prune(parser: ArgumentParser) -> None:
    parser.add_argument("root", help="the directory of a CheckpointManager: a path or URL")
    parser.add_argument(
        "--keep-last", type=positive, metavar="N", help="keep the newest N complete (default: all)"
    )
    parser.add_argument(
        "--keep-every", type=positive, metavar="N", help="keep steps that are multiples of N"
    )
    parser.add_argument(
        "--best-metric", metavar="NAME", help="keep the checkpoints with its best values"
    )
    parser.add_argument(
        "--best-mode",
        choices=("min", "max"),
        default="min",
        help="min or max is best (default: min)",
    )
    parser.add_argument(
        "--keep-best",
        type=positive,
        default=1,
        metavar="N",
        help="number of these to keep (default: 1)",
    )
    kept = "remove the optimizer state of all but the newest N complete (default: keep it)"
    parser.add_argument("--keep-optimizer", type=positive, metavar="N", help=kept)
    abandoned = (
        "remove leftovers in which nothing was written for this long (default: 60; a week for work "
        "in parts that is not complete)"
    )
    parser.add_argument("--abandoned-after", type=positive, metavar="MINUTES", help=abandoned)
    _add_flag(parser, "--dry-run", "list the checkpoints to remove, without removing anything")


def bench(parser: ArgumentParser) -> None:
    parser.add_argument(
        "dir", metavar="DIR", help="directory on the storage, or URL; everything written is removed"
    )
    parser.add_argument(
        "--gb",
        type=not_negative,
        default=2.0,
        help="size of the whole state (default: 2); 0 only tries the requests of saves",
    )
    parser.add_argument(
        "--ranks", type=positive, default=2, help="number of processes (default: %(default)s)"
    )
    parser.add_argument(
        "--runs",
        type=positive,
        default=5,
        help="rounds to take the median of (default: %(default)s)",
    )


def trace(parser: ArgumentParser) -> None:
    parser.add_argument(
        "journals", nargs="+", metavar="JOURNAL", help="lines of the logger distckpt.events"
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="the trace to write")
    _add_shared(parser, "--html")


# --- Shared


_SHARED: Mapping[str, Mapping[str, Any]] = {
    "path": {"help": "a checkpoint, or a folder of safetensors files: a path or URL"},
    "checkpoint": {"help": "the new checkpoint: a path or URL"},
    "--keys": {
        "action": "append",
        "metavar": "PATTERN",
        "help": "prefix of keys, or pattern with *; can be repeated",
    },
    "--html": {"metavar": "FILE", "help": "write a self-contained page for the browser"},
    "--rename": {
        "action": "append",
        "metavar": "OLD=NEW",
        "type": pair,
        "default": [],
        "help": "replace a prefix of keys; can be repeated",
    },
    "--dtype": {
        "action": "append",
        "metavar": "[PATTERN=]DTYPE",
        "type": parse_dtype,
        "help": "convert to bf16, or only some: '*.norm.weight=fp32'; can be repeated",
    },
    "--recompute": {
        "action": "store_true",
        "help": "read the tensors, also where the save has stored their statistics (stats=True)",
    },
    "--jobs": {"type": positive, "help": "threads (default: 4, or 10 on an object store)"},
    "--no-verify": {
        "action": "store_false",
        "dest": "verify",
        "help": "do not compare checksums",
    },
    "--ranks": {
        "type": positive,
        "default": 1,
        "metavar": "N",
        "help": "write the files of N ranks, of even size (default: 1)",
    },
    "--overwrite": {"action": "store_true", "help": "replace an existing output"},
    "--max-inflight-bytes": {
        "type": parse_size,
        "metavar": "SIZE",
        "help": "memory for data in transit",
    },
    "--journal": {
        "metavar": "DIR",
        "help": "with --part: a directory, which is made, for the findings of the parts",
    },
}
"""Arguments and options that several verbs share."""


def _add_shared(parser: _ActionsContainer, *names: str) -> None:
    for name in names:
        parser.add_argument(name, **_SHARED[name])


def _add_flag(parser: _ActionsContainer, name: str, help_text: str) -> None:
    parser.add_argument(name, action="store_true", help=help_text)


def _add_parts(parser: ArgumentParser) -> None:
    """Declare `--part` and its companions."""
    group = parser.add_argument_group("in parts", "by processes that know nothing of each other")
    action = group.add_mutually_exclusive_group()
    part = "do part K of N, from 0, or the one that Slurm, Kubernetes (auto/N) or torchrun says"
    action.add_argument("--part", metavar="K/N|auto", type=parse_part, help=part)
    _add_flag(action, "--status", "list the whole, missing and running pieces")
    finish = "complete the output, which the last part does by itself"
    _add_flag(action, "--finish", finish)
    _add_flag(action, "--abandon", "remove the files of the parts so far")
    _add_flag(group, "--watch", "with --status: show the progress of all parts")


def is_in_parts(arguments: Namespace) -> bool:
    """Whether work in parts was asked for."""
    return bool(arguments.part or arguments.status or arguments.finish or arguments.abandon)
