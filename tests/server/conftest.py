"""One demo model and one server for the tests that need no settings of their own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest
from llmserve import LLM, AsyncLLM, _core, _core_testing, demo_model_path
from serving import RunningServer, running_server

ENGINE = {"num_threads": 1, "kv_cache_memory_bytes": 2**23}


@pytest.fixture(scope="package")
def demo() -> Iterator[AsyncLLM]:
    llm = AsyncLLM(demo_model_path(), **ENGINE)
    yield llm
    llm.close()


@pytest.fixture(scope="package")
def offline() -> Iterator[LLM]:
    with LLM(demo_model_path(), **ENGINE) as llm:
        yield llm


@pytest.fixture(scope="package")
def server(demo: AsyncLLM) -> Iterator[RunningServer]:
    with running_server(demo, ["demo", "alias"], max_body_bytes=2**20) as server:
        yield server


MakeOracle = Callable[..., AsyncLLM]


@pytest.fixture
def make_oracle(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeOracle]:
    """Engines with the demo's tokenizer on the token oracle, whose steps take `step_us`."""
    made: list[AsyncLLM] = []

    def make(
        step_us: int = 2000,
        fail_at_step: int = -1,
        num_failures: int = 1,
        fault: str = "memory",
        gate: _core_testing.StepGate | None = None,
        **arguments: object,
    ) -> AsyncLLM:
        def engine(
            loading: _core.LoadingModel, vocabulary: _core.Vocabulary | None = None
        ) -> _core.Engine:
            options = _core_testing.OracleOptions(vocab_size=len(vocabulary or ()), step_us=step_us)
            faults = _core_testing.FaultOptions(
                fail_at_step=fail_at_step, num_failures=num_failures, fault=fault
            )
            return _core_testing.oracle_engine(loading.config, options, vocabulary, faults, gate)

        with monkeypatch.context() as patch:
            patch.setattr(_core, "Engine", engine)
            made.append(AsyncLLM(demo_model_path(), **{**ENGINE, **arguments}))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for llm in made:
        llm.close()


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """The command sends the package's logs to stderr alone, for the rest of its process."""
    names = ("llmserve", "llmserve.async_llm", "uvicorn", "uvicorn.error")
    loggers = [logging.getLogger(name) for name in names]
    before = [(logger.handlers, logger.propagate, logger.level) for logger in loggers]
    yield
    for logger, (handlers, propagates, level) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagates
        logger.setLevel(level)
