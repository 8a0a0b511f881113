"""Exports from MaxText's names and back: logits are those that the real MaxText computed."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import distckpt
from distckpt import (
    CheckpointingException,
    InvalidShardingError,
    LoadMismatchError,
    ShardedTensor,
)
from distckpt.jax import from_maxtext, to_maxtext
from distckpt.rules import Rename
from tests.data.make_maxtext import MODELS, TOKENS, parameters_of
from tests.support.hf_folders import read_export, same_bytes
from tests.support.tiny_models import make_config, transformers

DATA = Path(__file__).parents[2] / "data"
GEMMA_LAYERS = 8
GEMMA = {
    "num_hidden_layers": GEMMA_LAYERS,
    "layer_types": [
        "sliding_attention" if (number + 1) % 6 else "full_attention"
        for number in range(GEMMA_LAYERS)
    ],
}
LLAMA_3_1 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def make_model(kind, folder):
    """Save a tiny model whose norms and biases are not trivial; return it."""
    config = make_config("llama" if kind == "llama3.1" else kind)
    if kind == "llama3.1":
        config.rope_parameters = LLAMA_3_1
    if kind == "gemma3_text":
        vars(config).update(GEMMA, query_pre_attn_scalar=8)
    config.tie_word_embeddings = kind in ("qwen3", "gemma3_text")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(torch.randn_like(tensor) * 0.2)
    model.save_pretrained(folder)
    return model


FORMS = [(kind, layout) for kind in MODELS for layout in ("jax", "jax-layers")]


@pytest.mark.parametrize(("kind", "layout"), FORMS)
def test_exports_have_the_logits_that_maxtext_computed_and_go_back(kind, layout, tmp_path):
    with zipfile.ZipFile(DATA / "maxtext.zip") as archive:
        facts = json.loads(archive.read(f"{kind}.json"))
    shapes = {name: tuple(shape) for name, shape in facts[layout]["shapes"].items()}
    tensors = parameters_of(shapes)
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax/config.json").write_text(json.dumps(facts["config"]))
    save_file(
        {name: torch.from_numpy(value) for name, value in tensors.items()},
        tmp_path / "jax/model.safetensors",
    )
    jax = tmp_path / "jax"
    distckpt.consolidate(jax, tmp_path / "hf", family=jax, extra_files_from=jax)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", attn_implementation="eager", dtype=torch.float32
    )
    with torch.no_grad():
        found = model(torch.tensor([TOKENS])).logits[0]
    expected = torch.tensor(facts[layout]["logits"], dtype=torch.float32)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)

    hf = tmp_path / "hf"
    distckpt.consolidate(hf, tmp_path / "again", layout=layout, family=hf)
    again = read_export(tmp_path / "again")
    assert {name: tuple(value.shape) for name, value in again.items()} == shapes
    for name, value in tensors.items():
        torch.testing.assert_close(again[name], torch.from_numpy(value), rtol=2e-7, atol=2e-7)


# --- Forms of checkpoints -------------------------------------------------------------------------


def exported(kind, tmp_path, layout="jax"):
    """Return the tensors of a tiny model in a Hugging Face directory, and in MaxText's form."""
    make_model(kind, tmp_path / "hf")
    hf = tmp_path / "hf"
    distckpt.consolidate(hf, tmp_path / "jax", layout=layout, family=hf)
    return read_export(hf), read_export(tmp_path / "jax")


def sharded(tensors):
    return {key: ShardedTensor.from_rank_offsets(key, value) for key, value in tensors.items()}


def back(tensors, tmp_path, **options):
    """Export tensors under MaxText's names to a Hugging Face directory; return that."""
    distckpt.save(sharded(tensors), tmp_path / "checkpoint", overwrite=True)
    options = {"family": tmp_path / "hf", "overwrite": True} | options
    report = distckpt.consolidate(tmp_path / "checkpoint", tmp_path / "back", **options)
    return read_export(tmp_path / "back"), report


