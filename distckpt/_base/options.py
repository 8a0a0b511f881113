"""Options of the verbs: frozen values that pass whole from callers to users."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, TypeVar

from distckpt._base.lazy import torch
from distckpt._base.messages import did_you_mean
from distckpt._base.public import used_here
from distckpt._base.threads import DEFAULT_INFLIGHT_BYTES

Progress = Callable[[int, int], object]
"""Called with the finished and the total bytes of this rank.

One thread calls at a time.
"""

ShareReads = Literal["auto", "on", "off"]
"""Reading of values that several ranks request, see `LoadOptions`."""

DEFAULT_MOVE_BYTES = 64 << 20
"""Memory for tensors on their way between ranks; more is not faster."""

FIGURES = ("fingerprint", "stats")
"""Options of saves that store figures about the values of each tensor."""

_Options = TypeVar("_Options", "SaveOptions", "LoadOptions", "MoveOptions", "ExportOptions")


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """Options of `save` and `async_save`.

    Attributes:
        strategy: writes the shards in a format of your own; a `SaveShardedStrategy`, or
            `(backend, version)` of a registered one. None for the built-in safetensors format.
        validate_access_integrity: refuse state dicts in which an element of a global tensor is held
            by no rank, and tensors in common state that have nothing in common on two ranks (see
            `unsupported`); warn about other values there that differ. With False, gaps are not
            saved and cannot be loaded. Overlaps and contradictions are always refused.
        validate_replicas: None compares samples of tensors that several ranks hold (up to 1 KiB of
            each). Those that differ are stored whole, from their main replicas, with a warning that
            names them; where they have nothing in common, the save is refused (see `unsupported`).
            True compares all of each tensor, and objects, which reads them once more, and refuses
            any difference. False compares nothing: ranks share the writing of replicas, so parts of
            each are stored if they differ. Buffers of modules may differ: the main replica is
            stored.
        unsupported: "raise" refuses a state dict with values that cannot be stored, or with tensors
            that should be copies of each other and have nothing in common. "warn" stores all else,
            and the main replicas of such tensors, and names them in a warning, so that a running
            job keeps its checkpoints. None is "raise", except for the saves of a
            `CheckpointManager` after its first one.
        fingerprint: store the fingerprint of each tensor, as it is in memory, see
            `distckpt.fingerprint`. `verify` compares it with the stored values, and
            `Checkpoint.fingerprints(stored=True)` returns it, for comparing copies in any format
            and layout with the state that was saved. It takes one more pass over the tensors,
            before `async_save` returns.
        stats: store statistics of each tensor: norm, mean, extremes, and how many values are NaN,
            infinite and zero. `distckpt ls --html --changes` then draws the layers of a run without
            reading tensors, and `distckpt stats` prints them. It takes one more pass over the
            tensors, before `async_save` returns.
        separate_optimizer: store tensors of optimizers (keys with a part `state` or `optim...`) in
            files of their own, so that they can be removed without a copy of the weights.
        durable: return only when everything is on disk. With False the checkpoint still appears in
            one step, but a power failure shortly afterwards may leave it damaged, which checksums
            reveal.
        max_inflight_bytes: memory for data on its way to storage, on each rank. At least one window
            of 8 MiB is used. For `async_save`, half of it is for staged copies and half for data
            that is being written. None for the default: 256 MiB while writing, and no limit on
            staged copies.
        timeout: of a background save, seconds without any progress after which it fails.
        exit_timeout: of a background save, seconds that the end of the process waits for it.
        progress: called with the bytes written so far and the bytes this rank will write.
        on_report: called with the `SaveReport` on every rank when the checkpoint is committed, by a
            background save from its thread.
    """

    strategy: Any = None
    validate_access_integrity: bool = True
    validate_replicas: bool | None = None
    unsupported: Literal["raise", "warn"] | None = None
    fingerprint: bool = False
    stats: bool = False
    separate_optimizer: bool = False
    durable: bool = True
    max_inflight_bytes: int | None = None
    timeout: float = 1800.0
    exit_timeout: float = 600.0
    progress: Progress | None = None
    on_report: Callable[[Any], object] | None = None


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Options of `load`.

    Attributes:
        strategy: reads the shards in a format of your own; a `LoadShardedStrategy`, or
            `(backend, version)` of a registered one. None for the format of the checkpoint.
        validate_access_integrity: check first that the main replicas of all ranks cover each
            requested tensor and object grid exactly once, which finds mistakes in offsets. None
            checks the same, except that one process alone may request a part of a tensor; True
            refuses this, too; with False nothing is checked, and each rank gets its request.
        verify: compare the checksum of every block of 256 KiB of which a byte is loaded.
        allow_dtype_cast: convert tensors to the requested dtype even when that loses information.
            Lossless conversions (bf16 to fp32) are always made. Where values are infinite or NaN
            afterwards, in a floating point dtype of a smaller range (fp32 to fp16), a warning names
            the tensors.
        share_reads: how to read files of which several ranks request parts: on one of them, which
            sends the others their parts, or on each. "auto" shares large reads where samples show
            that ranks send faster than they read, but not when ranks of one machine read a local
            path, since they share its cache. "on" always shares, "off" never does. Tensors are the
            same in each case; the `LoadReport` says what was measured and sent.
        materialize: a device; modules of the state dict that are on the meta device get memory
            there, tied parameters stay tied, and buffers that no checkpoint holds are computed by
            the `reset_parameters` of their modules, or the `_init_weights` of modules around them
            (transformers). Parameters that are not stored are an error with any `strict`, and
            modules are on the meta device again when a load fails. Create the optimizer after that.
        max_inflight_bytes: memory for data on its way from storage, on each rank. At least one
            window of 8 MiB is used.
        progress: called with the bytes read so far and the bytes this rank will read.
        on_report: called with the `LoadReport` on every rank.
    """

    strategy: Any = None
    validate_access_integrity: bool | None = None
    verify: bool = True
    allow_dtype_cast: bool = False
    share_reads: ShareReads = "auto"
    materialize: str | torch.device | None = None
    max_inflight_bytes: int = DEFAULT_INFLIGHT_BYTES
    progress: Progress | None = None
    on_report: Callable[[Any], object] | None = None


