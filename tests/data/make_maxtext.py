"""Write names, shapes and logits of MaxText's models into maxtext.zip, with the real MaxText.

Run it with MaxText (of August 2026) and its requirements on the path:

    python make_maxtext.py CONFIGS BASE_YML

CONFIGS has a folder for each model, with a config.json of transformers; BASE_YML is MaxText's
configs/base.yml. Parameters are random numbers of a fixed seed, see `parameters_of`.
"""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path

import numpy as np

TOKENS = [3, 7, 1, 0, 22, 9, 9, 31]
MODELS = {
    "llama": "llama2-7b",
    "llama3.1": "llama3.1-8b",
    "mistral": "mistral-7b",
    "mixtral": "mixtral-8x7b",
    "qwen3": "qwen3-4b",
    "qwen3_moe": "qwen3-30b-a3b",
    "gemma3_text": "gemma3-4b",
    "deepseek_v3": "deepseek3-671b",
}


def parameters_of(shapes):
    """Return random parameters, the same for the same names and shapes."""
    generator = np.random.default_rng(0)
    parameters = {}
    for name in sorted(shapes):
        values = generator.normal(scale=0.2, size=shapes[name]) + name.endswith("scale")
        if name.endswith("embedding"):
            # For the logits, MaxText rounds it to bfloat16: it has few digits.
            values = np.round(values * 64) / 64
        parameters[name] = values.astype(np.float32)
    return parameters


def settings_of(kind, config):
    """Return MaxText's settings for a configuration of transformers."""
    rope = config["rope_parameters"]
    settings = {
        "base_emb_dim": config["hidden_size"],
        "base_num_query_heads": config["num_attention_heads"],
        "base_num_kv_heads": config["num_key_value_heads"],
        "base_mlp_dim": config["intermediate_size"],
        "base_num_decoder_layers": config["num_hidden_layers"],
        "head_dim": config.get("head_dim") or 8,
        "vocab_size": config["vocab_size"],
        "normalization_layer_epsilon": config["rms_norm_eps"],
    }
    if kind == "gemma3_text":
        return settings | {
            "rope_max_timescale": int(rope["full_attention"]["rope_theta"]),
            "local_rope_max_timescale": int(rope["sliding_attention"]["rope_theta"]),
            "sliding_window_size": config["sliding_window"],
            "rope_linear_scaling_factor": 1.0,
            "use_multimodal": False,
        }
    settings["rope_max_timescale"] = int(rope["rope_theta"])
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((config[name] for name in names if name in config), None)
    if experts is None:
        return settings
    inner = config["intermediate_size" if kind == "mixtral" else "moe_intermediate_size"]
    settings |= {
        "num_experts": experts,
        "num_experts_per_tok": config["num_experts_per_tok"],
        "base_moe_mlp_dim": inner,
    }
    if kind == "qwen3_moe":
        settings["base_mlp_dim"] = inner
    if kind == "deepseek_v3":
        same = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        settings |= {name: config[name] for name in (*same, "routed_scaling_factor")}
        settings |= {
            "first_num_dense_layers": config["first_k_dense_replace"],
            "shared_experts": config["n_shared_experts"],
            "n_routing_groups": config["n_group"],
            "topk_routing_group": config["topk_group"],
            "max_position_embeddings": 64,
            "original_max_position_embeddings": 64,
            "rope_factor": 1,
        }
    return settings


def shapes_and_logits(kind, config, base_yml, is_scanned):
    """Return the shapes of all parameters, and the logits of random ones."""
    import jax
    import jax.numpy as jnp
    from flax import linen
    from flax.traverse_util import flatten_dict, unflatten_dict
    from jax.sharding import Mesh
    from maxtext.configs import pyconfig
    from maxtext.layers import quantizations
    from maxtext.models import models
    from maxtext.utils import maxtext_utils

    settings = pyconfig.initialize(
        ["make_maxtext", base_yml],
        run_name="tiny",
        enable_checkpointing=False,
        model_name=MODELS[kind],
        override_model_config=True,
        dtype="float32",
        weight_dtype="float32",
        matmul_precision="highest",
        per_device_batch_size=1,
        max_target_length=len(TOKENS),
        scan_layers=is_scanned,
        attention="dot_product",
        skip_jax_distributed_system=True,
        megablox=False,
        sparse_matmul=False,
        enable_nnx=False,
        pure_nnx=False,
        pure_nnx_decoder=False,
        **settings_of(kind, config),
    )
    mesh = Mesh(
        maxtext_utils.create_device_mesh(settings, devices=jax.devices()[:1]), settings.mesh_axes
    )
    model = models.transformer_as_linen(
        config=settings,
        mesh=mesh,
        quant=quantizations.configure_quantization(settings),
        model_mode="train",
    )
    key = jax.random.PRNGKey(0)
    keys = {"params": key, "dropout": key, "aqt": key}
    tokens = jnp.array([TOKENS])
    given = {
        "decoder_positions": jnp.arange(len(TOKENS))[None],
        "decoder_segment_ids": jnp.ones_like(tokens),
        "enable_dropout": False,
    }
    with mesh:
        made = linen.unbox(jax.eval_shape(lambda: model.init(keys, tokens, **given)))
        shapes = {
            f"params.{'.'.join(path)}": value.shape
            for path, value in flatten_dict(made["params"]).items()
        }
        variables = unflatten_dict(
            {tuple(k.split(".")): v for k, v in parameters_of(shapes).items()}
        )
        result, _ = model.apply(variables, tokens, rngs=keys, mutable="intermediates", **given)
    if isinstance(result, tuple):
        result = result[0]
    return shapes, np.asarray(result, np.float64)[0].round(6).tolist()


def main():
    configs, base_yml = sys.argv[1:]
    with zipfile.ZipFile(
        Path(__file__).parent / "maxtext.zip", "w", zipfile.ZIP_DEFLATED
    ) as archive:
        for kind in MODELS:
            config = json.loads((Path(configs) / kind / "config.json").read_text())
            facts = {"config": config}
            for layout, is_scanned in (("jax", True), ("jax-layers", False)):
                shapes, logits = shapes_and_logits(kind, config, base_yml, is_scanned)
                facts[layout] = {"shapes": shapes, "logits": logits}
            archive.writestr(f"{kind}.json", json.dumps(facts))
            print(kind, flush=True)


if __name__ == "__main__":
    main()
