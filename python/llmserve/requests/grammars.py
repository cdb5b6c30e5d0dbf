"""Compiles the grammars of one engine's requests."""

import importlib.util
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from llmserve import _core
from llmserve.errors import NotSupported, QueueFull, ResourceExhausted
from llmserve.structured_outputs import StructuredOutputsParams


class Grammars:
    """One engine's. `compile` may be called from any thread, and takes long: not in an event loop.

    Without a grammar it costs nothing: the vocabulary is laid out for the first one.
    """

    def __init__(
        self,
        vocabulary: _core.Vocabulary,
        vocab_size: int,
        end_token_ids: Sequence[int],
        limits: _core.GrammarLimits | None = None,
    ) -> None:
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._end_token_ids = list(end_token_ids)
        self._limits = limits or _core.GrammarLimits()
        self._compiler: _core.GrammarCompiler | None = None

    @cached_property
    def _special_token_ids(self) -> dict[str, int]:
        """By how they are written."""
        vocabulary = self._vocabulary
        written = {
            vocabulary.bytes(token_id): token_id for token_id in vocabulary.special_token_ids
        }
        return {name.decode(errors="replace"): token_id for name, token_id in written.items()}

    def compile(self, params: StructuredOutputsParams) -> _core.TokenGrammar:
        """The grammar, from the cache if it was compiled before. Raises InvalidArgument for one
        that is none, too large or too slow to compile, QueueFull where others keep the
        compiler busy, and NotSupported without llguidance."""
        if self._compiler is None:
            self._compiler = _core.GrammarCompiler(
                _library_path(),
                self._vocabulary,
                self._vocab_size,
                self._end_token_ids,
                self._limits,
            )
        source = params.source(self._special_token_ids)
        field = f"structured_outputs: {source.field}"
        try:
            return self._compiler.compile(field, source.kind, source.text)
        except ResourceExhausted as error:
            raise QueueFull(str(error)) from None


def _library_path() -> str:
    """The library of the installed wheel, which is loaded without importing it."""
    spec = importlib.util.find_spec("llguidance")
    for folder in (spec and spec.submodule_search_locations) or ():
        for path in sorted(Path(folder).glob("_lib*.so")):
            return str(path)
    raise NotSupported("structured_outputs needs llguidance; pip install 'llmserve[structured]'")
