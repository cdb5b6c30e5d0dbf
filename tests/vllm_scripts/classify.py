"""Classes of a few texts.

absent: classify is not supported
"""

from vllm import LLM

llm = LLM(model="org/model", runner="pooling")
for output in llm.classify(["Hello", "The fox"]):
    print(output.outputs.probs)
