"""Likely mistakes of users: the message names what is there, and the next step."""

from __future__ import annotations

import json
import os
import re

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint

import distckpt
from distckpt import (
    CheckpointManager,
    CheckpointNotFoundError,
    LoadMismatchError,
    ShardedObject,
    ShardedTensor,
)
from tests.support.cli_command import call, call_error, call_json
from tests.support.disk import flip


def shards(*keys, value=0.0):
    return {key: ShardedTensor.from_rank_offsets(key, torch.full((4,), value)) for key in keys}


MODEL = [
    f"{part}.{name}" for part in ("embed", "layers.0", "layers.1") for name in ("weight", "bias")
]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("mistakes")
    with CheckpointManager(root / "run", async_save=False) as manager:
        for step in (100, 200):
            manager.save(step, {**shards(*(f"model.{key}" for key in MODEL)), "step": step})
    distckpt.save(shards(*MODEL), root / "bare")
    (root / "hf").mkdir()
    safetensors.torch.save_file(
        {"model.embed_tokens.weight": torch.ones(4)}, root / "hf/model.safetensors"
    )
    (root / "pickles").mkdir()
    torch.save(torch.ones(4), root / "pickles/pytorch_model.bin")
    torch.save(torch.ones(4), root / "fabric")
    (root / "note").write_text("no checkpoint")
    os.mkfifo(root / "pipe")
    (root / "unfinished/tensors").mkdir(parents=True)
    for name in ("torch/__0_0.distcp", "deepspeed/global_step3/mp_rank_00_model_states.pt"):
        (root / name).parent.mkdir(parents=True)
        (root / name).touch()
    (root / "gguf").mkdir()
    (root / "gguf/model-Q4_K_M.gguf").write_bytes(b"GGUF")
    (root / "gguf/config.json").write_text("{}")
    (root / "tensorizer").mkdir()
    (root / "tensorizer/model-rank-000.tensors").touch()
    (root / "model.bin").write_bytes(b"|TZR|" + bytes(11))
    (root / "fsdp/checkpoint-500/pytorch_model_fsdp_0").mkdir(parents=True)
    (root / "fsdp/checkpoint-500/pytorch_model_fsdp_0/.metadata").touch()
    # The items of a step of Orbax's CheckpointManager are folders.
    for name in ("orbax/_CHECKPOINT_METADATA", "orbax/default/manifest.ocdbt"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).touch()
    (root / "pipeline/unet").mkdir(parents=True)
    (root / "pipeline/model_index.json").write_text("{}")
    (root / "empty").mkdir()
    (root / "tokenizer").mkdir()
    (root / "tokenizer/tokenizer_config.json").write_text("{}")
    for name in ("models--org--name/snapshots/0123abc", "trainer/checkpoint-500", "st/0_Transform"):
        (root / name).mkdir(parents=True)
        (root / name / "config.json").write_text("{}")
        (root / name / "model.safetensors").symlink_to(root / "hf/model.safetensors")
    return root


LOCATIONS = {
    "pipeline": r"pipeline' is a pipeline of diffusers .*: give the folder of a component",
    "run": r"run' is a directory of checkpoints \('step_00000100', 'step_00000200'\): "
    r"give one of them",
    "run/step_0000100": r"does not exist \(did you mean 'step_00000100'",
    "run/final": r"final does not exist\. Beside it: 'step_00000100', 'step_00000200'\.",
    "nowhere/step_1": r"does not exist, and neither does '.*/nowhere'",
    "bare/metadata.json": r"is a file of a checkpoint: give the directory, '.*/bare'",
    "bare/manifest.safetensors": r"is a file of a checkpoint: give the directory, '.*/bare'",
    "pickles": r"holds 'pytorch_model\.bin', a file of torch\.save, "
    r".*torch\.load\(path, weights_only=True\)",
    "pickles/pytorch_model.bin": r"is a file of torch\.save, "
    r".*torch\.load\(path, weights_only=True\)",
    "fabric": r"is a file of torch\.save, .*torch\.load\(path, weights_only=True\)",
    "note": r"is a file: a checkpoint is a directory, or a \.safetensors file",
    "pipe": r"is a file: a checkpoint is a directory",
    "gguf": r"holds 'model-Q4_K_M\.gguf', a file of llama\.cpp \(GGUF\), .*gguf_file=",
    "gguf/model-Q4_K_M.gguf": r"is a file of llama\.cpp \(GGUF\), .*gguf_file=",
    "tensorizer": r"holds 'model-rank-000\.tensors', a file of tensorizer",
    "tensorizer/model-rank-000.tensors": r"is a file of tensorizer, .*TensorDeserializer",
    "model.bin": r"is a file of tensorizer, .*TensorDeserializer",
    "fsdp": r"is a directory of checkpoints \('checkpoint-500'\): give one of them",
    "orbax": r"is of Orbax, but no item with arrays",
    "orbax/default": r"is of Orbax, but no item with arrays",
    "unfinished": r"has no metadata\.json, so a save did not finish here",
    "torch": r"has no \.metadata, so a save did not finish here",
    "deepspeed": r"has no metadata\.json, nor files of another format at its top level",
    "st/0_Transform/config.json": r"is a file of a checkpoint: give the directory, '.*/0_Tr",
    "tokenizer": r"holds files of a model, and no \.safetensors files .* not downloaded",
    "models--org--name": r"give one of the directories in it, 'snapshots/0123abc'\.",
    "models--org--name/snapshots": r"give one of the directories in it, '0123abc'\.",
    "trainer": r"give one of the directories in it, 'checkpoint-500'\.",
    "st": r"give one of the directories in it, '0_Transform'\.",
    "empty": r"has no metadata\.json, so nothing was saved here",
}


