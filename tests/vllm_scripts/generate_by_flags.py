"""Everything about the engine from the command line.

flags: --model org/model --max-model-len 512 --max_num_seqs 8 --max-tokens 6 --top-k 5
"""

from vllm import LLM, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser


def parse():
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(model="somebody/another-model")
    group = parser.add_argument_group("Sampling")
    group.add_argument("--max-tokens", type=int)
    group.add_argument("--temperature", type=float)
    group.add_argument("--top-p", type=float)
    group.add_argument("--top-k", type=int)
    return vars(parser.parse_args())


def main(args):
    wanted = {name: args.pop(name) for name in ("max_tokens", "temperature", "top_p", "top_k")}
    llm = LLM(**args)
    params = llm.get_default_sampling_params()
    for name, value in wanted.items():
        if value is not None:
            setattr(params, name, value)
    outputs = llm.generate(["The fox", "Once upon a time"], params)
    assert all(len(output.outputs[0].token_ids) <= 6 for output in outputs)
    assert llm.get_default_sampling_params().top_k != 5


if __name__ == "__main__":
    main(parse())
