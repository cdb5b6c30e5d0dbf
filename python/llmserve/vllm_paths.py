"""The paths of vLLM's modules: `from llmserve.engine.arg_utils import EngineArgs` works.

A script for vLLM imports what it needs from many modules, llmserve has the same things elsewhere.
This table says where; its modules are made when they are imported.
"""

import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

from llmserve.common.refused_names import REFUSED_NAMES

_REFUSED = "llmserve.common.refused_names"
_ENGINE_ARGS = "llmserve.options.engine_args"
_PROCESSORS = "llmserve.requests.processor_classes"
_PARSER = {"FlexibleArgumentParser": "llmserve.common.flexible_parser"}
_ASYNC = {"AsyncLLM": "llmserve.async_llm"}
_PROMPTS = {
    name: "llmserve.prompts"
    for name in ("EmbedsPrompt", "PromptType", "SingletonPrompt", "TextPrompt", "TokensPrompt")
}

# By module, below llmserve: its names, and where they are. A name that is called otherwise there
# follows a colon.
PATHS: Mapping[str, Mapping[str, str]] = {
    "config": {
        **dict.fromkeys(
            (
                *("CompilationConfig", "ModelConfig", "ProfilerConfig"),
                *("StructuredOutputsConfig", "VllmConfig"),
            ),
            "llmserve.model_config",
        ),
        "PoolerConfig": "llmserve.common.pooler_config",
        **dict.fromkeys(("KVTransferConfig", "SpeculativeConfig"), _REFUSED),
    },
    "distributed": {"cleanup_dist_env_and_memory": "llmserve.vllm_utils"},
    "distributed.parallel_state": {
        "cleanup_dist_env_and_memory": "llmserve.vllm_utils",
        "destroy_distributed_environment": "llmserve.vllm_utils:cleanup_dist_env_and_memory",
        "destroy_model_parallel": "llmserve.vllm_utils:cleanup_dist_env_and_memory",
    },
    "engine": {},
    "engine.arg_utils": {"EngineArgs": _ENGINE_ARGS, "AsyncEngineArgs": _ENGINE_ARGS},
    "engine.async_llm_engine": {"AsyncLLMEngine": "llmserve.async_llm:AsyncLLM"},
    "engine.llm_engine": {"LLMEngine": "llmserve.llm_engine"},
    "entrypoints": {},
    "entrypoints.cli": {},
    "entrypoints.openai": {},
    "entrypoints.llm": {"LLM": "llmserve.llm"},
    "inputs": _PROMPTS,
    "inputs.data": _PROMPTS,
    "logger": {"init_logger": "llmserve.vllm_utils"},
    "logprobs": {"Logprob": "llmserve.outputs"},
    "lora": {},
    "lora.request": {"LoRARequest": _REFUSED},
    "tokenizers": {"get_tokenizer": "llmserve.vllm_utils"},
    "transformers_utils": {},
    "transformers_utils.tokenizer": {"get_tokenizer": "llmserve.vllm_utils"},
    "usage": {},
    "usage.usage_lib": {"UsageContext": "llmserve.vllm_utils"},
    "utils": {
        **_PARSER,
        "Counter": "llmserve.vllm_utils",
        "random_uuid": "llmserve.vllm_utils",
    },
    "utils.argparse_utils": _PARSER,
    "v1": {},
    "v1.engine": {},
    "v1.engine.async_llm": _ASYNC,
    "v1.engine.llm_engine": {"LLMEngine": "llmserve.llm_engine"},
    "v1.metrics": {},
    "v1.metrics.reader": {
        name: "llmserve.insight.metric_objects"
        for name in ("Counter", "Gauge", "Histogram", "Metric", "Vector")
    },
    "v1.sample": {},
    "v1.sample.logits_processor": {
        name: _PROCESSORS
        for name in (
            *("AdapterLogitsProcessor", "BatchUpdate", "LogitsProcessor", "MoveDirectionality"),
            "RequestLogitsProcessor",
        )
    },
}

# Modules whose features are not here, and why.
REFUSED: Mapping[str, str] = {
    "assets": "models take text alone",
    "multimodal": "models take text alone",
    "model_executor": REFUSED_NAMES["ModelRegistry"],
    "platforms": "LLM(device='auto') takes a GPU where there is one, and llmserve doctor tells",
    "attention": "attention is C++; llmserve.ops has it as a function",
    "plugins": "there are no plugins",
}


# Modules that people run with `python -m`, and the command that each is; "": the program.
COMMANDS: Mapping[str, Sequence[str]] = {
    "entrypoints.openai.api_server": ("serve",),
    "entrypoints.api_server": ("serve",),
    "entrypoints.cli.main": (),
}
_MAIN = "__main__"


def find(path: str, name: str) -> Any:
    """What a module of the table has under a name. Raises AttributeError."""
    if f"{path}.{name}" in PATHS:
        return importlib.import_module(f"llmserve.{path}.{name}")
    where = PATHS.get(path, {}).get(name)
    if where is None:
        known = ", ".join(PATHS.get(path, {})) or "modules alone"
        raise AttributeError(
            f"llmserve.{path} has no {name!r}; it has {known}, and llmserve itself what is public"
        )
    module, _, renamed = where.partition(":")
    return getattr(importlib.import_module(module), renamed or name)


class VllmPaths:
    """Finds the modules of the table, after all that are files."""

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module of the table, None for others. Raises ModuleNotFoundError that says
        why a module of vLLM's is not here."""
        package, _, path = fullname.partition(".")
        if package != "llmserve":
            return None
        if path in REFUSED:
            raise ModuleNotFoundError(
                f"llmserve has nothing of vllm.{path}: {REFUSED[path]}", name=fullname
            )
        if path.removesuffix("." + _MAIN) in COMMANDS:
            return ModuleSpec(fullname, self, is_package=not path.endswith(_MAIN))  # type: ignore[arg-type]
        if path not in PATHS:
            return None
        return ModuleSpec(fullname, self, is_package=True)  # type: ignore[arg-type]

    def get_code(self, fullname: str) -> CodeType:
        """What `python -m` runs."""
        path = fullname.partition(".")[2].removesuffix("." + _MAIN)
        words = list(COMMANDS[path])
        source = (
            f"import sys\nfrom llmserve.cli import main\nsys.exit(main({words} + sys.argv[1:]))"
        )
        return compile(source, f"<{fullname}>", "exec")

    def create_module(self, _spec: ModuleSpec) -> None:
        """An ordinary module."""

    def exec_module(self, module: ModuleType) -> None:
        """Gives the module its names, each of which is imported when it is asked for."""
        path = module.__name__.partition(".")[2]
        names = PATHS.get(path, {})
        module.__doc__ = f"The names of vllm.{path} that llmserve has."
        module.__dict__["__all__"] = list(names)
        module.__dict__["__getattr__"] = lambda name: find(path, name)
        module.__dict__["__dir__"] = lambda: sorted(names)


def install() -> None:
    """Makes the paths importable, once."""
    if not any(isinstance(finder, VllmPaths) for finder in sys.meta_path):
        sys.meta_path.append(VllmPaths())
