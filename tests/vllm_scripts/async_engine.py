"""The async engine: many requests at once, one of which is taken back, and an embedding."""

import asyncio

from vllm import AsyncEngineArgs, AsyncLLMEngine, SamplingParams
from vllm.pooling_params import PoolingParams
from vllm.utils import random_uuid


async def main():
    args = AsyncEngineArgs(model="org/model", max_model_len=512, disable_log_stats=True)
    engine = AsyncLLMEngine.from_engine_args(args)
    params = SamplingParams(max_tokens=5, ignore_eos=True)

    async def answer(prompt):
        last = None
        async for output in engine.generate(prompt, params, random_uuid()):
            last = output
        return last

    outputs = await asyncio.gather(*map(answer, ["The fox", "One day", "A girl"]))
    assert all(len(output.outputs[0].token_ids) == 5 for output in outputs)
    await engine.abort(random_uuid())
    async for output in engine.encode("The fox", PoolingParams(task="embed"), random_uuid()):
        assert output.finished
        assert output.outputs.data is not None
    assert (await engine.get_model_config()).max_model_len == 512
    engine.shutdown()


asyncio.run(main())
