"""EngineArgs: every argument of LLM as a field and a flag, both ways."""

from __future__ import annotations

import argparse
import dataclasses

import pytest
from llmserve import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    EngineArgs,
    InvalidArgument,
    NotSupported,
    demo_model_path,
)
from llmserve.options.engine_options import argument_names


def parsed(*words: str, kind: type[EngineArgs] = EngineArgs) -> EngineArgs:
    parser = kind.add_cli_args(argparse.ArgumentParser())
    return kind.from_cli_args(parser.parse_args(words))


def test_without_flags_they_are_the_defaults() -> None:
    assert vars(parsed()) == vars(EngineArgs()) == dataclasses.asdict(EngineArgs())
    assert parsed().model == str(demo_model_path())
    assert set(argument_names()) <= set(vars(EngineArgs()))


def test_flags_are_fields() -> None:
    args = parsed(
        *("--model", "x", "--max-model-len", "1k", "--kv-cache-memory-bytes", "1GiB"),
        *("--no-enable-prefix-caching", "--enforce-eager", "--dtype", "bfloat16", "--seed", "3"),
        *("--tensor-parallel-size", "1", "--gpu-memory-utilization", "0.5"),
    )
    assert (args.model, args.max_model_len, args.kv_cache_memory_bytes) == ("x", 1000, 2**30)
    assert (args.enable_prefix_caching, args.enforce_eager) == (False, True)
    assert (args.dtype, args.seed, args.gpu_memory_utilization) == ("bfloat16", 3, 0.5)


def test_what_is_not_here_is_refused_by_its_name() -> None:
    with pytest.raises(NotSupported, match="EngineArgs: trust_remote_code=True is not supported"):
        parsed("--trust-remote-code")
    with pytest.raises(NotSupported, match="AsyncEngineArgs: enable_lora=True is not supported"):
        parsed("--enable-lora", kind=AsyncEngineArgs)
    with pytest.raises(InvalidArgument, match="has no argument 'max_len'; did you mean 'max_mo"):
        EngineArgs(max_len=3)
    with pytest.raises(NotSupported, match=r"create_engine_config .* LLM.plan\(\*\*vars\(args\)\)"):
        EngineArgs().create_engine_config()


def test_what_changes_nothing_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    args = parsed("--max-model-len", "64", "--tokenizer-mode", "slow")
    assert caplog.records == []
    LLM.from_engine_args(args).close()
    assert [r.message.partition(" changes")[0] for r in caplog.records] == [
        "LLM: tokenizer_mode='slow'"
    ]


def test_an_llm_takes_them() -> None:
    args = EngineArgs(max_num_seqs=4)
    args.max_model_len = 64
    with LLM(**vars(args)) as llm:
        assert (llm.max_model_len, llm.max_num_seqs) == (64, 4)
    with LLM(**dataclasses.asdict(args)) as llm:
        assert llm.max_model_len == 64
    with LLM.from_engine_args(args) as llm:
        assert llm.max_model_len == 64
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(max_model_len=64), start_engine_loop=True)
    assert llm.max_model_len == 64
    llm.shutdown()
    assert llm.errored
    with pytest.raises(InvalidArgument, match="from_engine_args has no argument 'start_loop'"):
        AsyncLLM.from_engine_args(args, start_loop=True)
