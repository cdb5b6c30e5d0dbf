"""Text to token ids and back: a thin wrapper of the tokenizers library."""

import json
import os
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmserve import _core
from llmserve.chat.chat_template import ChatRequest, ChatTemplates, chat_request
from llmserve.chat.tool_schema import Tool
from llmserve.checkpoint.model_files import is_gguf
from llmserve.common.arguments import refuse_unless_default
from llmserve.errors import InvalidArgument
from llmserve.tokenization.file_bounds import check_loaded
from llmserve.tokenization.library_calls import library_call
from llmserve.tokenization.long_texts import PIECE_CHARACTERS, TextCutter
from llmserve.tokenization.slow_patterns import check_patterns
from llmserve.tokenization.tokenizer_files import find_tokenizer, read_tokenizer
from llmserve.tokenization.transformers_names import TokenizedText, TransformersNames
from llmserve.tokenization.vocabulary import read_vocabulary

if TYPE_CHECKING:
    import tokenizers

# The library's `encode` takes less time for a short text, and holds the GIL: a longer one would
# stop every other thread, a microsecond a character.
_MAX_HELD_CHARACTERS = 4096

# Of transformers' apply_chat_template, what is no variable of a template: what may be said of it.
_TEMPLATE_OPTIONS: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(("padding", "truncation", "return_dict"), (False, None)),
    **dict.fromkeys(("return_assistant_tokens_mask", "return_assistant_mask"), (False, None)),
    **dict.fromkeys(("max_length", "return_tensors", "tokenizer_kwargs"), (None,)),
}


