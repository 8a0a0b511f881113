"""Models of transformers, made on the meta device and filled from a directory in one call: they are
the ones of `from_pretrained`, bit by bit, also after training.
"""

from __future__ import annotations

import re
from collections import defaultdict

import pytest
import torch
from safetensors.torch import save_file

import distckpt
from distckpt import LoadMismatchError, ShardedTensor
from distckpt.rules import Drop
from tests.support.hf_folders import read_export, same_bytes
from tests.support.tiny_models import (
    COMPOSED,
    OTHERS,
    OVERRIDES,
    TOKENS,
    auto_class,
    make_config,
    make_model,
    transformers,
)

OFTEN = {
    *(
        "bert",
        "clip",
        "deepseek_v3",
        "falcon_h1",
        "gemma2",
        "gemma3",
        "glm4_moe",
        "gpt2",
        "gpt_neox",
    ),
    *("gpt_oss", "internvl", "jamba", "lfm2", "llama", "llama4", "llava", "mamba2", "mixtral"),
    *("mllama", "nemotron_h", "phi3", "qwen2_5_vl", "qwen3", "qwen3_5", "qwen3_moe", "qwen3_next"),
    *("qwen3_vl_moe", "swin", "t5", "vit", "wav2vec2", "whisper", "zamba2"),
}
"""Model types of the regular tests: dense ones, fused experts, MLA, hybrid states, towers."""

MODEL_TYPES = [
    name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow)
    for name in sorted([*OVERRIDES, *COMPOSED, *OTHERS])
]


def started(path, dtype=torch.float32, **options):
    """Make the model of a directory on the meta device, and fill it."""
    config = transformers.AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        model = auto_class(config).from_config(config, attn_implementation="eager", dtype=dtype)
    distckpt.load({"model": model}, path, family="auto", materialize="cpu", **options)
    return model.eval()


def opened(path, dtype=torch.float32):
    """Return what transformers makes of a directory.

    It maps the file, where tensors begin anywhere: sums of unaligned numbers have other last bits.
    It makes all parameters trainable, also those that their model froze.
    """
    config = transformers.AutoConfig.from_pretrained(path)
    kind = auto_class(config)
    model = kind.from_pretrained(path, attn_implementation="eager", dtype=dtype).eval()
    trainable = kind.from_config(config)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.clone()
        parameter.requires_grad_(trainable.get_parameter(name).requires_grad)
    return model


def tensors_of(model):
    """Return parameters, buffers of both kinds, and tensors that are attributes, by all names."""
    tensors = dict(model.named_parameters(remove_duplicate=False))
    tensors |= model.named_buffers(remove_duplicate=False)
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                tensors[f"{path}.{name}"] = value
    return {name: tensor.detach() for name, tensor in tensors.items()}


def tied_names(model):
    """Return the sets of names that share memory."""
    names = defaultdict(set)
    for name, tensor in model.named_parameters(remove_duplicate=False):
        names[tensor.data_ptr()].add(name)
    return sorted(sorted(group) for group in names.values() if len(group) > 1)


def is_same(model, expected):
    assert tied_names(model) == tied_names(expected)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == expected.get_parameter(name).requires_grad, name
    return same_bytes(tensors_of(model), tensors_of(expected))


def inputs_of(config):
    generator = torch.Generator().manual_seed(0)
    task = OTHERS.get(config.model_type, ("CausalLM",))[0]
    size = getattr(getattr(config, "vision_config", config), "image_size", 32)
    pictures = {"pixel_values": lambda: torch.randn(2, 3, size, size, generator=generator)}
    tokens = {"input_ids": TOKENS}
    return {
        "CTC": {"input_values": torch.randn(1, 64, generator=generator)},
        "ImageClassification": pictures,
        "Seq2SeqLM": tokens | {"decoder_input_ids": TOKENS},
        "SpeechSeq2Seq": {
            "input_features": torch.randn(1, 8, 32, generator=generator),
            "decoder_input_ids": TOKENS,
        },
        "ZeroShotImageClassification": tokens | pictures,
    }.get(task, tokens)


def train(model):
    transformers.set_seed(0)
    inputs = {name: v() if callable(v) else v for name, v in inputs_of(model.config).items()}
    # The whole of Llama 4 takes no text without pictures in transformers 5.24.
    trained = model.language_model if model.config.model_type == "llama4" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.train()
    for _ in range(3):
        trained(**inputs)[0].float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("family", MODEL_TYPES)