def test_a_training_state_of_linen_is_exported_without_its_optimizer(tmp_path):
    original, params = exported("qwen3", tmp_path)
    state = {f"params.{key}": value for key, value in params.items()}
    for moment in ("mu", "nu"):
        state |= {f"opt_state.0.{moment}.{key}": value * 0 for key, value in params.items()}
    state["opt_state.0.count"] = state["step"] = torch.tensor(7)
    state["nnx_aux.model.decoder.dropout.rngs.params.key"] = torch.tensor([1, 2])
    found, report = back(state, tmp_path)
    assert same_bytes(found, original)
    assert set(report.left_out) == {key for key in state if not key.startswith("params.")}


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3"])
def test_names_of_nnx_are_read(kind, tmp_path):
    original, params = exported(kind, tmp_path, "jax-layers")
    named = {}
    for key, value in params.items():
        name = re.sub(r"layers_(\d+)\.", r"layers.\1.", key.removeprefix("params."))
        named[f"model.{name}.value"] = value
    named["model.dropout.rngs.default.count.value"] = torch.tensor(3)
    found, _ = back(named, tmp_path)
    assert found.keys() == original.keys()
    for name, tensor in original.items():
        torch.testing.assert_close(found[name], tensor, rtol=2e-7, atol=1e-7)


def test_another_axis_of_the_scan_is_recognized(tmp_path):
    original, params = exported("qwen3", tmp_path)
    moved = {
        key: value.movedim(1, 0).contiguous() if ".layers." in key else value
        for key, value in params.items()
    }
    found, _ = back(moved, tmp_path)
    assert same_bytes(found, original)


def test_rows_that_pad_the_vocabulary_are_cut_off_and_missing_ones_are_zeros(tmp_path):
    original, params = exported("mistral", tmp_path)
    embedding, head = "params.token_embedder.embedding", "params.decoder.logits_dense.kernel"
    rows = torch.ones(24, 32)
    padded = params | {
        embedding: torch.cat([params[embedding], rows]),
        head: torch.cat([params[head], rows.T], 1),
    }
    found, _ = back(padded, tmp_path)
    assert torch.equal(found["lm_head.weight"], original["lm_head.weight"])
    assert torch.equal(found["model.embed_tokens.weight"], original["model.embed_tokens.weight"])
    short = params | {embedding: params[embedding][:36], head: params[head][:, :36]}
    found, _ = back({key: value.contiguous() for key, value in short.items()}, tmp_path)
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        assert torch.equal(found[name][:36], original[name][:36])
        assert not found[name][36:].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_rounded_once(dtype, tmp_path):
    model = make_model("llama3.1", tmp_path / "hf")
    hf = tmp_path / "hf"
    distckpt.consolidate(hf, tmp_path / "jax", layout="jax", family=hf, dtype=dtype)
    query = read_export(tmp_path / "jax")["params.decoder.layers.self_attention.query.kernel"]
    weight = model.model.layers[1].self_attn.q_proj.weight.detach()
    heads = weight.T.reshape(32, 4, 2, 4).transpose(2, 3).reshape(32, 4, 8)
    expected = heads * torch.tensor(8**-0.5)
    assert torch.equal(query[:, 1], expected.to(dtype))


def test_values_beyond_the_range_of_16_bits_are_named(tmp_path, caplog):
    _, params = exported("llama", tmp_path)
    key = "params.decoder.layers.self_attention.query.kernel"
    half = {name: value.half() for name, value in params.items()}
    half[key][3, 1, 2, 5] = 40000.0
    found, _ = back(half, tmp_path)
    assert found["model.layers.1.self_attn.q_proj.weight"].isinf().sum() == 1
    assert "model.layers.1.self_attn.q_proj.weight" in caplog.text


def test_a_checkpoint_of_transformers_in_memory_becomes_one_of_maxtext(tmp_path):
    model = make_model("qwen3_moe", tmp_path / "hf")
    distckpt.save({"model": model}, tmp_path / "step")
    options = {"layout": "jax", "family": tmp_path / "hf"}
    distckpt.consolidate(tmp_path / "step", tmp_path / "a", **options)
    distckpt.consolidate(tmp_path / "hf", tmp_path / "b", **options)
    assert same_bytes(read_export(tmp_path / "a"), read_export(tmp_path / "b"))


