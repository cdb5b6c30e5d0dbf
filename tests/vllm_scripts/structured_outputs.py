"""Texts that match a choice, a regular expression, a schema and a grammar."""

import json
from enum import Enum

from pydantic import BaseModel
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

GRAMMAR = """
root ::= select_statement

select_statement ::= "SELECT " column " from " table " where " condition

column ::= "col_1 " | "col_2 "

table ::= "table_1 " | "table_2 "

condition ::= column "= " number

number ::= "1 " | "2 "
"""


class Kind(str, Enum):
    red = "red"
    blue = "blue"


class Fox(BaseModel):
    tail: int
    kind: Kind


def text(llm, prompt, params):
    sampling = SamplingParams(structured_outputs=params, max_tokens=60, temperature=0.5)
    return llm.generate(prompt, sampling_params=sampling)[0].outputs[0].text


def main():
    llm = LLM(model="org/model", max_model_len=200)
    choice = StructuredOutputsParams(choice=["Positive", "Negative"])
    assert text(llm, "Good or bad?", choice) in ("Positive", "Negative")
    regex = StructuredOutputsParams(regex=r"\w{1,8}@\w{1,8}\.com\n")
    assert text(llm, "An address:", regex).endswith(".com\n")
    schema = StructuredOutputsParams(json=Fox.model_json_schema(), disable_any_whitespace=True)
    written = text(llm, "A fox:", schema)
    assert written.startswith('{"tail":') or json.loads(written)
    assert text(llm, "SQL:", StructuredOutputsParams(grammar=GRAMMAR)).startswith("SELECT col_")


if __name__ == "__main__":
    main()