def test_a_model_started_from_a_directory_is_the_one_of_transformers(family, tmp_path):
    make_model(make_config(family)).save_pretrained(tmp_path)
    model, expected = started(tmp_path), opened(tmp_path)
    assert is_same(model, expected)
    before = {name: tensor.clone() for name, tensor in tensors_of(model).items()}
    train(model)
    train(expected)
    assert is_same(model, expected)
    changed = tensors_of(model)
    assert any(not torch.equal(tensor, changed[name]) for name, tensor in before.items())


ROTARY = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "longrope": {
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 32,
    },
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rope_type", ROTARY)
def test_rotary_tables_are_computed(rope_type, dtype, tmp_path):
    config = make_config("llama")
    config.rope_parameters = {"rope_type": rope_type, "rope_theta": 1e4, **ROTARY[rope_type]}
    make_model(config).to(dtype).save_pretrained(tmp_path)
    assert is_same(started(tmp_path, dtype), opened(tmp_path, dtype))


# --- Other forms of files than save_pretrained writes ---------------------------------------------


def with_names(*changes, **more):
    """Return a change of the tensors of a directory: other names, and more tensors."""

    def change(tensors, _):
        renamed = {}
        for name, tensor in tensors.items():
            for pattern, to in changes:
                name = re.sub(pattern, to, name)
            renamed[name] = tensor
        return renamed | {name.replace("__", "."): tensor for name, tensor in more.items()}

    return change


def as_in_memory(_, model):
    """Return the tensors under their names and in their shapes in memory."""
    tied = model.all_tied_weights_keys
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}


_OLD_NORMS = ((r"LayerNorm\.weight", "LayerNorm.gamma"), (r"LayerNorm\.bias", "LayerNorm.beta"))
_MASKS = {f"h__{layer}__attn__bias": torch.ones(1, 1, 64, 64).tril() for layer in range(2)}

FORMS = {
    "bart": [with_names((r"^model\.", ""))],
    "bert": [
        with_names(
            *_OLD_NORMS,
            bert__embeddings__position_ids=torch.arange(64)[None],
            bert__pooler__dense__bias=torch.zeros(32),
            cls__seq_relationship__bias=torch.zeros(2),
        )
    ],
    "bloom": [with_names((r"^transformer\.", ""))],
    "gpt2": [with_names((r"^transformer\.", ""), **_MASKS)],
    "llama": [with_names(model__layers__0__self_attn__rotary_emb__inv_freq=torch.rand(4))],
    "opt": [with_names((r"^model\.", ""))],
    "clip": [with_names(text_model__embeddings__position_ids=torch.arange(64)[None])],
    "gemma3": [as_in_memory, with_names((r"vision_tower\.", "vision_tower.vision_model."))],
    "granitemoe": [as_in_memory],
    "llava": [as_in_memory, with_names((r"vision_tower\.", "vision_tower.vision_model."))],
    "mixtral": [as_in_memory],
    "mllama": [as_in_memory],
    "minimax_m2": [as_in_memory],
    "nemotron_h": [as_in_memory],
    "qwen2_5_vl": [as_in_memory],
    "qwen3_moe": [as_in_memory],
    "vit": [as_in_memory],
    "wav2vec2": [
        with_names(
            (r"parametrizations\.weight\.original0", "weight_g"),
            (r"parametrizations\.weight\.original1", "weight_v"),
        )
    ],
}
"""What directories that were published with earlier releases, or with other programs, hold."""


@pytest.mark.parametrize(
    ("family", "change"), [(family, change) for family in FORMS for change in FORMS[family]]
)
def test_every_form_of_a_directory_that_transformers_opens_is_read(family, change, tmp_path):
    saved = make_model(make_config(family))
    saved.save_pretrained(tmp_path)
    tensors = change(read_export(tmp_path), saved)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    expected = opened(tmp_path)
    assert same_bytes(expected.state_dict(), saved.state_dict())
    assert is_same(started(tmp_path), expected)

    # An export has the form of the directory that it is to be like.
    distckpt.save({"model": saved}, tmp_path / "checkpoint")
    exported = tmp_path / "exported"
    distckpt.consolidate(tmp_path / "checkpoint", exported, family="auto", like=tmp_path)
    assert read_export(exported).keys() <= tensors.keys()
    assert same_bytes(opened(exported).state_dict(), saved.state_dict())


@pytest.mark.parametrize("family", ["llama", "gpt2", "t5", "mixtral", "gemma3", "qwen2_5_vl"])
def test_a_model_without_its_head_is_filled(family, tmp_path):
    make_model(make_config(family)).save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config, attn_implementation="eager")
    distckpt.load({"model": model}, tmp_path, family="auto", materialize="cpu")
    expected = transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="eager")
    assert is_same(model, expected)


