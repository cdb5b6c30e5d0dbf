"""A few prompts, sampled."""

from vllm import LLM, SamplingParams

PROMPTS = ["Once upon a time", "The fox", "A little girl named", "One day"]


def main():
    params = SamplingParams(temperature=0.8, top_p=0.95)
    llm = LLM(model="org/model")
    for output in llm.generate(PROMPTS, params):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
    assert llm.generate([], params) == []


if __name__ == "__main__":
    main()
