"""Models of transformers beside its own `save_pretrained`: exported by their names in memory, and
loaded again.
"""

from __future__ import annotations

import copy
import json

import pytest
import torch
from safetensors.torch import save_file

import distckpt
from distckpt import (
    CheckpointingException,
    CheckpointNotFoundError,
    LoadMismatchError,
    ShardedTensor,
)
from distckpt.cli import main
from distckpt.rules import Rename
from tests.support.hf_folders import read_export, same_bytes
from tests.support.tiny_models import COMPOSED, OVERRIDES, make_config, make_model, transformers

TOKENS = torch.tensor([[3, 1, 39, 7, 20, 11, 0, 5]])


def logits_of(model) -> torch.Tensor:
    # The whole of Llama 4 takes no text without pictures in transformers 5.24.
    language_model = model.language_model if model.config.model_type == "llama4" else model
    return language_model(TOKENS).logits


@pytest.mark.parametrize("family", sorted([*OVERRIDES, *COMPOSED]))
def test_an_export_is_what_transformers_saves_and_fills_the_model_again(family, tmp_path):
    model, empty = make_model(make_config(family)), make_model(make_config(family), seed=1)
    saved, checkpoint, exported = (tmp_path / name for name in ("saved", "checkpoint", "exported"))
    model.save_pretrained(saved)
    distckpt.save({"model": model}, checkpoint)
    distckpt.consolidate(checkpoint, exported, family="auto", like=saved)
    assert same_bytes(read_export(exported), read_export(saved))

    distckpt.load({"model": empty}, exported, family=saved)
    assert same_bytes(empty.state_dict(), model.state_dict())
    opened = type(model).from_pretrained(exported, attn_implementation="eager")
    with torch.no_grad():
        logits = logits_of(model)
        assert torch.equal(logits_of(empty), logits)
        assert torch.equal(logits_of(opened), logits)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_head_for_no_labels_is_exported(tmp_path):
    config = transformers.BertConfig(
        vocab_size=40,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=8,
        num_labels=0,
    )
    model = transformers.BertForSequenceClassification(config)
    saved, checkpoint, exported = (tmp_path / name for name in ("saved", "checkpoint", "exported"))
    model.save_pretrained(saved)
    distckpt.save({"model": model}, checkpoint)
    distckpt.consolidate(checkpoint, exported, family="auto", like=saved)
    assert read_export(saved)["classifier.weight"].shape == (0, 8)
    assert same_bytes(read_export(exported), read_export(saved))


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    """A model with fused experts in memory, and its directory, in which each expert is apart."""
    model, saved = make_model(make_config("mixtral")), tmp_path_factory.mktemp("mixtral") / "saved"
    model.save_pretrained(saved)
    return model, saved


def test_transformers_opens_an_export_whose_config_follows_the_dtype(mixtral, tmp_path):
    model, saved = mixtral
    (saved / "tokenizer.json").write_text("{}")
    distckpt.save({"model": model}, tmp_path / "checkpoint")
    for dtype in (torch.float32, torch.bfloat16):
        exported = tmp_path / str(dtype)
        distckpt.consolidate(
            tmp_path / "checkpoint", exported, family="auto", like=saved, dtype=dtype
        )
        assert {path.name for path in exported.iterdir()} == {path.name for path in saved.iterdir()}
        opened = type(model).from_pretrained(exported, dtype="auto")
        assert opened.dtype == dtype
        expected = {key: tensor.to(dtype) for key, tensor in model.state_dict().items()}
        assert same_bytes(opened.state_dict(), expected)


def test_a_file_has_the_configuration_beside_it(mixtral, tmp_path):
    model, saved = mixtral
    (tmp_path / "config.json").write_bytes((saved / "config.json").read_bytes())
    (file,) = saved.glob("*.safetensors")
    (tmp_path / "model.fp16.safetensors").write_bytes(file.read_bytes())
    empty = make_model(make_config("mixtral"), seed=1)
    distckpt.load({"model": empty}, tmp_path / "model.fp16.safetensors", family="auto")
    assert same_bytes(empty.state_dict(), model.state_dict())


def test_a_rank_loads_its_slices(mixtral):
    model, saved = mixtral
    key, tensor = (
        "model.layers.1.mlp.experts.gate_up_proj",
        model.model.layers[1].mlp.experts.gate_up_proj.detach(),
    )
    for axis in range(3):
        part = tensor.chunk(2, axis)[1]
        asked = {"w": ShardedTensor.from_rank_offsets(key, torch.zeros(part.shape), (axis, 1, 2))}
        assert torch.equal(distckpt.load(asked, saved, family="auto")["w"], part)


