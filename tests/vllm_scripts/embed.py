"""Embeddings of a few texts.

flags: --model org/model --enforce-eager
"""

from argparse import Namespace

from vllm import LLM, EngineArgs
from vllm.utils import FlexibleArgumentParser


def parse():
    parser = FlexibleArgumentParser()
    parser = EngineArgs.add_cli_args(parser)
    parser.set_defaults(runner="pooling", enforce_eager=True)
    return parser.parse_args()


def main(args: Namespace):
    llm = LLM(**vars(args))
    for output in llm.embed(["Hello", "The fox is quick", "Once upon a time"]):
        vector = output.outputs.embedding
        short = (str(vector[:4])[:-1] + ", ...]") if len(vector) > 4 else vector
        print(short, len(vector))


if __name__ == "__main__":
    main(parse())
