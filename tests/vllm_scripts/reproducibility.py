"""The same seed gives the same text; so does the same engine's seed."""

import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm import LLM, SamplingParams

PROMPTS = ["Once upon a time", "The fox"]


def texts(**arguments):
    llm = LLM(model="org/model", seed=42, **arguments)
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.8, top_p=0.95))
    return [output.outputs[0].text for output in outputs]


assert texts() == texts(max_num_seqs=1)
