"""A profile of one call."""

import glob
import tempfile
import time

from vllm import LLM, SamplingParams

with tempfile.TemporaryDirectory() as folder:
    llm = LLM(
        model="org/model",
        tensor_parallel_size=1,
        profiler_config={"profiler": "torch", "torch_profiler_dir": folder},
    )
    llm.start_profile()
    outputs = llm.generate(["Once upon a time", "The fox"], SamplingParams(temperature=0.8))
    llm.stop_profile()
    assert len(outputs) == 2
    time.sleep(0.1)
    assert glob.glob(folder + "/*")