@pytest.mark.parametrize("family", ["deepseek_v3", "llama"])
def test_what_a_smaller_model_would_leave_out_is_named(family, tmp_path, caplog):
    config = make_config(family)
    make_model(config).save_pretrained(tmp_path / "saved")
    config.num_hidden_layers = last = config.num_hidden_layers - 1
    small, source = make_model(config, seed=1), tmp_path / "saved"
    with pytest.raises(
        LoadMismatchError,
        match=rf"holds 'model.layers.{last}\.input_layernorm.weight'.*larger model",
    ):
        distckpt.load({"model": small}, source, family="auto")
    distckpt.megatron.load({"model": small}, source, family="auto", strict="raise_unexpected")
    expected = {
        key: tensor
        for key, tensor in read_export(source).items()
        if "norm" in key and f".{last}." not in key
    }
    assert same_bytes({key: small.state_dict()[key] for key in expected}, expected)
    # A layer that is not of the model of this configuration predicts further tokens.
    values = json.loads((source / "config.json").read_text()) | {"num_hidden_layers": last}
    (source / "config.json").write_text(json.dumps(values))
    assert not caplog.records
    distckpt.load({"model": small}, source, family="auto")
    assert f"'model.layers.{last}.input_layernorm.weight'" in caplog.text


def test_both_names_of_a_tied_tensor_are_filled_and_one_is_written(tmp_path):
    model = make_model(make_config("qwen3"))
    model.save_pretrained(tmp_path / "saved")
    names = ("model.embed_tokens.weight", "lm_head.weight")
    asked = {name: ShardedTensor.from_rank_offsets(name, torch.zeros(40, 32)) for name in names}
    loaded = distckpt.load(asked, tmp_path / "saved", family="auto")
    assert all(torch.equal(loaded[name], model.lm_head.weight) for name in names)
    copies = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    distckpt.save(
        {k: ShardedTensor.from_rank_offsets(k, t) for k, t in copies.items()},
        tmp_path / "checkpoint",
    )
    distckpt.consolidate(
        tmp_path / "checkpoint", tmp_path / "exported", family="auto", like=tmp_path / "saved"
    )
    assert same_bytes(read_export(tmp_path / "exported"), read_export(tmp_path / "saved"))


@pytest.mark.parametrize("prefix", ["", "module."])
def test_names_that_are_tied_by_the_configuration_alone_are_compared(prefix, tmp_path, caplog):
    model = make_model(make_config("qwen3"))
    model.save_pretrained(tmp_path / "saved")
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    state["lm_head.weight"][-1, -1] += 1
    distckpt.save(
        {
            f"{prefix}{key}": ShardedTensor.from_rank_offsets(f"{prefix}{key}", tensor)
            for key, tensor in state.items()
        },
        tmp_path / "checkpoint",
    )
    options = {
        "family": "auto",
        "like": tmp_path / "saved",
        "rules": [Rename("module.**", "{0}")] if prefix else (),
    }
    distckpt.consolidate(tmp_path / "checkpoint", tmp_path / "untied", **options)
    assert same_bytes(read_export(tmp_path / "untied"), state)
    assert "says that 'lm_head.weight' is tied" in caplog.text
    options["keys"] = f"!{prefix}lm_head.weight"
    distckpt.consolidate(tmp_path / "checkpoint", tmp_path / "exported", **options)
    assert same_bytes(read_export(tmp_path / "exported"), read_export(tmp_path / "saved"))


def make_tied(family):
    """Make a model whose configuration ties its output layer to the embedding."""
    if family in OVERRIDES:
        return make_model(make_config(family))
    sizes = {"vocab_size": 40, "d_model": 16, "pad_token_id": 0, "decoder_start_token_id": 0}
    sizes |= {"d_kv": 4, "d_ff": 32, "num_layers": 1, "num_heads": 4}
    sizes |= {"encoder_layers": 1, "decoder_layers": 1, "eos_token_id": 1, "bos_token_id": 2}
    sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = transformers.AutoConfig.for_model(family, **sizes, is_encoder_decoder=True)
    return transformers.AutoModelForSeq2SeqLM.from_config(config)