@dataclass(frozen=True, kw_only=True)
class MoveOptions:
    """Options of `redistribute` and `Route`.

    Attributes:
        atomic: change tensors only when everything has arrived: after an error, each rank has all
            old values or all new ones. It takes memory for a second copy of the arriving values.
        allow_dtype_cast: convert tensors to the dtype of a target even when that loses information.
            Lossless conversions (bf16 to fp32) are always made.
        max_inflight_bytes: memory for data on its way, on each rank; the next move uses it again.
        on_report: called with the `MoveReport` on every rank.
    """

    atomic: bool = False
    allow_dtype_cast: bool = False
    max_inflight_bytes: int = DEFAULT_MOVE_BYTES
    on_report: Callable[[Any], object] | None = None


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Options of `consolidate` and `merge`.

    Attributes:
        keys: which tensors: a prefix of their keys, a pattern with `*`, or a list of these;
            `!*.bias` for all but those. Tensors of optimizers are exported only if a pattern
            without `!` selects them: "*" for everything that is stored.
        rules: changes of names and shapes, see `distckpt.rules`.
        family: afterwards, the rules of the model's family, from the names of Megatron Core or of
            transformers in memory: "auto" reads the `config.json` of `like`, a path another one,
            see `distckpt.families`.
        layout: with a family, names and shapes of MaxText in JAX: "jax" stacks layers, "jax-layers"
            does not.
        rename: afterwards, old prefixes of names -> new ones.
        dtype: convert floating point tensors of 16 bits and more; or a dict of patterns of new
            names. Integers and 8-bit floats are converted only by a pattern that is exactly their
            name. With a dtype for all tensors, rules or a family, quantized tensors become values,
            else they are written as they are stored.
        tied: of tied tensors, write the first only ("drop", as Hugging Face does) or each
            ("write").
        unmatched: with rules, a tensor that none of them matches is an error, or keeps name and
            shape ("keep").
        max_file_bytes: maximum size of the data in one file.
        fqn_to_index_mapping: new name -> number of its file, from 1, in place of `max_file_bytes`.
        quantize: quantize the usual tensors of a format: "fp8-block", "fp8-block-ue8m0",
            "fp8-tensor", "fp8-channel", "int8-channel", "mxfp4", "mxfp4-packed", "int4" or "nvfp4".
            Or a dict of patterns of new names -> format; the first that matches counts.
            `config.json` describes the result.
        like: divide the tensors among files as this Hugging Face directory does, and compare shapes
            with it. When it is quantized, `quantize` with one format is for the same tensors.
        merge_adapter: a directory that PEFT saved, with LoRA for a model of the names of the
            export: its products are added to the weights, and modules that it saved take the place
            of the model's, as in PEFT's `merge_and_unload`. Quantized tensors become values.
        extra_files_from: a directory whose other files (config, tokenizer) are copied, with their
            modes: files of at most 256 MiB, and links to such files inside the directory; with a
            family, `like` where it is left out. In `config.json` the dtype follows `dtype`, or that
            of all tensors; its description of quantized ones, too.
        extra_code: copy `*.py` files too, which programs that trust the export may run.
        verify: compare the checksums of a distckpt checkpoint.
        max_inflight_bytes: memory for data on its way; at least one window of 32 MiB is used.
        progress: called with the bytes written so far and the bytes this rank will write.
    """

    keys: str | Sequence[str] | None = None
    rules: Sequence[Any] = ()
    family: str | os.PathLike[str] | None = None
    layout: Literal["jax", "jax-layers"] | None = None
    rename: Mapping[str, str] | None = None
    dtype: torch.dtype | Mapping[str, torch.dtype] | None = None
    tied: Literal["drop", "write"] = "drop"
    unmatched: Literal["error", "keep"] = "error"
    max_file_bytes: int = 5_000_000_000
    fqn_to_index_mapping: Mapping[str, int] | None = None
    quantize: str | Mapping[str, str] | None = None
    like: str | os.PathLike[str] | None = None
    merge_adapter: str | os.PathLike[str] | None = None
    extra_files_from: str | os.PathLike[str] | None = None
    extra_code: bool = False
    verify: bool = True
    max_inflight_bytes: int = 256 << 20
    progress: Progress | None = None


def with_changes(
    call: Callable[..., Any],
    kind: type[_Options],
    options: _Options | None,
    changes: Mapping[str, Any],
) -> _Options:
    """Return the options of a call: a value, changed by keywords.

    Args:
        call: the called function or class.
        kind: class of its options.
        options: given as a value.
        changes: given by keyword.

    Raises:
        TypeError: `options` is of another class, or there is no option of a name.
    """
    name = call.__name__
    if options is not None and not isinstance(options, kind):
        raise TypeError(f"options of {name} is a {kind.__name__}, got {type(options).__name__}")
    known: list[str] = [field.name for field in fields(kind)]
    for unknown in [name for name in changes if name not in known]:
        accepted = [*known, *inspect.signature(call).parameters]
        near = used_here(unknown) or did_you_mean(unknown, accepted)
        raise TypeError(f"{name}() has no option {unknown!r}{near}; see {kind.__name__}")
    return replace(options or kind(), **changes)


def check_options(options: SaveOptions | LoadOptions | MoveOptions | ExportOptions) -> None:
    """Check switches and callbacks.

    Raises:
        TypeError: a callback cannot be called.
        ValueError: a switch is neither True nor False.
    """
    for field in fields(options):
        value = getattr(options, field.name)
        if field.type == "bool" or (field.type == "bool | None" and value is not None):
            check_switch(field.name, value)
        if field.name in ("progress", "on_report") and not (value is None or callable(value)):
            raise TypeError(f"{field.name} is a function, or None, got {value!r:.100}")


def check_switch(name: str, value: object) -> None:
    """Raise ValueError when an argument is neither True nor False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r:.100}")