@pytest.mark.parametrize(("place", "message"), LOCATIONS.items(), ids=list(LOCATIONS))
def test_another_place_than_that_of_a_checkpoint(root, capsys, place, message):
    with pytest.raises(CheckpointNotFoundError, match=message):
        distckpt.load(shards("w"), root / place)
    assert re.search(message, call_error(capsys, "inspect", root / place))


@pytest.mark.parametrize("site", ["", "huggingface.co/", "file://huggingface.co/"])
def test_the_name_of_a_model_on_the_hub(tmp_path, monkeypatch, capsys, site):
    monkeypatch.chdir(tmp_path)
    message = r"give the directory to which huggingface_hub\.snapshot_download\('org/model-1\.5'\)"
    with pytest.raises(CheckpointNotFoundError, match=message):
        distckpt.load(shards("w"), f"{site}org/model-1.5")
    assert re.search(message, call_error(capsys, "inspect", f"{site}org/model-1.5"))


def test_a_single_safetensors_file_is_opened(tmp_path, capsys):
    values = {"a.weight": torch.arange(6.0).view(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}
    safetensors.torch.save_file(values, tmp_path / "x.safetensors")
    loaded = distckpt.open(tmp_path / "x.safetensors").read_tensors()
    assert all(torch.equal(loaded[key], value) for key, value in values.items())
    assert call_json(capsys, "inspect", tmp_path / "x.safetensors")["num_elements"] == 8
    assert call_json(capsys, "cat", tmp_path / "x.safetensors", "a.weight[1]")["values"] == [
        3,
        4,
        5,
    ]
    assert distckpt.verify(tmp_path / "x.safetensors").is_whole
    distckpt.consolidate(tmp_path / "x.safetensors", tmp_path / "out")
    assert call(capsys, "diff", tmp_path / "x.safetensors", tmp_path / "out").startswith("SAME")


def test_a_step_that_is_not_there(root):
    manager = CheckpointManager(root / "run")
    with pytest.raises(
        CheckpointNotFoundError, match="Beside it: 'step_00000100', 'step_00000200'"
    ):
        manager.load(shards("w"), step=150)
    with pytest.raises(
        ValueError, match=r"got a dict: it is save\(step, state\) and load\(state, step\)"
    ):
        manager.save(shards("w"), 300)
    with pytest.raises(
        ValueError, match=r"got a dict: it is save\(step, state\) and load\(state, step\)"
    ):
        manager.load(100, shards("w"))
    with pytest.raises(CheckpointNotFoundError, match=r"runs does not exist \(did you mean 'run'"):
        CheckpointManager(root / "runs").load(shards("w"))


@pytest.mark.parametrize("call", [distckpt.save, distckpt.load])
def test_swapped_arguments(root, call):
    with pytest.raises(TypeError, match=r"got a dict\. The state dict comes first"):
        call(str(root / "bare"), shards("w"))


def test_a_state_dict_that_is_none(root, tmp_path):
    for value in (None, [1], "model"):
        with pytest.raises(
            distckpt.CheckpointingException,
            match=r"is a dict, such as \{'model': model, 'step': 100\}",
        ):
            distckpt.save(value, tmp_path / "c")


def test_a_module_in_the_place_of_a_state_dict(tmp_path):
    model = torch.nn.Linear(2, 2)
    distckpt.save({"model": model, "step": 1}, tmp_path / "c")
    with pytest.raises(
        LoadMismatchError,
        match=r"holds more than the Linear: 'step'\. .*load\(\{'model': model\}, ",
    ):
        distckpt.load(model, tmp_path / "c")


def test_places_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        distckpt.CheckpointExistsError, match=r"is a file: .* Choose another path\."
    ):
        distckpt.save(shards("w"), tmp_path / "file")
    with pytest.raises(NotADirectoryError, match=r"directory beside its target: '.*file/c'$"):
        distckpt.save(shards("w"), tmp_path / "file" / "c")


