"""In a Jupyter kernel: no main guard, a running event loop, interrupts that come by signal."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from notebook_kernel import Kernel


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    kernel = Kernel()
    yield kernel
    kernel.stop()


def test_cells_generate_and_close(kernel: Kernel) -> None:
    kernel.run("from llmserve import LLM, SamplingParams, demo_model_path")
    kernel.run("llm = LLM(demo_model_path(), num_threads=1)")
    generate = "llm.generate('Once upon a time', SamplingParams(max_tokens=8, temperature=0))"
    text = kernel.run(f"print(repr({generate}[0].outputs[0].text))")
    assert len(text) > 5
    assert kernel.run(f"print(repr({generate}[0].outputs[0].text))") == text
    kernel.run("llm.close()")


def test_an_interrupted_cell_leaves_the_engine_usable(kernel: Kernel) -> None:
    kernel.run(
        "from llmserve import LLM, SamplingParams, demo_model_path\n"
        "llm = LLM(demo_model_path(), num_threads=1, max_model_len=2048)\n"
        "long = SamplingParams(max_tokens=2000, n=16, ignore_eos=True)"
    )
    kernel.start("print('begun', flush=True)\nllm.generate('The', long, use_tqdm=False)")
    kernel.wait_for_output("begun")
    kernel.manager.interrupt_kernel()
    _, error = kernel.finish()
    assert error == "KeyboardInterrupt"
    assert kernel.run("print(llm.get_metrics().num_requests_running)") == "0\n"
    short = "llm.generate('The', SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)"
    assert kernel.run(f"print(len({short}[0].outputs[0].token_ids))") == "4\n"
    kernel.run("llm.close()")


def test_cells_await_in_the_loop_that_runs_them(kernel: Kernel) -> None:
    kernel.run(
        "import asyncio\n"
        "from llmserve import AsyncLLM, SamplingParams, demo_model_path\n"
        "llm = AsyncLLM(demo_model_path(), num_threads=1, max_model_len=2048)\n"
        "async def tokens(params):\n"
        "    async for output in llm.generate('The', params):\n"
        "        print('begun' if not output.finished else 'done', flush=True)\n"
        "    return len(output.outputs[0].token_ids)\n"
        "short = SamplingParams(max_tokens=4, ignore_eos=True)\n"
        "long = SamplingParams(max_tokens=2000, ignore_eos=True)"
    )
    assert kernel.run("print(await tokens(short))").endswith("done\n4\n")
    kernel.start("await tokens(long)")
    kernel.wait_for_output("begun")
    kernel.manager.interrupt_kernel()
    _, error = kernel.finish()
    assert error in ("KeyboardInterrupt", "CancelledError")
    kernel.run("while llm.get_metrics().num_blocks_used: await asyncio.sleep(0.01)")
    assert kernel.run("print(await tokens(short))").endswith("done\n4\n")
    kernel.run("llm.close()")
