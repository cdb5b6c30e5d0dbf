"""An adapter over a model.

absent: enable_lora=True is not supported
"""

from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.lora.request import LoRARequest

args = EngineArgs(model="org/model", enable_lora=True, max_loras=1, max_lora_rank=8)
engine = LLMEngine.from_engine_args(args)
request = LoRARequest("sql", 1, "org/adapter")
engine.add_request("0", "SELECT", SamplingParams(max_tokens=8), lora_request=request)