def check_seconds(name: str, seconds: object) -> None:
    """Raise ValueError when an argument is no duration in seconds."""
    if not isinstance(seconds, int | float) or not seconds > 0:
        raise ValueError(f"{name} is a number of seconds, above 0, got {seconds!r}")


# --- Reports --------------------------------------------------------------------------------------


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Report:
    """Size and duration of a save, load or move, the same everywhere."""

    location: str
    """Location of the checkpoint."""
    num_bytes: int
    """Bytes of tensors and objects, of all ranks together."""
    seconds: float
    """Seconds from the call to the return, on the slowest rank."""
    phases: Mapping[str, float]
    """Seconds by phase, each on its slowest rank."""
    slowest_rank: int
    """The rank that spent most time moving bytes."""
    num_ranks: int
    """Number of ranks."""
    _verb: ClassVar[str]

    @property
    def gigabytes_per_second(self) -> float:
        """The rate in GB per second, of all ranks together."""
        return self.num_bytes / self.seconds / 1e9 if self.seconds else 0.0

    def __str__(self) -> str:
        """Return one line for a log."""
        phases = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.phases.items())
        slowest = f", slowest rank {self.slowest_rank}" if self.num_ranks > 1 else ""
        return (
            f"{self._verb} {self.location}: {self.num_bytes / 1e9:.3f} GB in {self.seconds:.2f} s "
            f"({self.gigabytes_per_second:.2f} GB/s; {phases}{slowest})"
        )


