"""Requests given to the engine one by one while it steps.

flags: --model org/model --max-model-len=256
"""

import argparse

from vllm import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from vllm.utils import FlexibleArgumentParser


def requests():
    return [
        ("Once upon a time", SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1)),
        ("The fox", SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2)),
        ("One day", SamplingParams(n=2, temperature=0.8, top_p=0.95, frequency_penalty=0.1)),
    ]


def process(engine: LLMEngine, waiting):
    request_id, finished = 0, []
    while waiting or engine.has_unfinished_requests():
        if waiting:
            prompt, params = waiting.pop(0)
            engine.add_request(str(request_id), prompt, params)
            request_id += 1
        outputs: list[RequestOutput] = engine.step()
        finished += [output for output in outputs if output.finished]
    return finished


def main(args: argparse.Namespace):
    engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(args))
    finished = process(engine, requests())
    assert sorted(output.request_id for output in finished) == ["0", "1", "2"]
    assert engine.get_num_unfinished_requests() == 0


if __name__ == "__main__":
    parser = FlexibleArgumentParser(description="the engine by hand")
    main(EngineArgs.add_cli_args(parser).parse_args())