def directory_of_tied(family, form, path):
    """Write a directory that holds what the configuration ties as one tensor, as two, or under the
    name that is usually left out; return the model as transformers opens it.
    """
    model = make_tied(family)
    model.save_pretrained(path)
    name = "lm_head.weight"
    other = model.all_tied_weights_keys[name]
    tensors = read_export(path)
    if form == "apart":
        tensors[name] = torch.randn_like(tensors[other])
    if form == "other name":
        tensors[name] = tensors.pop(other)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    opened = type(model).from_pretrained(path, attn_implementation="eager")
    assert torch.equal(opened.state_dict()[name], tensors.get(name, tensors.get(other)))
    return opened


def with_zeros(model):
    zeros = copy.deepcopy(model)
    for tensor in zeros.state_dict().values():
        tensor.zero_()
    return zeros


@pytest.mark.parametrize("form", ["one", "apart", "other name"])
@pytest.mark.parametrize("family", ["t5", "mt5", "bart", "qwen3", "gemma3_text"])
def test_files_decide_what_is_tied_whatever_the_configuration_says(family, form, tmp_path, caplog):
    model = directory_of_tied(family, form, tmp_path / "saved")
    loaded = with_zeros(model)
    distckpt.load({"model": loaded}, tmp_path / "saved", family="auto")
    assert same_bytes(loaded.state_dict(), model.state_dict())
    distckpt.save({"model": model}, tmp_path / "checkpoint")
    distckpt.consolidate(
        tmp_path / "checkpoint", tmp_path / "exported", family="auto", like=tmp_path / "saved"
    )
    model.save_pretrained(tmp_path / "again")
    assert same_bytes(read_export(tmp_path / "exported"), read_export(tmp_path / "again"))
    assert not [text for text in caplog.messages if "no module" in text]


def test_what_has_memory_of_its_own_is_moved_whatever_the_configuration_says(tmp_path):
    model = directory_of_tied("t5", "apart", tmp_path / "saved")
    moved = with_zeros(model)
    distckpt.redistribute({"model": model}, {"model": moved}, family=tmp_path / "saved")
    assert same_bytes(moved.state_dict(), model.state_dict())
    names = {
        key: ShardedTensor.from_rank_offsets(key, torch.zeros_like(tensor))
        for key, tensor in read_export(tmp_path / "saved").items()
    }
    distckpt.redistribute({"model": model}, names, family=tmp_path / "saved")
    assert torch.equal(names["lm_head.weight"].data, model.lm_head.weight)


def test_a_tied_model_is_warned_of_files_that_hold_two_tensors(tmp_path, caplog):
    directory_of_tied("t5", "apart", tmp_path / "saved")
    distckpt.load({"model": make_tied("t5")}, tmp_path / "saved", family="auto")
    assert "different values, and were to be loaded into one tensor" in caplog.text


@pytest.mark.parametrize("rules", [[], [Rename("module.**", "{0}")]])
def test_a_tied_model_takes_one_tensor_where_the_configuration_ties_none(rules, tmp_path):
    model = make_tied("qwen3")
    model.save_pretrained(tmp_path / "saved")
    path = tmp_path / "saved" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": False}))
    loaded = with_zeros(model)
    state = {"module": loaded} if rules else {"model": loaded}
    distckpt.load(state, tmp_path / "saved", family="auto", rules=rules)
    assert same_bytes(loaded.state_dict(), model.state_dict())
    distckpt.save(state, tmp_path / "checkpoint")
    distckpt.consolidate(
        tmp_path / "checkpoint", tmp_path / "exported", family=tmp_path / "saved", rules=rules
    )
    # By this configuration, transformers expects both.
    assert same_bytes(read_export(tmp_path / "exported"), model.state_dict())


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "qwen2_5_vl", "jamba", "t5"])
def test_a_model_on_the_meta_device_computes_what_no_file_holds(family, tmp_path):
    saved = make_model(make_config(family)) if family != "t5" else make_tied("t5").eval()
    saved.save_pretrained(tmp_path / "saved")
    with torch.device("meta"):
        loaded = type(saved)(copy.deepcopy(saved.config)).eval()
    distckpt.load({"model": loaded}, tmp_path / "saved", family="auto", materialize="cpu")
    assert same_bytes(loaded.state_dict(), saved.state_dict())
    assert same_bytes(dict(loaded.named_buffers()), dict(saved.named_buffers()))


