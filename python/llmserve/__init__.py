"""llmserve: a fast, deterministic LLM serving engine.

>>> from llmserve import LLM, SamplingParams, demo_model_path
>>> llm = LLM(demo_model_path())
>>> outputs = llm.generate("Once upon a time", SamplingParams(max_tokens=16), use_tqdm=False)
>>> len(outputs[0].outputs[0].token_ids)
16
>>> llm.close()
"""

from typing import TYPE_CHECKING, Any

from llmserve import ops, vllm_paths
from llmserve._core import Array, BlockAllocator
from llmserve._version import __version__
from llmserve.beam_search import BeamSearchOutput, BeamSearchSequence
from llmserve.beam_search_params import BeamSearchParams
from llmserve.checkpoint.model_files import demo_model_path
from llmserve.common.refused_names import REFUSED_NAMES, refused_class
from llmserve.errors import (
    CorruptFile,
    DeviceError,
    HubError,
    InternalError,
    InvalidArgument,
    LLMServeError,
    NotSupported,
    PromptTooLong,
    QueueFull,
    ResourceExhausted,
)
from llmserve.llm import LLM
from llmserve.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from llmserve.pooling_outputs import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
)
from llmserve.pooling_params import PoolingParams
from llmserve.prompts import EmbedsPrompt, TextPrompt, TokensPrompt
from llmserve.sampling_params import (
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
)
from llmserve.scheduler import Scheduler
from llmserve.structured_outputs import StructuredOutputsParams
from llmserve.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llmserve.async_llm import AsyncLLM
    from llmserve.async_llm import AsyncLLM as AsyncLLMEngine
    from llmserve.insight.trace import Trace
    from llmserve.llm_engine import LLMEngine
    from llmserve.options.engine_args import AsyncEngineArgs, EngineArgs
    from llmserve.quantization import quantize

__all__ = [
    "LLM",
    "Array",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "BlockAllocator",
    "CompletionOutput",
    "CorruptFile",
    "DeviceError",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EmbedsPrompt",
    "EngineArgs",
    "HubError",
    "InternalError",
    "InvalidArgument",
    "LLMEngine",
    "LLMServeError",
    "Logprob",
    "NotSupported",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptTooLong",
    "QueueFull",
    "RepetitionDetectionParams",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "ResourceExhausted",
    "SamplingParams",
    "Scheduler",
    "StructuredOutputsParams",
    "TextPrompt",
    "Tokenizer",
    "TokensPrompt",
    "Trace",
    "__version__",
    "demo_model_path",
    "ops",
    "quantize",
]


# What takes long to import, or is seldom needed: imported when it is first asked for. asyncio takes
# as long as the rest.
_LATER = {
    "AsyncEngineArgs": "llmserve.options.engine_args",
    "AsyncLLM": "llmserve.async_llm",
    "AsyncLLMEngine": "llmserve.async_llm:AsyncLLM",  # as vLLM calls it, too
    "EngineArgs": "llmserve.options.engine_args",
    "LLMEngine": "llmserve.llm_engine",
    "PromptType": "llmserve.prompts",
    "Trace": "llmserve.insight.trace",
    "quantize": "llmserve.quantization",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name in REFUSED_NAMES:
        return refused_class(name)
    if name in vllm_paths.PATHS:
        return importlib.import_module(f"llmserve.{name}")
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, renamed = _LATER[name].partition(":")
    return getattr(importlib.import_module(module), renamed or name)


vllm_paths.install()