# --- Refusals -------------------------------------------------------------------------------------


def test_a_missing_an_unknown_and_a_misshapen_tensor_are_named(tmp_path):
    _, params = exported("mixtral", tmp_path)
    name = "params.decoder.layers.MoeBlock_0.wi_1"
    without = {key: value for key, value in params.items() if key != name}
    with pytest.raises(LoadMismatchError, match=re.escape(name)):
        back(without, tmp_path)
    with pytest.raises(LoadMismatchError, match="lora_a"):
        back(params | {"params.decoder.layers.mlp.lora_a": torch.ones(2)}, tmp_path)
    with pytest.raises(InvalidShardingError, match=re.escape(name)):
        back(params | {name: params[name][..., :-1].contiguous()}, tmp_path)


def test_a_load_that_leaves_out_an_unknown_tensor_is_refused(tmp_path):
    original, params = exported("llama", tmp_path)
    name = "params.decoder.layers.self_attention.query.bias"
    save_file(params | {name: torch.ones(3)}, tmp_path / "jax/model.safetensors")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "hf")
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(LoadMismatchError, match=re.escape(name)):
        distckpt.load({"model": model}, tmp_path / "jax", family=tmp_path / "hf")
    distckpt.load({"model": model}, tmp_path / "jax", family=tmp_path / "hf", strict="report")
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, original[key], rtol=2e-7, atol=0)


def test_a_tied_configuration_and_an_output_layer_contradict_each_other(tmp_path):
    _, params = exported("mistral", tmp_path)
    config = json.loads((tmp_path / "hf/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with pytest.raises(CheckpointingException, match="tie_word_embeddings"):
        back(params, tmp_path, family=tmp_path / "config.json")


def test_untied_values_of_a_tied_configuration_are_not_left_out(tmp_path):
    original, _ = exported("qwen3", tmp_path)
    head = original["model.embed_tokens.weight"] + 1
    save_file(original | {"lm_head.weight": head}, tmp_path / "hf/model.safetensors")
    with pytest.raises(LoadMismatchError, match=re.escape("lm_head.weight")):
        distckpt.consolidate(
            tmp_path / "hf", tmp_path / "again", layout="jax", family=tmp_path / "hf"
        )


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
REFUSED = [
    ("gpt2", {}, "gpt2"),
    ("llama", {"attention_bias": True}, "attention_bias true"),
    ("llama", {"mlp_bias": True}, "mlp_bias true"),
    ("llama", {"hidden_act": "gelu"}, 'hidden_act "gelu"'),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 'rope_type "dynamic"'),
    ("llama", {"rope_parameters": LLAMA_3_1 | {"factor": 32.0}}, "factor 32"),
    ("llama", {"rope_parameters": LLAMA_3_1 | {"high_freq_factor": 2.0}}, "high_freq_factor"),
    ("llama", {"rope_parameters": YARN | {"attention_factor": 2.0}}, "attention_factor 2.0"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ("qwen3", {"rope_parameters": LLAMA_3_1}, 'rope_type "llama3"'),
    ("qwen3", {"use_sliding_window": True}, "use_sliding_window"),
    ("mistral", {"sliding_window": 4}, "sliding_window 4"),
    ("mixtral", {"sliding_window": 4}, "sliding_window 4"),
    ("mistral", {"sliding_window": None, "attention_bias": True}, "attention_bias"),
    ("qwen3_moe", {"mlp_only_layers": [0]}, re.escape("mlp_only_layers [0]")),
    ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step 2"),
    ("qwen3_moe", {"norm_topk_prob": None}, "norm_topk_prob false"),
    ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window"),
    ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob false"),
    ("deepseek_v3", {"rms_norm_eps": 1e-5}, "rms_norm_eps"),
    ("deepseek_v3", {"n_shared_experts": 0}, "n_shared_experts"),
    ("deepseek_v3", {"rope_parameters": {"rope_type": "linear"}}, 'rope_type "linear"'),
    (
        "deepseek_v3",
        {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.0}},
        "mscale_all_dim 1.0",
    ),
    ("gemma3_text", {"layer_types": ["full_attention"] * 2}, "layer_types"),
    ("gemma3_text", {"layer_types": None, "sliding_window_pattern": 2}, "sliding_window_pattern"),
    ("gemma3_text", {"query_pre_attn_scalar": 100}, "query_pre_attn_scalar 100"),
    ("gemma3_text", {"hidden_activation": "gelu"}, 'hidden_activation "gelu"'),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    (
        "gemma3_text",
        {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
        'sliding_attention "linear"',
    ),
    ("gemma3_text", {"rope_parameters": {"full_attention": YARN}}, 'rope_type "yarn"'),
    ("llama", {"num_attention_heads": 0}, "num_attention_heads is 0"),
    ("llama", {"num_hidden_layers": 0}, "num_hidden_layers is 0"),
]


def config_of(kind):
    config = make_config("llama" if kind == "gpt2" else kind).to_dict()
    own = {"query_pre_attn_scalar": 8, "layer_types": None} if kind == "gemma3_text" else {}
    return config | own | {"model_type": kind}


@pytest.mark.parametrize(("kind", "changes", "message"), REFUSED)
def test_models_that_maxtext_computes_otherwise_are_refused(kind, changes, message):
    config = config_of(kind) | changes
    for call in (to_maxtext, lambda c: from_maxtext(c, {"token_embedder.embedding": (40, 32)})):
        with pytest.raises(CheckpointingException, match=message):
            call(config)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        # The logits of MaxText were equal for each of these.
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("llama", {"rope_parameters": YARN}),
        ("llama", {"rope_parameters": YARN | {"attention_factor": 1.0}}),
        ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
        ("qwen3", {"rope_parameters": YARN}),
        ("mistral", {"sliding_window": 64}),
        ("deepseek_v3", {"rope_interleave": False}),
        ("deepseek_v3", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}}),
        ("deepseek_v3", {"rope_parameters": YARN}),
        ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
        ("gemma3_text", {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    ],
)
def test_settings_that_maxtext_has_change_nothing_in_the_parameters(kind, changes):
    config = config_of(kind)
    assert to_maxtext(config | changes)[-1].tensors == to_maxtext(config)[-1].tensors


