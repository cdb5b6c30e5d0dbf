"""What fits and how fast it can be, worked out before anything is loaded or bought.

`LLM.plan` is the exact plan of one model on this machine; here are the calculators: a model as a
shape (`ModelShape`), memory as a number, and the bounds that bandwidth, arithmetic and price set.
Sizes are bytes, rates are a second. The KV arithmetic is the engine's own.

>>> from llmserve.plan import ModelShape
>>> llama_3_70b = ModelShape.of(num_layers=80, num_kv_heads=8, head_dim=128)
>>> llama_3_70b.kv_bytes(1), llama_3_70b.kv_bytes(128 * 1024)
(327680, 42949672960)
"""

from llmserve.plan.bounds import (
    batch_for_rate,
    cost_per_million_tokens,
    crossover_ops_per_byte,
    decode_ops_per_byte,
    decode_tokens_per_s,
    hand_over_share,
    prefill_tokens_per_s,
    roofline_flops,
    transfer_s,
)
from llmserve.plan.capacity import Capacity, ModelShape, plan_capacity
from llmserve.plan.experts import (
    active_experts,
    expert_capacity,
    load_balance,
    replicas_needed,
)
from llmserve.plan.kv_rows import KvRow
from llmserve.plan.memory_plan import MemoryPlan, SpeedRow, WeightGroup
from llmserve.plan.plots import plot_roofline, plot_users

__all__ = [
    "Capacity",
    "KvRow",
    "MemoryPlan",
    "ModelShape",
    "SpeedRow",
    "WeightGroup",
    "active_experts",
    "batch_for_rate",
    "cost_per_million_tokens",
    "crossover_ops_per_byte",
    "decode_ops_per_byte",
    "decode_tokens_per_s",
    "expert_capacity",
    "hand_over_share",
    "load_balance",
    "plan_capacity",
    "plot_roofline",
    "plot_users",
    "prefill_tokens_per_s",
    "replicas_needed",
    "roofline_flops",
    "transfer_s",
]
