"""More context than the model was trained for, by fields of its config."""

from vllm import LLM, SamplingParams


def main():
    factor, original = 2.0, 2048
    overrides = {
        "rope_parameters": {
            "rope_theta": 10000.0,
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
        },
        "max_position_embeddings": int(factor * original),
    }
    llm = LLM(model="org/model", hf_overrides=overrides)
    assert llm.llm_engine.model_config.max_model_len == int(factor * original)
    conversation = [
        {"role": "system", "content": "You are a helpful assistant"},
        {"role": "user", "content": "Hello"},
    ]
    outputs = llm.chat(conversation, SamplingParams(max_tokens=8), use_tqdm=False)
    print(outputs[0].outputs[0].text)


if __name__ == "__main__":
    main()