class Tokenizer(TransformersNames):
    """The tokenizer of a checkpoint directory.

    >>> from llmserve import demo_model_path
    >>> tokenizer = Tokenizer.from_directory(demo_model_path())
    >>> tokenizer.decode(tokenizer.encode("Once upon a time"))
    'Once upon a time'
    """

    def __init__(
        self,
        tokenizer: "tokenizers.Tokenizer",
        vocabulary: _core.Vocabulary,
        chat_templates: ChatTemplates,
        path: Path,
    ) -> None:
        super().__init__(tokenizer, chat_templates.special_tokens)
        self._vocabulary = vocabulary
        self._chat_templates = chat_templates
        self._path = path
        # Of chat templates, where a request says nothing else: LLM sets them.
        self.default_template_variables: Mapping[str, object] = {}

    def __await__(self) -> Generator[None, None, "Tokenizer"]:
        """Itself: vLLM's AsyncLLM gives its tokenizer by a coroutine, which scripts await."""
        return self
        yield

    @classmethod
    def from_path(
        cls, path: Path, chat_template: object = None, gguf: _core.GgufFile | None = None
    ) -> "Tokenizer | None":
        """That of a folder, of a GGUF file, or of a file by itself: tokenizer.json, sentencepiece's
        tokenizer.model, a tiktoken file. None for a folder or GGUF file without one.
        `chat_template`, a template or its path, stands in for those that come with it. `gguf` is
        a GGUF file that is open already. Raises CorruptFile, NotSupported and InvalidArgument."""
        if is_gguf(path):
            return cls._from_gguf(path, chat_template, gguf)
        return (
            cls.from_directory(path, chat_template)
            if path.is_dir()
            else cls._from_file(path, chat_template)
        )

    @classmethod
    def from_directory(cls, directory: Path, chat_template: object = None) -> "Tokenizer | None":
        """As `from_path`, of a folder."""
        path = find_tokenizer(directory)
        return None if path is None else cls._from_file(path, chat_template)

    @classmethod
    def _from_file(cls, path: Path, chat_template: object) -> "Tokenizer":
        tokenizer = read_tokenizer(path)
        templates = ChatTemplates.from_directory(path.parent, chat_template)
        return cls._from_library(tokenizer, path, templates)

    @classmethod
    def _from_gguf(
        cls, path: Path, chat_template: object, gguf: _core.GgufFile | None
    ) -> "Tokenizer | None":
        from llmserve.tokenization.gguf_tokenizer import GgufVocabulary, gguf_tokenizer

        vocabulary = GgufVocabulary(path, gguf)
        if not vocabulary.exists:
            return None
        tokenizer = gguf_tokenizer(vocabulary)
        templates = ChatTemplates.from_named(
            vocabulary.chat_templates,
            vocabulary.special_tokens(),
            f"the chat template of {vocabulary.path}",
            chat_template,
        )
        return cls._from_library(tokenizer, vocabulary.path, templates)

    @classmethod
    def _from_library(
        cls, tokenizer: "tokenizers.Tokenizer", path: Path, chat_templates: ChatTemplates
    ) -> "Tokenizer":
        # As transformers does: what the file says about batches of a training run is not wanted.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        check_loaded(tokenizer, path)
        check_patterns(tokenizer, path)
        return cls(tokenizer, read_vocabulary(tokenizer, path), chat_templates, path)

    @property
    def kind(self) -> str:
        """What it is made of: 'BPE, decoder ByteLevel'."""
        parsed = json.loads(library_call(self._path, "be shown", self._tokenizer.to_str))
        return f"{_kind(parsed.get('model'))}, decoder {_kind(parsed.get('decoder'))}"

    @property
    def num_tokens(self) -> int:
        """One more than the largest token id."""
        return len(self._vocabulary)

    def __len__(self) -> int:
        return self.num_tokens

    @property
    def special_token_ids(self) -> list[int]:
        """Ids that decode() leaves out, increasing."""
        return self._vocabulary.special_token_ids

    def is_special(self, token_id: int) -> bool:
        """Whether decode() leaves a token out; False for an id outside the vocabulary."""
        return 0 <= token_id < self.num_tokens and self._vocabulary.is_special(token_id)

    @property
    def all_special_ids(self) -> list[int]:
        """`special_token_ids`, as transformers calls them."""
        return self.special_token_ids

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> TokenizedText:
        """As `encode` or `encode_batch`, in the form that transformers gives.

        >>> from llmserve import demo_model_path
        >>> len(Tokenizer.from_directory(demo_model_path())("Once upon a time").input_ids)
        4
        """
        if isinstance(text, str):
            return TokenizedText(self.encode(text, add_special_tokens))
        return TokenizedText(self.encode_batch(text, add_special_tokens))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text, with what the model wants at its ends (usually a
        begin-of-sequence id) unless told otherwise. Raises InvalidArgument for lone surrogates,
        and NotSupported where the tokenizer's file does not let the library encode it."""
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[list[int]]:
        """As `encode`, for several texts at once."""
        for text in texts:
            _check_unicode(text)
        if any(len(text) > PIECE_CHARACTERS for text in texts):
            return [self._encode_long(text, add_special_tokens) for text in texts]
        if len(texts) == 1 and len(texts[0]) <= _MAX_HELD_CHARACTERS:
            return [self._encode_call(self._tokenizer.encode, texts[0], add_special_tokens).ids]
        encodings = self._encode_call(
            self._tokenizer.encode_batch_fast, list(texts), add_special_tokens
        )
        return [encoding.ids for encoding in encodings]

    def _encode_long(self, text: str, add_special_tokens: bool) -> list[int]:
        """In pieces, where it can be cut: the library takes hundreds of bytes for a character."""
        pieces = self._cutter.pieces(text)
        ends = self._ends if add_special_tokens and len(pieces) > 1 else ([], [])
        if ends is None:
            pieces, ends = [text], ([], [])
        token_ids = list(ends[0])
        for piece in pieces:
            adds = add_special_tokens and len(pieces) == 1
            (encoding,) = self._encode_call(self._tokenizer.encode_batch_fast, [piece], adds)
            token_ids += encoding.ids
        return [*token_ids, *ends[1]] if ends[1] else token_ids

    @cached_property
    def _cutter(self) -> TextCutter:
        return TextCutter(self._tokenizer)

    @cached_property
    def _ends(self) -> tuple[list[int], list[int]] | None:
        """What the model wants before a text and behind it; None where that is not so simple."""
        with_ends, bare = self._encode_ends("a", True), self._encode_ends("a", False)
        for begin in range(len(with_ends) - len(bare) + 1):
            if with_ends[begin : begin + len(bare)] == bare:
                return with_ends[:begin], with_ends[begin + len(bare) :]
        return None

    def _encode_ends(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._encode_call(self._tokenizer.encode, text, add_special_tokens).ids
        return ids

    def _encode_call(self, encode: Any, text: object, add_special_tokens: bool) -> Any:
        return library_call(
            self._path, "encode a text", encode, text, add_special_tokens=add_special_tokens
        )

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids, or of one, as the tokenizers library gives it."""
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        for token_id in ids:
            self._check_id(token_id)
        return library_call(
            self._path,
            "decode tokens",
            self._tokenizer.decode,
            ids,
            skip_special_tokens=skip_special_tokens,
        )

    def batch_decode(
        self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = True
    ) -> list[str]:
        """As `decode`, for several sequences."""
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    @property
    def chat_template_source(self) -> str:
        """The text of all chat templates, empty if there are none."""
        return self._chat_templates.source

    @property
    def chat_template_names(self) -> list[str]:
        """The model's chat templates: none, "default" alone, or several."""
        return self._chat_templates.names

    def apply_chat_template(
        self,
        messages: object,
        tools: Sequence[Tool] | None = None,
        documents: Sequence[Mapping[str, object]] | None = None,
        chat_template: str | os.PathLike[str] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **chat_template_kwargs: object,
    ) -> str | list[int] | list[str] | list[list[int]]:
        """The prompt of a conversation as token ids, or as text for tokenize=False, or a list of
        them for a list of conversations. Arguments as transformers has them; see LLM.chat.

        >>> from llmserve import demo_model_path
        >>> tokenizer = Tokenizer.from_directory(demo_model_path())
        >>> tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False)
        '<|im_start|>user\\nHello<|im_end|>\\n'
        """
        for name in _TEMPLATE_OPTIONS.keys() & chat_template_kwargs:
            refuse_unless_default(
                "apply_chat_template",
                name,
                chat_template_kwargs.pop(name),
                *_TEMPLATE_OPTIONS[name],
                reason="it gives a text or ids",
            )
        if documents is not None:
            chat_template_kwargs["documents"] = documents
        request = chat_request(
            add_generation_prompt, continue_final_message, tools, chat_template_kwargs
        )
        texts, is_batch = self.render_chat(messages, chat_template, request)
        results = self.encode_chat(texts) if tokenize else texts
        return results if is_batch else results[0]

    def render_chat(
        self, messages: object, chat_template: object, request: ChatRequest
    ) -> tuple[list[str], bool]:
        """The prompt of every conversation as text, and whether `messages` is a list of them."""
        if self.default_template_variables:
            variables = {**self.default_template_variables, **request.variables}
            request = replace(request, variables=variables)
        return self._chat_templates.render(messages, chat_template, request)

    def encode_chat(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of what render_chat gave: the template itself has written what `encode` adds."""
        return self.encode_batch(texts, add_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for; none for an id that only pads the model's vocabulary."""
        return self._vocabulary.bytes(token_id) if 0 <= token_id < self.num_tokens else b""

    def token_text(self, token_id: int) -> str:
        """The text of one token alone; bytes that are not a whole character are shown as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def token_id(self, token: str) -> int | None:
        """The id of a token by its name in the vocabulary, None if there is none."""
        return self._tokenizer.token_to_id(token)

    def check_fits(self, vocab_size: int) -> list[str]:
        """The added tokens beyond the model's vocabulary, which no prompt may have: fine-tunes add
        a padding token and no row for it. Raises InvalidArgument if others lie there."""
        if self.num_tokens <= vocab_size:
            return []
        largest = max(self._tokenizer.get_vocab(with_added_tokens=False).values(), default=0)
        if largest >= vocab_size:
            raise InvalidArgument(
                f"{self._path}: does not fit the model: its largest token id is {largest}, but "
                f"config.json says vocab_size={vocab_size}; use the tokenizer that the model was "
                f"trained with"
            )
        added = sorted(self._tokenizer.get_added_tokens_decoder().items())
        return [token.content for token_id, token in added if token_id >= vocab_size]

    def to_core(self) -> _core.Vocabulary:
        """The engine's decoder table."""
        return self._vocabulary

    def __repr__(self) -> str:
        return f"Tokenizer({json.dumps(str(self._path))}, num_tokens={self.num_tokens})"

    def _check_id(self, token_id: int) -> None:
        if not 0 <= token_id < self.num_tokens:
            raise InvalidArgument(
                f"token id {token_id} is outside the vocabulary (0 to {self.num_tokens - 1})"
            )


def _kind(element: object) -> str:
    kind = element.get("type") if isinstance(element, dict) else None
    if isinstance(element, dict) and kind == "Sequence":
        return " + ".join(map(_kind, element.get("decoders") or ()))
    return kind if isinstance(kind, str) else "none"


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            f"the text has a lone surrogate at character {error.start}, which is not Unicode; "
            f"clean it with text.encode('utf-8', 'replace').decode()"
        ) from error