def test_arguments_are_checked(tmp_path):
    exported("llama", tmp_path)
    hf = tmp_path / "hf"
    with pytest.raises(CheckpointingException, match="needs `family`"):
        distckpt.consolidate(hf, tmp_path / "x", layout="jax")
    with pytest.raises(ValueError, match="jax-layers"):
        distckpt.consolidate(hf, tmp_path / "x", layout="flax", family=hf)
    with pytest.raises(CheckpointingException, match="has MaxText's names already"):
        distckpt.consolidate(tmp_path / "jax", tmp_path / "x", layout="jax-layers", family=hf)
    with pytest.raises(CheckpointingException, match="select one model"):
        from_maxtext(hf, {"a.token_embedder.embedding": (1, 1), "token_embedder.embedding": (1, 1)})
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("llama3.1", "jax-layers"),
        ("gemma3_text", "jax"),
        ("deepseek_v3", "jax"),
        ("qwen3", "jax"),
        ("mixtral", "jax"),
    ],
)
def test_a_load_reads_the_tensors_of_maxtext(kind, layout, tmp_path):
    model = make_model(kind, tmp_path / "hf")
    hf = tmp_path / "hf"
    distckpt.consolidate(hf, tmp_path / "jax", layout=layout, family=hf)
    other = transformers.AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    distckpt.load({"model": other}, tmp_path / "jax", family=hf)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], value, rtol=2e-7, atol=2e-7, msg=name)


def test_a_load_by_rules_multiplies_once_for_memory_that_is_shared(tmp_path):
    model = make_model("llama", tmp_path / "hf")
    distckpt.consolidate(tmp_path / "hf", tmp_path / "jax", layout="jax", family=tmp_path / "hf")
    original = read_export(tmp_path / "hf")
    empty = {key: torch.zeros_like(value) for key, value in original.items()}
    name = "model.layers.0.self_attn.q_proj.weight"
    distckpt.load(sharded(empty), tmp_path / "jax", rules=to_maxtext(model.config))
    torch.testing.assert_close(empty[name], original[name], rtol=2e-7, atol=0)


