"""Checkpoints of `torch.distributed.checkpoint`, also of Megatron Core (`torch_dist`).

`distckpt.load` and `distckpt.consolidate` read such directories as they are, whatever number of
ranks wrote them:

    state = distckpt.load({"model": model.sharded_state_dict()}, "megatron/iter_0001000")
    distckpt.consolidate("fsdp/step_1000", "exported")

Nothing in their pickles is ever run: see `docs/migrating-from-megatron.md`. `distckpt.reshard`
makes distckpt checkpoints of them, which have checksums and open faster; `export` is the way back.
"""

from distckpt._base.public import set_public_home
from distckpt.torch_dist._export import export
from distckpt.torch_dist._fsdp_dtensor import convert_fsdp_dtensor

__all__ = ["convert_fsdp_dtensor", "export"]

set_public_home(globals())
