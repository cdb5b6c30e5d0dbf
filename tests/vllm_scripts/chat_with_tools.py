"""A call of a tool, and its answer."""

import json
import random
import string

from vllm import LLM
from vllm.sampling_params import SamplingParams

TEMPLATE = (
    "{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content or m.tool_calls }}\n{% endfor %}"
)


def weather(city: str, unit: str) -> str:
    return f"12 degrees {unit} in {city}"


tools = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "the weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "unit": {"type": "string"}},
                "required": ["city", "unit"],
            },
        },
    }
]
llm = LLM(model="org/model", tokenizer_mode="auto", config_format="auto")
params = SamplingParams(max_tokens=16, temperature=0.0)
messages = [{"role": "user", "content": "What is the weather in Rome?"}]
outputs = llm.chat(messages, sampling_params=params, tools=tools, chat_template=TEMPLATE)
assert "weather" in outputs[0].prompt
call_id = "".join(random.choices(string.ascii_letters, k=9))
arguments = {"city": "Rome", "unit": "celsius"}
call = {"name": "weather", "arguments": json.dumps(arguments)}
messages += [
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": call_id, "type": "function", "function": call}],
    },
    {
        "role": "tool",
        "content": weather(**arguments),
        "tool_call_id": call_id,
        "name": "weather",
    },
]
outputs = llm.chat(messages, params, tools=tools, chat_template=TEMPLATE)
assert "12 degrees" in outputs[0].prompt
