"""Megatron's renaming of hybrid models' state dicts, to load GPT checkpoints."""

from distckpt.megatron._forwarding import forward

__getattr__ = forward(
    "gpt_checkpoint_interop", "GPTCompatLayerMaps", "gpt_compatible_layer_maps",
    "retarget_fsdp_state_dict_to_gpt_checkpoint", "retarget_sharded_state_dict_to_gpt_checkpoint",
)  # fmt: skip
