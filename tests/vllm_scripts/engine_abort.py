"""The engine of an LLM, and a request that is taken back."""

from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.llm_engine import LLMEngine

llm = LLM("org/model", max_model_len=512)
engine = llm.llm_engine
assert engine.model_config.max_model_len == 512
engine.add_request("long", "The fox", SamplingParams(max_tokens=400, ignore_eos=True))
engine.add_request("short", "The fox", SamplingParams(max_tokens=4, ignore_eos=True))
engine.abort_request(["long"])
last = {}
while engine.has_unfinished_requests():
    last.update({output.request_id: output for output in engine.step()})
assert len(last["short"].outputs[0].token_ids) == 4
other = LLMEngine.from_engine_args(EngineArgs(model="org/model", max_model_len=64))
other.add_request("a", {"prompt_token_ids": [5, 6]}, SamplingParams(max_tokens=2))
while other.has_unfinished_requests():
    for output in other.step():
        print(output)
