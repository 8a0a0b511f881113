"""Receiving weights in inference engines, whose models are targets of routes.

It is recorded once, then filled. SGLang calls a custom weight loader, vLLM a backend of its weight
transfer, and is imported when that is registered. Nothing of SGLang is imported.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

import torch

from distckpt._base.dtypes import FROM_NAME, flat_bytes
from distckpt._base.errors import CheckpointingException, InvalidShardingError, LoadMismatchError
from distckpt._base.messages import summarize_keys
from distckpt._base.options import MoveReport
from distckpt._geometry.region import Region
from distckpt._move.record_loader import LoaderTarget, record_loader
from distckpt._move.route import Route
from distckpt._operations.checkpoint import Checkpoint
from distckpt._operations.checkpoint import open as open_checkpoint


@dataclass(frozen=True)
class RouteInfo:
    """The facts an engine needs to take versions from a trainer.

    All of it can be sent as JSON.

        info = distckpt.engines.RouteInfo("trainer-0:29700", "models/qwen3")

    Attributes:
        address: of the trainer, see `distckpt.Route`.
        tensors: the tensors that the trainer sends: the path of a directory or checkpoint that has
            tensors of these names, shapes and dtypes, or `{name: [dtype, shape]}` with safetensors
            names of dtypes, such as `{"norm.weight": ["BF16", [64]]}`.
        check: with a path, compare the weights of the engine with the values stored there, and
            refuse an engine that has changed them after loading. False for an engine that was
            started with other weights.
        atomic: change weights only when all of a version has arrived. The same as on the trainer.
        allow_dtype_cast: see `MoveOptions`. The same as on the trainer.
        verify: compare the values that arrive with the values sent, see `Route.run`. The same as on
            the trainer.
        timeout: seconds to wait for the trainer.
    """

    address: str
    tensors: str | dict[str, list[Any]]
    check: bool = True
    atomic: bool = False
    allow_dtype_cast: bool = False
    verify: bool = False
    timeout: float = 600.0


class Receiver:
    """The parameters of a model as the target of a route.

    Args:
        model: has `load_weights` and parameters with memory.
        info: of the trainer.

    Raises:
        InvalidShardingError: the loader computes, or the model does not keep weights as its loader
            puts them.
        LoadMismatchError: its weights differ from the checkpoint.
    """

    def __init__(self, model: torch.nn.Module, info: RouteInfo) -> None:
        stored = None
        specs: Any
        if isinstance(info.tensors, dict):
            specs = _specs_of(info.tensors)
        else:
            specs = stored = open_checkpoint(info.tensors, as_stored=True)
        load_weights: Any = model.load_weights
        self.info = info
        self._target = record_loader(load_weights, specs, module=model)
        if stored is not None and info.check:
            _check_equal(self._target, stored)
        self._route = Route(
            info.address,
            target=self._target,
            timeout=info.timeout,
            atomic=info.atomic,
            allow_dtype_cast=info.allow_dtype_cast,
        )

    def run(self, version: int | None) -> MoveReport:
        """Take a version, None for the next one.

        Raises:
            InvalidShardingError: the engine has moved its parameters. Nothing is changed.
        """
        self._target.check_memory()
        return self._route.run(version, verify=self.info.verify)

    def close(self) -> None:
        """Leave the route."""
        self._route.close()


def _specs_of(tensors: dict[str, list[Any]]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    unknown = {str(dtype) for dtype, _ in tensors.values()} - FROM_NAME.keys()
    if unknown:
        raise ValueError(f"unknown dtypes {sorted(unknown)}: use {sorted(FROM_NAME)}")
    return {name: (tuple(shape), FROM_NAME[dtype]) for name, (dtype, shape) in tensors.items()}


def _check_equal(target: LoaderTarget, stored: Checkpoint) -> None:
    """Refuse a model whose memory differs from its loader's result."""
    different = set()
    for name in target.places():
        shard = target[name]
        data = shard.data
        assert data is not None
        region = Region(shard.global_offset, shard.local_shape)
        values = stored.read(shard.key, region.slices()).to(data.dtype).view(data.shape)
        # As bytes, since NaN does not equal itself.
        if not torch.equal(flat_bytes(data.cpu()), flat_bytes(values)):
            different.add(shard.key)
    if different:
        raise LoadMismatchError(
            f"The engine does not hold {summarize_keys(sorted(different))} as its loader has put "
            f"what {stored.location} has: it changes the layout of weights after loading, and has "
            "to load updates itself; or it was started with other weights, then set check=False.",
            unexpected=different,
        )


# ---- SGLang


_MESSAGE_NAME = "distckpt.route"
_RECEIVER_ATTRIBUTE = "_distckpt_receiver"
"""Name of the attribute of a model that holds its receiver."""


def sglang_message(info: RouteInfo, version: int) -> list[tuple[str, torch.Tensor]]:
    """Return the message that makes SGLang take a version. SGLang gets it instead of named tensors.

        message = distckpt.engines.sglang_message(info, step)
        engine.update_weights_from_tensor(message, load_format="distckpt.engines.sglang_loader")

    Args:
        info: of the trainer. When another one is sent, the engine joins that route.
        version: the number that the trainer gives to `route.run` at the same time.

    Returns:
        One tensor of bytes, JSON.
    """
    text = json.dumps({"info": asdict(info), "version": version})
    return [(_MESSAGE_NAME, torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8))]


