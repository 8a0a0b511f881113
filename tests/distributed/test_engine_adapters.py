"""Versions of a trainer in the models of inference engines, by the calls of these engines."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import distckpt
from distckpt import CheckpointingException, InvalidShardingError, LoadMismatchError
from distckpt.engines import RouteInfo, register_vllm, sglang_loader, sglang_message
from tests.support import vllm_stand_in
from tests.support.addresses import reserved_address
from tests.support.engine_loaders import Llama, stored_values
from tests.support.harness import error_of, kept_ranks
from tests.support.reference import has_routes

pytestmark = has_routes

VERSIONS = (3, 4)


@pytest.fixture(scope="module")
def run():
    with kept_ranks() as run_ranks:
        yield lambda *args: run_ranks(*args, backend=None)


@pytest.fixture
def info(tmp_path):
    """Hand out what engines have to know, who have loaded the directory that it names."""
    save_file(stored_values(Llama().specs), tmp_path / "model.safetensors")
    with reserved_address() as address:
        yield RouteInfo(address, str(tmp_path), allow_dtype_cast=True, timeout=30.0)


def engine_of(rank: int, size: int, version: int = 0) -> Llama:
    model = Llama(rank, size)
    model.load_weights(stored_values(model.specs, seed=version).items())
    return model


def are_equal(model: Llama, expected: Llama) -> bool:
    theirs = expected.state_dict()
    return all(torch.equal(value, theirs[name]) for name, value in model.state_dict().items())


def train(info: RouteInfo) -> None:
    """Give the versions to two targets."""
    weights = stored_values(Llama().specs)
    options: dict[str, Any] = {"allow_dtype_cast": True, "timeout": info.timeout}
    with distckpt.Route(info.address, source=weights, num_targets=2, **options) as route:
        for version in VERSIONS:
            for name, value in stored_values(Llama().specs, seed=version).items():
                weights[name].copy_(value)
            assert route.run(version=version, verify=info.verify).version == version


def vllm_engine(model: Llama, **config: Any) -> Any:
    vllm_stand_in.install()
    register_vllm()
    register_vllm()
    return vllm_stand_in.WeightTransferEngineFactory.create_engine("distckpt", model, **config)


def _in_vllm(rank: int, info: RouteInfo) -> None:
    if rank == 0:
        train(info)
        return
    model = engine_of(rank - 1, 2)
    engine = vllm_engine(model)
    engine.init_transfer_engine(engine.parse_init_info(asdict(info)))
    for version in VERSIONS:
        engine.start_weight_update()
        engine.update_weights({"version": version})
        engine.finish_weight_update()
        assert are_equal(model, engine_of(rank - 1, 2, version))
    engine.shutdown()
    assert isinstance(error_of(engine.update_weights, {}), CheckpointingException)


def test_vllm_takes_versions(run, info):
    run(_in_vllm, 3, info)


def test_a_vllm_without_the_interface_is_refused():
    vllm_stand_in.install(vllm_stand_in.OldWeightTransferEngine)
    with pytest.raises(ImportError, match="no start_weight_update"):
        register_vllm("old")


def _in_sglang(rank: int, info: RouteInfo) -> None:
    if rank == 0:
        train(info)
        return
    model = engine_of(rank - 1, 2)
    for version in VERSIONS:
        sglang_loader(model, sglang_message(info, version))
        assert are_equal(model, engine_of(rank - 1, 2, version))
    model.register_parameter("norm|weight", torch.nn.Parameter(torch.zeros(16)))
    error = error_of(sglang_loader, model, sglang_message(info, 5))
    assert isinstance(error, InvalidShardingError)
    assert "norm|weight" in str(error)


def test_sglang_takes_versions(run, info):
    run(_in_sglang, 3, replace(info, verify=True))


def test_names_and_shapes_can_be_given_in_the_place_of_a_directory(run, info):
    tensors = {
        name: [{torch.bfloat16: "BF16", torch.float32: "F32"}[dtype], list(shape)]
        for name, (shape, dtype) in Llama().specs.items()
    }
    run(_in_vllm, 3, RouteInfo(**{**asdict(info), "tensors": tensors}))


def test_an_engine_that_has_changed_its_weights_after_loading_is_refused(info):
    model = engine_of(0, 2)
    inner = model.state_dict()["mlp|gate_up_proj|weight"]
    inner.copy_(inner.flip(0))  # as kernels want gate and up in another order
    with pytest.raises(LoadMismatchError, match=r"mlp.gate_proj.weight.*check=False"):
        sglang_loader(model, sglang_message(info, 1))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_config": "fp8"}, "quantizes"),
        ({"model_config": type("Config", (), {"use_mla": True})}, "latent attention"),
    ],
)
def test_vllm_models_with_derived_weights_are_refused(config, named, info):
    engine = vllm_engine(engine_of(0, 1), **config)
    with pytest.raises(InvalidShardingError, match=named):
        engine.init_transfer_engine(info)


@pytest.mark.parametrize("name", ["quant_config", "post_load_weights"])
def test_sglang_models_with_derived_weights_are_refused(name, info):
    model = engine_of(0, 1)
    setattr(model, name, object())
    with pytest.raises(InvalidShardingError, match=r"Llama .*pack_buckets"):
        sglang_loader(model, sglang_message(info, 1))


def test_other_tensors_are_refused():
    with pytest.raises(CheckpointingException, match="got 1 other tensors"):
        sglang_loader(Llama(), [("norm.weight", torch.zeros(16))])


def test_an_unknown_dtype_is_refused(info):
    with pytest.raises(ValueError, match="'bfloat16'"):
        sglang_loader(
            Llama(), sglang_message(RouteInfo(info.address, {"norm.weight": ["bfloat16", [16]]}), 1)
        )
