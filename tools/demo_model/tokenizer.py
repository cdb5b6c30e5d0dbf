"""Train the byte-level BPE that the demo model and its draft share."""

import itertools
import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from . import words
from .conversation import END_OF_TEXT, TURN_END, TURN_START
from .corpus import documents

VOCAB_SIZE = 2048
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
# One token each, so that a tool call costs two tokens less; kept in the text when decoding.
TOOL_TOKENS = ("<tool_call>", "</tool_call>")
NUM_DOCUMENTS = 6000
SEED = 11

# The split of Qwen 2: words keep their leading space, every digit stands alone, which is what
# makes sums learnable.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def train_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """Train on a sample of the corpus and return the tokenizer as transformers knows it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[
            AddedToken(token, normalized=False) for token in SPECIAL_TOKENS + TOOL_TOKENS
        ],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(itertools.islice(documents(SEED), NUM_DOCUMENTS), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=_keep_tool_tokens(tokenizer),
        bos_token=END_OF_TEXT,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE.read_text(encoding="utf-8").rstrip("\n")
    return fast


def _keep_tool_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """Return `tokenizer` with the tool tokens as plain ones, which decoding does not skip.

    The trainer marks every token that it is given as special.
    """
    state = json.loads(tokenizer.to_str())
    for token in state["added_tokens"]:
        token["special"] = token["content"] not in TOOL_TOKENS
    return Tokenizer.from_str(json.dumps(state))


def name_tokens(tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """Return [V] bool: which tokens are a whole name of a story, with the space before it."""
    is_name = torch.zeros(len(tokenizer), dtype=torch.bool)
    for name in words.STORY_NAMES:
        ids = tokenizer(" " + name)["input_ids"]
        is_name[ids[0]] = len(ids) == 1
    return is_name