def sglang_loader(model: Any, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Fill the model of an SGLang engine in each of its processes.

        python -m sglang.launch_server ... --custom-weight-loader distckpt.engines.sglang_loader

    SGLang calls it with the tensors of `sglang_message`. The first call records the loader of the
    model.

    Args:
        model: of the engine.
        named_tensors: the result of `sglang_message`.

    Raises:
        CheckpointingException: these are other tensors.
        InvalidShardingError: the model quantizes weights after loading, or derives tensors from
            them.
    """
    received = list(named_tensors)
    if [name for name, _ in received] != [_MESSAGE_NAME]:
        raise CheckpointingException(
            "distckpt.engines.sglang_loader takes what distckpt.engines.sglang_message returns, "
            f"got {len(received)} other tensors."
        )
    message = json.loads(bytes(received[0][1].cpu().tolist()))
    _receiver_of(model, RouteInfo(**message["info"])).run(message["version"])


def _receiver_of(model: Any, info: RouteInfo) -> Receiver:
    receiver: Receiver | None = getattr(model, _RECEIVER_ATTRIBUTE, None)
    if receiver is not None and receiver.info == info:
        return receiver
    if getattr(model, "quant_config", None) is not None or hasattr(model, "post_load_weights"):
        raise InvalidShardingError(
            f"{type(model).__name__} quantizes weights or computes others from them after loading, "
            "so its parameters cannot be filled in place: send it tensors with "
            "distckpt.engines.pack_buckets."
        )
    if receiver is not None:
        receiver.close()
    receiver = Receiver(model, info)
    setattr(model, _RECEIVER_ATTRIBUTE, receiver)
    return receiver


# ---- vLLM


_VLLM_PACKAGE = "vllm.distributed.weight_transfer"


@dataclass(frozen=True)
class UpdateInfo:
    """The version to take; None for the next one."""

    version: int | None = None


class RouteEngine:
    """The backend that vLLM calls in each worker.

    It is a `Route` in the methods of vLLM's `WeightTransferEngine`.
    """

    init_info_cls = RouteInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    model: Any
    vllm_config: Any
    _receiver: Receiver | None = None

    def init_transfer_engine(self, init_info: RouteInfo) -> None:
        """Record the loader of the model, and join the route."""
        config = getattr(self.vllm_config, "model_config", None)
        if getattr(self.vllm_config, "quant_config", None) is not None:
            _refuse("quantizes weights after loading")
        if getattr(config, "use_mla", False):
            _refuse("computes the matrices of latent attention from its weights after loading")
        self.shutdown()
        self._receiver = Receiver(self.model, init_info)

    def start_weight_update(self) -> None:
        """Do nothing: parameters are filled in place."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Take a version, while all ranks of the trainer call `route.run`."""
        if self._receiver is None:
            raise CheckpointingException("Call init_weight_transfer_engine before update_weights.")
        self._receiver.run(update_info.version)

    def finish_weight_update(self, *_: Any, **__: Any) -> None:
        """Do nothing: a version has arrived when `receive_weights` returns."""

    @staticmethod
    def trainer_send_weights(*_: Any, **__: Any) -> NoReturn:
        """Refuse to send, which some releases of vLLM ask for: trainers have a `Route`."""
        raise CheckpointingException(
            "The trainer gives weights by distckpt.Route(...).run(version)."
        )

    def shutdown(self) -> None:
        """Leave the route."""
        if self._receiver is not None:
            self._receiver.close()
        self._receiver = None


def _refuse(problem: str) -> None:
    raise InvalidShardingError(
        f"This vLLM {problem}, so its parameters cannot be filled in place: give the tensors to a "
        "backend of vLLM that calls load_weights."
    )


def register_vllm(name: str = "distckpt") -> None:
    """Add a weight transfer backend to vLLM, in this process.

        distckpt.engines.register_vllm()
        engine = LLM(model, weight_transfer_config=WeightTransferConfig(backend="distckpt"))

    vLLM starts processes of its own, each of which has to call it: name this function as an entry
    point of the group `vllm.general_plugins`.

    Initialize the backend with the fields of `RouteInfo`, and update with `{"version": step}`,
    while the ranks of the trainer call `route.run(version=step)`. A name that is registered already
    is left as it is.

    Args:
        name: of the backend.

    Raises:
        ImportError: vLLM is not installed, or has no weight transfer with `start_weight_update`.
    """
    factory = importlib.import_module(f"{_VLLM_PACKAGE}.factory").WeightTransferEngineFactory
    base = importlib.import_module(f"{_VLLM_PACKAGE}.base").WeightTransferEngine
    if not hasattr(base, "start_weight_update"):
        raise ImportError(
            "The weight transfer of this vLLM has no start_weight_update: install a newer release, "
            "or give its backends tensors."
        )
    if name not in getattr(factory, "_registry", ()):
        factory.register_engine(name, type("DistckptEngine", (RouteEngine, base), {}))
