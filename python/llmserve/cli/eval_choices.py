"""`llmserve eval choices`: questions with several answers, by log-likelihood."""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from llmserve.bench.multiple_choice import measure_choices, read_questions
from llmserve.cli.eval_text import ProgressBar
from llmserve.cli.model_argument import add_model_argument, model_of
from llmserve.cli.options import add_engine_options, add_short_flags, load_model

_EXAMPLES = """examples:
  llmserve eval choices ./Qwen3-0.6B --questions questions.jsonl
  llmserve eval choices ./Qwen3-0.6B --questions questions.jsonl --quantization int4 --json

A line of the file: {"prompt": "The sky is", "choices": [" blue", " loud"], "answer": 0}. The answer
may also be the text of a choice, and prompt may be called question.
"""


def add_parser(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the evaluation to the parser."""
    parser = kinds.add_parser(
        "choices",
        help="multiple choice, by log-likelihood",
        description="Measures how often the right one of several continuations is the likeliest.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    add_model_argument(parser)
    parser.add_argument("--questions", required=True, metavar="FILE", help="JSONL, as below")
    add_engine_options(parser)
    add_short_flags(parser)
    parser.add_argument("--json", action="store_true", help="everything, as JSON")
    parser.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def run(options: argparse.Namespace) -> int:
    """Runs the evaluation; returns the exit code."""
    questions = read_questions(Path(options.questions))
    with (
        load_model(options, model_of(options)) as llm,
        ProgressBar("choices", len(questions), options.disable_tqdm, "question") as bar,
    ):
        result = measure_choices(llm, questions, on_question=bar.advance)
    if options.json:
        print(json.dumps(dataclasses.asdict(result), indent=2))
        return 0
    share: Any = result.accuracy
    print(f"accuracy           {share:.1%} +- {result.standard_error:.1%}")
    print(f"accuracy per byte  {result.accuracy_per_byte:.1%}")
    print(f"questions          {result.num_questions}")
    return 0
