"""Commands by the names that vLLM, Ollama and llama.cpp have for them."""

from collections.abc import Mapping, Sequence

from llmserve.errors import NotSupported

_OURS: Mapping[str, str] = {
    "server": "serve",
    "start": "serve",
    "cli": "chat",
    "complete": "generate",
    "completions": "generate",
    "collect-env": "doctor",
    "ls": "list",
    "models": "list",
    "show": "inspect",
    "info": "inspect",
    "download": "pull",
    "delete": "rm",
    "remove": "rm",
    "embedding": "embed",
    "help": "--help",
    "version": "--version",
}
_NOT_HERE: Mapping[str, str] = {
    "run-batch": "pass all prompts to LLM.generate, or send them side by side to llmserve serve",
    "create": "models are checkpoints: pass a folder, a .gguf file or an id of the Hub",
    "push": "nothing is uploaded",
    "stop": "end the process: a server has its models as long as it lives",
    "launch": "llmserve serve starts a server",
    "convert": "safetensors and GGUF files are read as they are; llmserve quantize writes one anew",
    "perplexity": "llmserve eval perplexity tells it",
    "ps": "llmserve top shows what a server runs, llmserve list which models are on this machine",
    "login": "huggingface-cli login; HF_TOKEN works, too",
}


def ours(words: Sequence[str], known: Sequence[str]) -> list[str]:
    """A command line by our names. known: our commands. `run MODEL` is a chat, and with a prompt
    behind it what goes on from that. Raises NotSupported."""
    if not words or words[0] in known:
        return list(words)
    name, *rest = words
    if name in _NOT_HERE:
        raise NotSupported(f"{name} is not supported: {_NOT_HERE[name]}")
    if name == "run":
        num_words = sum(not word.startswith("-") for word in rest)
        return ["generate" if num_words > 1 else "chat", *rest]
    return [_OURS.get(name, name), *rest]