def test_a_load_of_products_beyond_the_range_of_16_bits_names_them(tmp_path, caplog):
    _, params = exported("llama", tmp_path)
    key = "params.decoder.layers.self_attention.query.kernel"
    half = {name: value.half() for name, value in params.items()}
    half[key][3, 1, 2, 5] = 40000.0
    distckpt.save(sharded(half), tmp_path / "half")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").half()
    distckpt.load({"model": model}, tmp_path / "half", family=tmp_path / "hf")
    assert model.model.layers[1].self_attn.q_proj.weight.isinf().sum() == 1
    assert key in caplog.text


def test_vocabularies_of_other_sizes_are_not_loaded_in_part(tmp_path):
    original, params = exported("mistral", tmp_path)
    embedding = "params.token_embedder.embedding"
    padded = params | {embedding: torch.cat([params[embedding], torch.ones(24, 32)])}
    for number, tensors in enumerate(
        (padded, params | {embedding: params[embedding][:36].contiguous()})
    ):
        distckpt.save(sharded(tensors), tmp_path / str(number))
        empty = sharded({key: torch.zeros_like(value) for key, value in original.items()})
        with pytest.raises(CheckpointingException, match=re.escape("embed")):
            distckpt.load(empty, tmp_path / str(number), family=tmp_path / "hf")


def test_the_text_part_of_a_model_with_a_tower_is_exported(tmp_path):
    config = make_config("gemma3")
    for name, value in GEMMA.items():
        setattr(config.text_config, name, value)
    config.text_config.query_pre_attn_scalar = config.text_config.head_dim
    kind = transformers.AutoModelForImageTextToText
    kind.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "hf")
    text = json.loads((tmp_path / "hf/config.json").read_text())["text_config"]
    (tmp_path / "text.json").write_text(json.dumps(text))
    distckpt.consolidate(
        tmp_path / "hf",
        tmp_path / "jax",
        layout="jax",
        family=tmp_path / "text.json",
        keys="language_model.",
        rules=[Rename("language_model.model.**", "model.{0}")],
    )
    distckpt.consolidate(tmp_path / "jax", tmp_path / "back", family=tmp_path / "text.json")
    back = read_export(tmp_path / "back")
    assert len(back) == 2 + 13 * GEMMA_LAYERS
    for name, tensor in read_export(tmp_path / "hf").items():
        if name.startswith("language_model."):
            found = back[name.removeprefix("language_model.")]
            torch.testing.assert_close(found, tensor, rtol=2e-7, atol=1e-7)


def test_deepseek_as_published_loses_only_its_extra_layers_and_codes(tmp_path):
    original, _ = exported("deepseek_v3", tmp_path)
    config = json.loads((tmp_path / "hf/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    extra = {"model.layers.3.eh_proj.weight": torch.ones(32, 64)}
    save_file(original | extra, tmp_path / "hf/model.safetensors", {"format": "pt"})
    options = {"family": tmp_path / "config.json", "layout": "jax"}
    distckpt.consolidate(tmp_path / "hf", tmp_path / "more", **options)
    assert same_bytes(read_export(tmp_path / "more"), read_export(tmp_path / "jax"))

    distckpt.consolidate(tmp_path / "hf", tmp_path / "fp8", quantize="fp8-block")
    distckpt.consolidate(tmp_path / "fp8", tmp_path / "values", dtype=torch.bfloat16)
    for source, output in (("fp8", "a"), ("values", "b")):
        distckpt.consolidate(tmp_path / source, tmp_path / output, dtype=torch.bfloat16, **options)
    found = read_export(tmp_path / "a")
    rounded = read_export(tmp_path / "b")
    bias = "params.decoder.moe_layers.DeepSeekMoeBlock_0.MoeBlock_0.gate.bias"
    stored = [f"model.layers.{n}.mlp.gate.e_score_correction_bias" for n in (1, 2)]
    assert torch.equal(found.pop(bias), torch.stack([original[name] for name in stored], 1))
    rounded.pop(bias)
    assert same_bytes(found, rounded)