def test_the_key_of_a_sharded_tensor_comes_first():
    with pytest.raises(
        distckpt.InvalidShardingError, match=r"^The key comes first, then the tensor: got a Tensor"
    ):
        ShardedTensor.from_rank_offsets(torch.ones(2), "w")


def test_sizes_and_grids_that_are_none(tmp_path):
    distckpt.save(shards("w"), tmp_path / "c")
    for verb in (distckpt.save, distckpt.load, distckpt.async_save):
        with pytest.raises(TypeError, match="max_inflight_bytes is a number of bytes, got '1GB'"):
            verb(
                shards("w"),
                tmp_path / ("c" if verb is distckpt.load else "new"),
                max_inflight_bytes="1GB",
            )
    for place in (0, (0,), (2, 2), (-1, 2), ("0", 2)):
        with pytest.raises(
            ValueError, match=r"'dp' of a PerRank is \(position, number of positions\), got "
        ):
            distckpt.PerRank(1, {"dp": place})


def test_more_layers_than_were_saved(root):
    request = shards(*MODEL, "layers.2.weight", "layers.2.bias")
    with pytest.raises(
        LoadMismatchError, match=r"'layers\.2\.weight' \(the checkpoint has such keys with other"
    ):
        distckpt.load(request, root / "bare")


PREFIXES = [
    ("run/step_00000100", "", r"\(stored with the prefix 'model\.'\)"),
    ("bare", "module.", r"\(stored without 'module\.'\)"),
    ("run/step_00000100", "net.", r"\(stored with 'model\.' in place of 'net\.'\)"),
]


@pytest.mark.parametrize(
    ("place", "prefix", "message"), PREFIXES, ids=[prefix for _, prefix, _ in PREFIXES]
)
@pytest.mark.parametrize("strict", ["complete", "raise"])
def test_a_prefix_that_is_off(root, place, prefix, message, strict):
    request = shards(*(prefix + key for key in MODEL))
    with pytest.raises(LoadMismatchError, match=message):
        distckpt.load(request, root / place, strict=strict)
    with pytest.raises(LoadMismatchError, match=message):
        distckpt.open(root / place).read_tensors(list(request))


def test_where_a_prefix_comes_from(root):
    with pytest.raises(
        LoadMismatchError,
        match=r"without 'net\.'\)\. Correct the prefix: a module at 'model' of the",
    ):
        distckpt.load(shards(*(f"net.{key}" for key in MODEL)), root / "bare")


@pytest.mark.filterwarnings("ignore")
def test_a_module_is_filled_from_what_dcp_has_saved(tmp_path):
    model = torch.nn.Linear(2, 2)
    expected = model.weight.detach().clone()
    torch.distributed.checkpoint.save(
        {"model": model.state_dict()}, checkpoint_id=str(tmp_path / "old")
    )
    with torch.no_grad():
        model.weight.zero_()
    distckpt.load({"model": model}, tmp_path / "old")
    assert torch.equal(model.weight, expected)
    with pytest.raises(LoadMismatchError, match="weight"):
        distckpt.load({"model": torch.nn.Linear(3, 2)}, tmp_path / "old")


def test_a_prefix_is_named_when_most_keys_have_it_only(root):
    with pytest.raises(LoadMismatchError, match=r"\(6 of them stored without 'm\.'\)"):
        distckpt.load(shards(*(f"m.{key}" for key in MODEL), "m.head"), root / "bare")
    with pytest.raises(LoadMismatchError, match=r"'other\.b'\. Correct .*strict='report'"):
        distckpt.load(shards("other.a", "other.b"), root / "bare")


