"""The best continuations that a search finds."""

from vllm import LLM
from vllm.sampling_params import BeamSearchParams

llm = LLM(model="org/model", tensor_parallel_size=1, max_model_len=128)
prompts = [{"prompt": "Once upon a time"}, {"prompt_token_ids": [5, 6, 7]}]
for output in llm.beam_search(prompts, BeamSearchParams(beam_width=4, max_tokens=6)):
    assert len(output.sequences) == 4
    print(output.sequences[0].text)
