"""Hidden states of every token, and a shortened vector."""

from vllm import LLM, PoolingParams
from vllm.inputs import TokensPrompt
from vllm.outputs import EmbeddingRequestOutput, PoolingRequestOutput

llm = LLM(model="org/model", runner="pooling", max_model_len=256)
(output,) = llm.encode(TokensPrompt(prompt_token_ids=[5, 6, 7]), pooling_task="token_embed")
assert isinstance(output, PoolingRequestOutput)
assert output.outputs.data.shape[0] == 3
outputs = llm.embed(["Hello"], pooling_params=PoolingParams(dimensions=32))
assert isinstance(outputs[0], EmbeddingRequestOutput)
assert len(outputs[0].outputs.embedding) == 32