def test_the_way_out_that_strict_is(root):
    with pytest.raises(LoadMismatchError, match="pass strict='report' to load what both have"):
        distckpt.load(shards(MODEL[0]), root / "bare", strict="raise")
    with pytest.raises(ValueError, match=r"True \(torch's True is 'raise' here\)"):
        distckpt.load(shards(MODEL[0]), root / "bare", strict=True)
    with pytest.raises(ValueError, match=r"did you mean 'raise'"):
        distckpt.load(shards(MODEL[0]), root / "bare", strict="raise_al")
    with pytest.raises(ValueError, match=r"True \(torch's True is 'raise_all' here\)"):
        distckpt.megatron.load(shards(MODEL[0]), root / "bare", strict=True)
    with pytest.raises(ValueError, match=r"did you mean 'raise_all'"):
        distckpt.megatron.load(shards(MODEL[0]), root / "bare", strict="raise_al")


def test_a_load_with_rules_is_not_told_of_a_strict_that_it_refuses(root):
    with pytest.raises(LoadMismatchError, match="the keys or the rules") as caught:
        distckpt.load(
            shards("other.a"), root / "bare", rules=[distckpt.rules.Rename("other", "absent")]
        )
    assert "strict" not in str(caught.value)


def test_a_hugging_face_directory_under_the_names_of_another_program(root):
    with pytest.raises(LoadMismatchError, match="need rules=, or family='auto'"):
        distckpt.load(shards("embedding.word_embeddings.weight"), root / "hf")


def test_no_main_replica_may_be_about_pipelines(tmp_path):
    copy = ShardedTensor.from_rank_offsets("w", torch.ones(4), replica_id=1)
    with pytest.raises(
        distckpt.InvalidShardingError,
        match="replica_id 0, also of one that several pipeline stages",
    ):
        distckpt.save({"w": copy}, tmp_path / "c")


def test_internal_names_are_not_shown(root, tmp_path, capsys):
    class Args:
        pass

    with pytest.raises(
        distckpt.UnsupportedObjectError, match=r"^Common state cannot be saved: .*\['args'\]"
    ):
        distckpt.save({"args": Args()}, tmp_path / "c")
    with pytest.raises(
        distckpt.UnsupportedObjectError, match=r"^The object 'args' cannot be saved"
    ):
        distckpt.save({"args": ShardedObject("args", Args(), (1,), (0,))}, tmp_path / "c")
    assert "common state: step: 100 -> 200\n" in call(
        capsys, "diff", root / "run/step_00000100", root / "run/step_00000200", code=1
    )
    assert "there are 'embed.bias'" in call_error(
        capsys, "export", root / "bare", tmp_path / "out", "--keys", "modle."
    )
    distckpt.save({"step": 1}, tmp_path / "c")
    (file,) = (tmp_path / "c/objects").iterdir()
    flip(file, -20)
    with pytest.raises(distckpt.CorruptCheckpointError, match="of common state was damaged"):
        distckpt.load({}, tmp_path / "c")
    assert "; common state\n" in call(capsys, "verify", tmp_path / "c", code=1)
    assert json.loads(call(capsys, "verify", tmp_path / "c", "--json", code=1))["problems"][0][
        "key"
    ]


PATTERNS = {"a number": 3, "a list of numbers": [3], "bytes": b"model."}


@pytest.mark.parametrize("keys", PATTERNS.values(), ids=PATTERNS)
def test_keys_that_are_no_patterns(root, tmp_path, keys):
    source, out = root / "bare", tmp_path / "out"
    for verb in (distckpt.consolidate, distckpt.reshard, distckpt.diff):
        with pytest.raises(TypeError, match=r"keys is a pattern of keys, or a list of them, got "):
            verb(source, source if verb is distckpt.diff else out, keys=keys)
    with pytest.raises(TypeError, match=r"keys is a list of whole keys, not of patterns, got "):
        distckpt.open(source).read_tensors(keys)
    with pytest.raises(TypeError, match=r"whole keys, not of patterns, got 'model\.\*'"):
        distckpt.open(source).read_tensors("model.*")
    assert not out.exists()


@pytest.mark.parametrize("verb", [distckpt.consolidate, distckpt.reshard])
def test_names_that_are_none(root, tmp_path, verb):
    source, out = root / "bare", tmp_path / "out"
    key = sorted(distckpt.open(source).tensors)[0]
    with pytest.raises(
        distckpt.CheckpointingException, match=rf"new name of '{re.escape(key)}' would be empty"
    ):
        verb(source, out, rename={key: ""})
    for rename in ({key: 3}, [key]):
        with pytest.raises(
            TypeError, match="rename is a dict of old beginnings of names -> new ones, got "
        ):
            verb(source, out, rename=rename)
    assert not out.exists()