def test_a_head_is_put_on_a_directory_without_one(tmp_path):
    config = make_config("llama")
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(LoadMismatchError, match=r"'lm_head\.weight'.*base_model"):
        distckpt.load({"model": model}, tmp_path, family="auto", materialize="cpu")
    assert all(parameter.is_meta for parameter in model.parameters())
    model.lm_head.to_empty(device="cpu")
    torch.nn.init.ones_(model.lm_head.weight)
    distckpt.load({"model": model.base_model}, tmp_path, family="auto", materialize="cpu")
    expected = transformers.AutoModel.from_pretrained(tmp_path)
    assert is_same(model.base_model, expected)
    assert model.lm_head.weight.mean() == 1


# --- Quantized directories ------------------------------------------------------------------------


@pytest.fixture
def quantized(request, tmp_path):
    """A directory with FP8 blocks, or MXFP4, and the class of its model."""
    saved = make_model(make_config(request.param)).bfloat16()
    saved.save_pretrained(tmp_path / "saved")
    distckpt.save({"model": saved}, tmp_path / "checkpoint")
    exported = tmp_path / "exported"
    distckpt.consolidate(
        tmp_path / "checkpoint",
        exported,
        quantize="mxfp4" if request.param == "gpt_oss" else "fp8-block",
        family="auto",
        like=tmp_path / "saved",
        extra_files_from=tmp_path / "saved",
    )
    return exported, type(saved)


FP8 = ["llama", "deepseek_v3", "qwen3_moe", "qwen2_5_vl"]


@pytest.mark.parametrize("quantized", [*FP8, "gpt_oss"], indirect=True)
def test_codes_become_values_in_a_plain_model(quantized):
    path, kind = quantized
    is_fp8 = kind is not transformers.GptOssForCausalLM
    config = transformers.FineGrainedFP8Config if is_fp8 else transformers.Mxfp4Config
    settings = config(dequantize=True)
    expected = kind.from_pretrained(
        path, dtype=torch.bfloat16, attn_implementation="eager", quantization_config=settings
    )
    assert is_same(started(path, torch.bfloat16), expected)


@pytest.mark.parametrize("quantized", FP8, indirect=True)
def test_codes_stay_codes_in_a_model_that_has_them(quantized, monkeypatch):
    from transformers.quantizers import AutoHfQuantizer
    from transformers.quantizers import quantizer_finegrained_fp8 as fp8

    path, kind = quantized
    config = transformers.AutoConfig.from_pretrained(path)
    quantizer = AutoHfQuantizer.from_config(config.quantization_config, pre_quantized=True)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = kind._from_config(config, attn_implementation="eager")
            quantizer.preprocess_model(model, dtype=torch.bfloat16)
    finally:
        torch.set_default_dtype(default)
    distckpt.load({"model": model}, path, family="auto", materialize="cpu")
    # Without a GPU, transformers would make values of the codes.
    monkeypatch.setattr(
        fp8.FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None
    )
    expected = kind.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="eager")
    assert torch.float8_e4m3fn in {parameter.dtype for parameter in expected.parameters()}
    assert is_same(model, expected)


@pytest.mark.parametrize("quantized", ["qwen3_moe"], indirect=True)
def test_a_model_without_codes_is_exported_like_a_directory_with_codes(quantized, tmp_path):
    path, _ = quantized
    model = started(path, torch.bfloat16)
    more = ShardedTensor.from_rank_offsets("more", torch.zeros(2))
    distckpt.save({"model": model, "more": more}, tmp_path / "more")
    distckpt.consolidate(
        tmp_path / "more", tmp_path / "values", family="auto", like=path, rules=[Drop("more")]
    )
    assert same_bytes(opened(tmp_path / "values", torch.bfloat16).state_dict(), model.state_dict())


# --- dtypes ---------------------------------------------------------------------------------------


def test_the_dtype_of_the_model_decides(tmp_path):
    saved = make_model(make_config("qwen3"))
    saved.save_pretrained(tmp_path / "float32")
    saved.bfloat16().save_pretrained(tmp_path / "bfloat16")
    with pytest.raises(LoadMismatchError, match=r"float32.*bfloat16.*allow_dtype_cast=True"):
        started(tmp_path / "float32", torch.bfloat16)
    rounded = started(tmp_path / "float32", torch.bfloat16, allow_dtype_cast=True)
    assert is_same(rounded, opened(tmp_path / "float32", torch.bfloat16))
    assert is_same(started(tmp_path / "bfloat16"), opened(tmp_path / "bfloat16"))
