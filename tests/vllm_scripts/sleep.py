"""Memory given back and taken again."""

from vllm import LLM, SamplingParams

llm = LLM(model="org/model", enable_sleep_mode=True)
params = SamplingParams(temperature=0, max_tokens=10)
before = llm.generate("How are you?", params)
llm.sleep(level=1)
llm.wake_up(tags=["weights"])
llm.wake_up(tags=["kv_cache"])
assert llm.generate("How are you?", params)[0].outputs[0].text == before[0].outputs[0].text
