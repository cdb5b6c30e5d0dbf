"""A call into the workers.

absent: collective_rpc
"""

from vllm import LLM

llm = LLM(model="org/model")
llm.collective_rpc("report_device_id", args=())
