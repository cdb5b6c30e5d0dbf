"""What scripts for vLLM read of an engine: named metrics, and a profile in a file."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from llmserve import LLM, AsyncLLM, InvalidArgument
from llmserve.v1.metrics.reader import Counter, Gauge, Histogram
from offline import GREEDY, generate


def test_metrics_are_fields_and_named_objects(checkpoint: Path) -> None:
    with LLM(checkpoint, kv_cache_memory_bytes=2**22) as llm:
        generate(llm, [[5, 6, 7], [8]])
        metrics = llm.get_metrics()
        named = {metric.name: metric for metric in metrics}
        assert metrics.num_generation_tokens == 16
        with pytest.raises(AttributeError, match="num_nonsense"):
            metrics.num_nonsense  # noqa: B018
        assert "num_generation_tokens" in dir(metrics)
    # What its path ends with: where it lies is told nowhere.
    assert all(metric.labels["model_name"] == checkpoint.name for metric in metrics)
    assert isinstance(named["vllm:generation_tokens"], Counter)
    assert (named["vllm:prompt_tokens"].value, named["vllm:generation_tokens"].value) == (4, 16)
    assert isinstance(named["vllm:num_requests_running"], Gauge)
    finished = [m for m in metrics if m.name == "vllm:request_success" and m.value]
    assert [(m.labels["finished_reason"], m.value) for m in finished] == [("length", 2)]
    first = named["vllm:time_to_first_token_seconds"]
    assert isinstance(first, Histogram)
    assert first.count == first.buckets["+Inf"] == 2
    assert first.sum > 0


def steps_of(folder: Path) -> int:
    (path,) = folder.glob("*.json")
    events = json.loads(path.read_text())["traceEvents"]
    return sum(event.get("name") in ("Prefill", "Decode") for event in events)


def test_a_profile_is_the_trace_between_start_and_stop(checkpoint: Path, tmp_path: Path) -> None:
    config = {"profiler": "torch", "torch_profiler_dir": str(tmp_path / "new")}
    with LLM(checkpoint, kv_cache_memory_bytes=2**22, profiler_config=config) as llm:
        generate(llm, [[5]] * 2)
        llm.start_profile()
        generate(llm, [[5]])
        llm.stop_profile()
        assert len(llm.trace()) > 8
        with pytest.raises(InvalidArgument, match="stop_profile: no profile was started"):
            llm.stop_profile()
    assert 0 < steps_of(tmp_path / "new") < 2 * 8 + 2


def test_a_profile_needs_a_folder(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_TORCH_PROFILER_DIR", raising=False)
    with (
        LLM(checkpoint, kv_cache_memory_bytes=2**22) as llm,
        pytest.raises(InvalidArgument, match=r"profiler_config=\{'torch_profiler_dir': ...\}"),
    ):
        llm.start_profile()
    with pytest.raises(InvalidArgument, match="profiler_config has no argument 'folder'"):
        LLM(checkpoint, profiler_config={"folder": "x"})


def test_the_environments_folder_serves_an_async_llm(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_TORCH_PROFILER_DIR", str(tmp_path))

    async def main() -> None:
        async with AsyncLLM(checkpoint, kv_cache_memory_bytes=2**22) as llm:
            await llm.start_profile()
            async for _ in llm.generate([5], GREEDY):
                pass
            await llm.stop_profile()
            await llm.check_health()
            assert llm.is_running
            assert not llm.is_stopped
            assert await llm.get_tokenizer() is llm.get_tokenizer()
            assert (await llm.get_vllm_config()).model_config == await llm.get_model_config()
            assert (await llm.get_model_config()).max_model_len == llm.max_model_len
            first = await llm.embed([5, 6])
            async for output in llm.embed([5, 6]):
                assert output.outputs.embedding == first.outputs.embedding
        assert llm.is_stopped

    asyncio.run(main())
    assert steps_of(tmp_path) > 0
