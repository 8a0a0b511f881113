"""Receiving weights in SGLang, as a custom weight loader. Nothing of SGLang is imported."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import torch

from distckpt._base.errors import CheckpointingException, InvalidShardingError
from distckpt._engines.receiver import Receiver, RouteInfo

_NAME = "distckpt.route"
_ATTRIBUTE = "_distckpt_receiver"
"""Of a model: its receiver, which lives as long as the model."""


def sglang_message(info: RouteInfo, version: int) -> list[tuple[str, torch.Tensor]]:
    """Return what tells SGLang to take a version, in the place of its named tensors.

        message = distckpt.engines.sglang_message(info, step)
        engine.update_weights_from_tensor(message, load_format="distckpt.engines.sglang_loader")

    Args:
        info: of the trainer. When another one is sent, the engine joins that route.
        version: the number that the trainer gives to `route.run` at the same time.

    Returns:
        One tensor of bytes, JSON.
    """
    text = json.dumps({"info": asdict(info), "version": version})
    return [(_NAME, torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8))]


def sglang_loader(model: Any, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Fill the model of an SGLang engine with a version, in each of its processes.

        python -m sglang.launch_server ... --custom-weight-loader distckpt.engines.sglang_loader

    SGLang calls it. It gets what `sglang_message` makes, and records the loader of the model at the
    first call.

    Args:
        model: of the engine.
        named_tensors: what `sglang_message` returned.

    Raises:
        CheckpointingException: these are other tensors.
        InvalidShardingError: the model quantizes weights, or computes others from them, after
            loading.
    """
    received = list(named_tensors)
    if [name for name, _ in received] != [_NAME]:
        raise CheckpointingException(
            "distckpt.engines.sglang_loader takes what distckpt.engines.sglang_message returns, "
            f"got {len(received)} other tensors."
        )
    message = json.loads(bytes(received[0][1].cpu().tolist()))
    _receiver_of(model, RouteInfo(**message["info"])).run(message["version"])


def _receiver_of(model: Any, info: RouteInfo) -> Receiver:
    receiver: Receiver | None = getattr(model, _ATTRIBUTE, None)
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
    setattr(model, _ATTRIBUTE, receiver)
    return receiver
