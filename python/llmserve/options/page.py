"""docs/engine-options.md, made from the table:

python -m llmserve.options.page > docs/engine-options.md
"""

from collections.abc import Iterator

from llmserve.options.engine_options import ENGINE_OPTIONS


def page() -> str:
    """docs/engine-options.md."""
    return "\n".join(_lines()) + "\n"


_HEAD = """# Options of an engine

Arguments of `LLM`, `AsyncLLM` and `LLM.plan`. Those with a mark are flags of `llmserve serve`, by
the same name with hyphens, and keys of its `--config` file; `llmserve generate`, `chat`, `bench`,
`plan` and `inspect` have those that matter to them. `None` leaves the choice to the engine. vLLM's
arguments of what is not here are in [from-vllm.md](from-vllm.md).

`python -m llmserve.options.page > docs/engine-options.md` makes this page."""


def _lines() -> Iterator[str]:
    yield _HEAD
    for section in dict.fromkeys(option.acts_on for option in ENGINE_OPTIONS):
        yield f"\n## {section}\n"
        yield "| argument | default | `serve` | |"
        yield "| --- | --- | --- | --- |"
        for option in ENGINE_OPTIONS:
            if option.acts_on == section:
                mark = "✓" if "serve" in option.commands.split() else ""
                yield f"| `{option.name}` | `{option.default!r}` | {mark} | {option.description} |"


if __name__ == "__main__":
    print(page(), end="")
