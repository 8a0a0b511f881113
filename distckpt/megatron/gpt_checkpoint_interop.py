"""Megatron's renaming of state dicts of hybrid models, so that they load checkpoints of GPT
models.
"""

from distckpt._megatron.forwarding import forward

__getattr__ = forward(
    "gpt_checkpoint_interop", "GPTCompatLayerMaps", "gpt_compatible_layer_maps",
    "retarget_fsdp_state_dict_to_gpt_checkpoint", "retarget_sharded_state_dict_to_gpt_checkpoint",
)  # fmt: skip