@dataclass(frozen=True)
class SaveReport(_Report):
    """The size and duration of a save.

    Phases: "describe" (flattening the state dict, comparing common state), "plan" (dividing the
    writing among ranks), "stage" (copying tensors, in a background save), "write" (shard files and
    manifest) and "commit".
    """

    plan_reused: bool = False
    """Whether the plan of an earlier save was used."""
    _verb = "saved"


@dataclass(frozen=True)
class LoadReport(_Report):
    """The size and duration of a load.

    Phases: "plan" (finding the checkpoint, comparing the requests) and "read" (manifest, tensors
    and objects). `num_bytes` counts the requests of all ranks.
    """

    missing: frozenset[str] = frozenset()
    """Keys of the checkpoint whose values were left out.

    Where `strict` compares keys, these are the keys that no rank requested, else the keys that
    modules and optimizers have no place for. Also tensors that are tied to other tensors now and
    were not when they were saved.
    """
    unexpected: frozenset[str] = frozenset()
    """Keys that some rank requested and the checkpoint does not have; they were left out."""
    sent_bytes: int = 0
    """Bytes that ranks sent to each other, see `LoadOptions.share_reads`."""
    read_rate: float = 0.0
    """Bytes per second that the slowest rank read from storage.

    Measured with a sample where `share_reads="auto"` compares it with `send_rate`, else 0.
    """
    send_rate: float = 0.0
    """Bytes per second that the slowest rank sent to another machine."""
    _verb = "loaded"

    def __str__(self) -> str:
        """Return one line for a log."""
        text = super().__str__()
        if self.sent_bytes:
            text += f"; ranks sent {self.sent_bytes / 1e9:.3f} GB to each other"
        if self.read_rate:
            text += (
                f"; sample of a rank: {self.read_rate / 1e9:.2f} GB/s from storage, "
                f"{self.send_rate / 1e9:.2f} GB/s to other ranks"
            )
        return text


@dataclass(frozen=True)
class MoveReport(_Report):
    """The size and duration of a move of tensors between ranks.

    Phases: "plan" (describing both sides, planning unless the plan is known) and "move".
    `num_bytes` counts the values that all ranks got, in their original dtypes.
    """

    sent_bytes: int = 0
    """Bytes that went from one machine to another."""
    version: int | None = None
    """The version that a `Route` moved."""
    _verb = "moved"


def publish(
    report: SaveReport | LoadReport | MoveReport,
    on_report: Callable[[Any], object] | None,
    is_coordinator: bool,
) -> None:
    """Log a report, and pass it to the caller's function.

    The coordinator logs it. Exceptions of the function are logged and go no further: the save or
    load has succeeded on all ranks.
    """
    if is_coordinator:
        logger.info("%s", report)
    if on_report is None:
        return
    try:
        on_report(report)
    except Exception:
        logger.exception("%s, and on_report failed", report)


# --- Lines with a checksum ------------------------------------------------------------------------

_CHECKSUM = "checksum"


def sealed(fields: Mapping[str, Any]) -> str:
    """Encode fields as a line of JSON that ends with their checksum."""
    return json.dumps({**fields, _CHECKSUM: _digest(fields)})


def unsealed(line: str | bytes, form: Mapping[str, type]) -> dict[str, Any]:
    """Decode a line that `sealed` made.

    Args:
        line: may be written with other spaces.
        form: names and types of fields that it must have.

    Raises:
        ValueError: it is something else, was damaged or edited.
    """
    try:
        fields = json.loads(line)
        if not isinstance(fields, dict):
            raise ValueError("it is no JSON object")
        digest = fields.pop(_CHECKSUM, None)
        if digest != _digest(fields):
            raise ValueError("the content does not match the checksum in it")
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    wrong = [name for name, kind in form.items() if not isinstance(fields.get(name), kind)]
    if wrong:
        raise ValueError(f"the field {wrong[0]!r} is missing, or of another type")
    return fields


def _digest(fields: Mapping[str, Any]) -> str:
    # Of the values, not of the text: other programs write the same values with other spaces.
    return hashlib.blake2b(json.dumps(fields).encode(), digest_size=8).hexdigest()
