"""How well texts go together.

absent: score is not supported
"""

from vllm import LLM

llm = LLM(model="org/model", runner="pooling")
for output in llm.score("What is a fox?", ["An animal.", "A city."]):
    print(output.outputs.score)
