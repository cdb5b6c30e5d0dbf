"""A conversation, by one call and by many, with a template from a file.

flags: --model org/model --max-model-len 512
"""

import os
import tempfile

from vllm import LLM, EngineArgs, SamplingParams
from vllm.utils import FlexibleArgumentParser

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def main(args):
    llm = LLM(**vars(EngineArgs.from_cli_args(args)))
    params = SamplingParams(max_tokens=6, temperature=0.5)
    conversation = [
        {"role": "system", "content": "You tell stories."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello. What about?"},
        {"role": "user", "content": "About a fox."},
    ]
    outputs = llm.chat(conversation, params, use_tqdm=False)
    assert outputs[0].prompt
    assert len(llm.chat([conversation for _ in range(4)], params, use_tqdm=True)) == 4
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "template.jinja")
        with open(path, "w") as file:
            file.write(TEMPLATE)
        with open(path) as file:
            chat_template = file.read()
    outputs = llm.chat(conversation, params, False, None, chat_template)
    assert outputs[0].prompt.endswith("assistant:")


if __name__ == "__main__":
    parser = FlexibleArgumentParser(description="talks")
    main(EngineArgs.add_cli_args(parser).parse_args())
