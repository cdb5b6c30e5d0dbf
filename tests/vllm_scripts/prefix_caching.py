"""A long prefix that many prompts share, with the cache and without."""

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

PREFIX = "Once upon a time there was a little girl who lived near a forest with her mother. " * 8
PROMPTS = [PREFIX + end for end in ("She saw", "The fox", "One day", "Her name")]


def main():
    params = SamplingParams(temperature=0.0, max_tokens=8)
    plain = LLM(model="org/model", gpu_memory_utilization=0.2, enable_prefix_caching=False)
    without = [output.outputs[0].text for output in plain.generate(PROMPTS, params)]
    del plain
    cleanup_dist_env_and_memory()
    llm = LLM(model="org/model", enable_prefix_caching=True, gpu_memory_utilization=0.2)
    llm.generate(PROMPTS[0], params)
    outputs = llm.generate(PROMPTS, params)
    assert [output.outputs[0].text for output in outputs] == without
    assert min(output.num_cached_tokens for output in outputs) > 0


if __name__ == "__main__":
    main()
