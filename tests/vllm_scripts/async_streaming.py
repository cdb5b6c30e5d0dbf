"""Deltas of a text as they come."""

import asyncio

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM


async def stream(engine: AsyncLLM, prompt: str, request_id: str) -> int:
    params = SamplingParams(
        max_tokens=10, temperature=0.8, seed=42, output_kind=RequestOutputKind.DELTA
    )
    num_tokens = 0
    async for output in engine.generate(
        request_id=request_id, prompt=prompt, sampling_params=params
    ):
        for completion in output.outputs:
            num_tokens += len(completion.token_ids)
        if output.finished:
            break
    return num_tokens


async def main():
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model="org/model", enforce_eager=True))
    try:
        for idx, prompt in enumerate(("The fox", "Once upon a time")):
            assert 0 < await stream(engine, prompt, f"stream-{idx}") <= 10
        await engine.check_health()
        assert not engine.errored
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
