"""A few hundred prompts, each with parameters of its own."""

from vllm import LLM, SamplingParams

llm = LLM(model="org/model", max_num_seqs=64, max_model_len="1k", dtype="half")
prompts = [f"Once upon a time, {idx} foxes" for idx in range(200)]
params = [SamplingParams(temperature=0.0, max_tokens=1 + idx % 4) for idx in range(200)]
outputs = llm.generate(prompts, params, use_tqdm=False)
assert [output.prompt for output in outputs] == prompts
assert all(len(o.outputs[0].token_ids) <= 1 + i % 4 for i, o in enumerate(outputs))
