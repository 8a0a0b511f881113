"""Receiving weights in SGLang, as a custom weight loader.

Nothing of SGLang is imported.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import torch

from distckpt._base.errors import CheckpointingException, InvalidShardingError
from distckpt.engines._receiver import Receiver, RouteInfo

_NAME = "distckpt.route"
_ATTRIBUTE = "_distckpt_receiver"
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
    return [(_NAME, torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8))]


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
