"""How fast one request is, alone: for tables that set models side by side."""

import random
import statistics
from dataclasses import dataclass

from llmserve.llm import LLM
from llmserve.prompts import TokensPrompt
from llmserve.sampling_params import SamplingParams

_PROMPT = 256
_DECODE = 32
_REPEATS = 5


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens a second of a prompt of 256, and of the tokens that follow it one by one: medians of
    five."""

    prefill_per_s: float
    decode_per_s: float


def measure_speed(llm: LLM) -> Speed:
    """Prompts are random, so that no prefix is cached; shorter where the model's context is."""
    draw = random.Random(0)
    vocab_size = llm.get_tokenizer().num_tokens
    length = max(2, min(_PROMPT, llm.max_model_len - _DECODE - 1))
    count = max(2, min(_DECODE, llm.max_model_len - length))

    def times(num_tokens: int) -> tuple[float, float]:
        """Seconds of the prompt, and of the tokens behind the first."""
        ids = [draw.randrange(vocab_size) for _ in range(length)]
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        (output,) = llm.generate([TokensPrompt(prompt_token_ids=ids)], params, use_tqdm=False)
        taken = output.metrics
        return taken.first_token_ts - taken.scheduled_ts, taken.last_token_ts - taken.first_token_ts

    times(2)  # pages, and weights that are packed at their first use
    runs = [times(count) for _ in range(_REPEATS)]
    prompt = statistics.median(seconds for seconds, _ in runs)
    decode = statistics.median(seconds for _, seconds in runs)
    return Speed(length / prompt, (count - 1) / decode)
