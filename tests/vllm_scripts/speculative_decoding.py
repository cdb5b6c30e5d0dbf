"""Drafts from the prompt."""

from vllm import LLM, SamplingParams

llm = LLM(
    model="org/model",
    speculative_config={
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 4,
    },
)
llm.generate(["The fox"], SamplingParams(temperature=0))
