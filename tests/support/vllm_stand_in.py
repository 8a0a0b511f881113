"""The part of vLLM that its weight transfer backends see, with its names: what is not installed in
tests.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar


class WeightTransferEngine(ABC):
    """The base class of backends."""

    init_info_cls: type
    update_info_cls: type

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        self.config, self.vllm_config = config, vllm_config
        self.device, self.model = device, model

    def parse_init_info(self, init_dict: dict[str, Any]) -> Any:
        return self.init_info_cls(**init_dict)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.update_info_cls(**update_info))

    @abstractmethod
    def init_transfer_engine(self, init_info: Any) -> None: ...

    @abstractmethod
    def start_weight_update(self) -> None: ...

    @abstractmethod
    def receive_weights(self, update_info: Any) -> None: ...

    @abstractmethod
    def finish_weight_update(self) -> None: ...

    @abstractmethod
    def shutdown(self) -> None: ...

    @staticmethod
    @abstractmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None: ...


class OldWeightTransferEngine(ABC):
    """The base class of vLLM until 0.22, whose backends do not know the model."""

    @abstractmethod
    def receive_weights(self, update_info: Any, load_weights: Any) -> None: ...


class WeightTransferEngineFactory:
    """Makes backends by their names."""

    _registry: ClassVar[dict[str, type]] = {}

    @classmethod
    def register_engine(cls, name: str, engine: type) -> None:
        if name in cls._registry:
            raise ValueError(f"{name} is already registered")
        cls._registry[name] = engine

    @classmethod
    def create_engine(cls, name: str, model: Any, **vllm_config: Any) -> Any:
        return cls._registry[name](None, SimpleNamespace(**vllm_config), "cpu", model)


def install(base: type = WeightTransferEngine) -> None:
    """Let programs of this process import it as vllm."""
    for name in ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer"):
        sys.modules[name] = ModuleType(name)
    package = "vllm.distributed.weight_transfer"
    members = (
        {"WeightTransferEngine": base},
        {"WeightTransferEngineFactory": WeightTransferEngineFactory},
    )
    for part, named in zip(("base", "factory"), members, strict=True):
        module = ModuleType(f"{package}.{part}")
        vars(module).update(named)
        sys.modules[module.__name__] = module
