"""Receiving weights in vLLM, as a backend of its weight transfer.

vLLM is imported when the backend is registered.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, NoReturn

from distckpt._base.errors import CheckpointingException, InvalidShardingError
from distckpt.engines._receiver import Receiver, RouteInfo

_PACKAGE = "vllm.distributed.weight_transfer"


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
    factory = importlib.import_module(f"{_PACKAGE}.factory").WeightTransferEngineFactory
    base = importlib.import_module(f"{_PACKAGE}.base").WeightTransferEngine
    if not hasattr(base, "start_weight_update"):
        raise ImportError(
            "The weight transfer of this vLLM has no start_weight_update: install a newer release, "
            "or give its backends tensors."
        )
    if name not in getattr(factory, "_registry", ()):
        factory.register_engine(name, type("DistckptEngine", (RouteEngine, base), {}))
