"""Text in which calls may stand, whose arguments match a schema."""

import json

from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

TAG = {
    "type": "structural_tag",
    "structures": [
        {
            "begin": "<function=weather>",
            "schema": {"type": "object", "properties": {"days": {"type": "integer"}}},
            "end": "</function>",
        }
    ],
    "triggers": ["<function="],
}

llm = LLM(model="org/model", max_model_len=200)
params = SamplingParams(
    max_tokens=12, structured_outputs=StructuredOutputsParams(structural_tag=json.dumps(TAG))
)
assert llm.generate("The weather", params)[0].outputs[0].text
