"""Prompts longer than a step."""

import torch
from vllm import LLM, SamplingParams

llm = LLM(
    model="org/model",
    enable_chunked_prefill=True,
    max_num_batched_tokens=64,
    max_num_seqs=8,
    max_model_len=-1,
    dtype=torch.bfloat16,
    load_format="safetensors",
)
outputs = llm.generate(["The fox and the girl. " * 40], SamplingParams(max_tokens=4))
assert len(outputs[0].prompt_token_ids) > 64
