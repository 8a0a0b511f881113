"""Mixtures of experts: the experts of a rank as parts of tensors that have an axis for all experts.

Expert parallel ranks hold different experts under the same names, counted from 0 on each. In a
checkpoint an expert needs the number that it has in the whole model. Describe the experts of one
rank as if there were no others, and let one of these functions number them:

    experts = [expert.sharded_state_dict("experts.") for expert in self.local_experts]
    state["experts"] = sequential_experts(experts, ep_rank, ep_size, expert_dp_rank=expert_dp_rank)

All of these functions store the same: tensors with one axis in front of an expert's own, which has
an index for each expert of the model. So the number of expert parallel ranks can change, and so can
the way in which the model holds its experts.
"""

from distckpt._base.public import set_public_home
from distckpt._models.experts import (
    grouped_experts,
    grouped_mlp_sharded_state_dict,
    sequential_experts,
)

__all__ = [
    "grouped_experts",
    "grouped_mlp_sharded_state_dict",
    "sequential_experts",
]

set_public_home(globals())