def test_what_is_missing_or_unknown_is_named(mixtral, tmp_path):
    model, saved = mixtral
    state = {
        key: ShardedTensor.from_rank_offsets(key, tensor)
        for key, tensor in model.state_dict().items()
    }
    missing = "model.layers.1.mlp.experts.down_proj"
    distckpt.save({key: shard for key, shard in state.items() if key != missing}, tmp_path / "less")
    with pytest.raises(LoadMismatchError, match=f"'{missing}' is missing"):
        distckpt.consolidate(tmp_path / "less", tmp_path / "exported", family="auto", like=saved)
    distckpt.save(
        {**state, "more": ShardedTensor.from_rank_offsets("more", torch.zeros(2))},
        tmp_path / "more",
    )
    with pytest.raises(LoadMismatchError, match="No rule matches 'more'"):
        distckpt.consolidate(tmp_path / "more", tmp_path / "exported", family="auto", like=saved)
    assert not (tmp_path / "exported").exists()


def test_a_configuration_may_be_an_object_a_dict_or_a_path(mixtral):
    model, saved = mixtral
    for source in ("megatron", "transformers"):
        first, *others = (
            repr(distckpt.families.rules(config, source))
            for config in (model.config, model.config.to_dict(), saved, saved / "config.json")
        )
        assert others == [first] * 3


def test_configurations_that_say_too_little(tmp_path):
    with pytest.raises(CheckpointNotFoundError, match=r"no .*config\.json"):
        distckpt.families.rules(tmp_path, "megatron")
    with pytest.raises(CheckpointingException, match="does not name its model_type"):
        distckpt.families.rules({}, "megatron")
    with pytest.raises(CheckpointingException, match=r"'nonsense' are not supported.*are .*llama"):
        distckpt.families.rules({"model_type": "nonsense"}, "megatron")
    for model_type, why in (
        ("jamba", "no Mamba 1"),
        ("llava_next", "image_newline"),
        ("qwen2_vl", "tower"),
    ):
        with pytest.raises(
            CheckpointingException, match=f"model_type '{model_type}' are not known: .*{why}"
        ):
            distckpt.families.rules({"model_type": model_type}, "megatron")
    with pytest.raises(CheckpointingException, match="makes no model of type 'nonsense'"):
        distckpt.families.rules({"model_type": "nonsense"}, "transformers")
    with pytest.raises(
        CheckpointingException, match=r"makes no model of type 'llama'.*num_hidden_layers"
    ):
        distckpt.families.rules({"model_type": "llama", "num_hidden_layers": "2"}, "transformers")
    with pytest.raises(CheckpointingException, match="does not say 'num_hidden_layers'"):
        distckpt.families.rules({"model_type": "llama", "vocab_size": 4}, "megatron")
    with pytest.raises(ValueError, match="source"):
        distckpt.families.rules({"model_type": "llama"}, "torchtitan")


def test_parts_of_configurations_leave_out_what_is_usual():
    """As Gemma 3 and LLaVA were published: transformers knows the rest."""
    clip = make_config("llava").vision_config.to_dict()
    siglip = make_config("gemma3").vision_config.to_dict()
    for model_type, text, vision in (
        (
            "gemma3",
            {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34},
            siglip,
        ),
        ("llava", {"model_type": "llama", "vocab_size": 32064}, clip),
    ):
        parts = {"text_config": text, "vision_config": vision}
        complete = transformers.AutoConfig.for_model(model_type, **copy.deepcopy(parts)).to_dict()
        found = distckpt.families.rules({"model_type": model_type} | parts, "megatron")
        assert repr(found) == repr(distckpt.families.rules(complete, "megatron"))


def test_the_command_line_lists_what_comes_from_where_and_writes_nothing(mixtral, tmp_path, capsys):
    model, saved = mixtral
    checkpoint, exported = str(tmp_path / "checkpoint"), str(tmp_path / "exported")
    distckpt.save({"model": model}, checkpoint)
    command = ["consolidate", checkpoint, exported, "--family", "auto", "--like", str(saved)]
    assert main([*command, "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    name, source = (
        "model.layers.1.block_sparse_moe.experts.2.w3.weight",
        "model.layers.1.mlp.experts.gate_up_proj",
    )
    assert f"{name}  F32 48x32  <- {source} [2:3, 48:96, 0:32]" in lines
    assert main([*command, "--dry-run", "--json"]) == 0
    names = [tensor["name"] for tensor in json.loads(capsys.readouterr().out)["tensors"]]
    assert set(names) == read_export(saved).keys()
    assert not (tmp_path / "exported").exists()
    assert main(command) == 0
    assert same_bytes(read_export(exported), read_export(saved))
