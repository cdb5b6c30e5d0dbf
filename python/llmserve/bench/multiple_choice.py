"""Questions with several answers, of which a model prefers the one it finds most likely."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmserve.errors import InvalidArgument, LLMServeError
from llmserve.llm import LLM
from llmserve.prompts import TokensPrompt
from llmserve.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Question:
    """A text, what may follow it, and which of these does."""

    prompt: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True, slots=True)
class ChoiceResult:
    """accuracy is by the sum of a choice's log-probabilities, accuracy_per_byte by that sum over
    its UTF-8 bytes, which favours no short answer. standard_error is that of accuracy."""

    accuracy: float
    accuracy_per_byte: float
    standard_error: float
    num_questions: int
    chosen: tuple[int, ...]


def read_questions(path: Path) -> list[Question]:
    """Of a JSONL file: objects with prompt (or question), choices, and answer, which is the index
    or the text of one of them. Raises InvalidArgument with the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{path}: expected UTF-8 text, got {error}") from error
    questions = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            questions.append(_question(f"{path}, line {number}", line))
    if not questions:
        raise InvalidArgument(f"{path}: expected a question a line, and there is none")
    return questions


def _question(place: str, line: str) -> Question:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise InvalidArgument(f"{place}: {error}") from error
    if not isinstance(fields, dict):
        raise InvalidArgument(f"{place}: expected an object, got {type(fields).__name__}")
    prompt = fields.get("prompt", fields.get("question"))
    choices: Any = fields.get("choices")
    answer: Any = fields.get("answer")
    if not isinstance(prompt, str):
        raise InvalidArgument(f"{place}: expected a text in prompt or question")
    is_list = isinstance(choices, list) and len(choices) > 1
    if not is_list or not all(isinstance(choice, str) and choice for choice in choices):
        raise InvalidArgument(f"{place}: expected two texts or more in choices")
    if isinstance(answer, str) and answer in choices:
        answer = choices.index(answer)
    is_index = isinstance(answer, int) and not isinstance(answer, bool)
    if not is_index or not 0 <= answer < len(choices):
        raise InvalidArgument(
            f"{place}: expected answer to be one of the choices or its index from 0 to "
            f"{len(choices) - 1}, got {answer!r}"
        )
    return Question(prompt, tuple(choices), answer)


def measure_choices(
    llm: LLM,
    questions: Sequence[Question],
    *,
    on_question: Callable[[int], None] = lambda _: None,
) -> ChoiceResult:
    """A choice's tokens are those of prompt and choice together behind what the prompt alone has.
    on_question is called with 1 after each. Raises LLMServeError if a request fails."""
    tokenizer = llm.get_tokenizer()
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    chosen, by_byte = [], []
    for question in questions:
        alone = tokenizer.encode(question.prompt)
        prompts, starts = [], []
        for choice in question.choices:
            ids = tokenizer.encode(question.prompt + choice)
            same = 0
            while same < min(len(alone), len(ids) - 1) and alone[same] == ids[same]:
                same += 1
            prompts.append(TokensPrompt(prompt_token_ids=ids))
            starts.append(max(same, 1))  # the first token has no probability
        sums = []
        for output, start in zip(
            llm.generate(prompts, params, use_tqdm=False), starts, strict=True
        ):
            if output.prompt_logprobs is None:
                raise LLMServeError(output.outputs[0].error or "the model gave no probabilities")
            ids = output.prompt_token_ids or []
            rows = output.prompt_logprobs[start:]
            sums.append(
                sum(row[i].logprob for row, i in zip(rows, ids[start:], strict=True) if row)
            )
        shares = [s / len(c.encode()) for s, c in zip(sums, question.choices, strict=True)]
        chosen.append(max(range(len(sums)), key=sums.__getitem__))
        by_byte.append(max(range(len(shares)), key=shares.__getitem__))
        on_question(1)
    count = len(questions)
    hits = sum(got == q.answer for got, q in zip(chosen, questions, strict=True))
    hits_by_byte = sum(got == q.answer for got, q in zip(by_byte, questions, strict=True))
    accuracy = hits / count
    return ChoiceResult(
        accuracy=accuracy,
        accuracy_per_byte=hits_by_byte / count,
        standard_error=(accuracy * (1 - accuracy) / max(count - 1, 1)) ** 0.5,
        num_questions=count,
        chosen=tuple(chosen),
    )
