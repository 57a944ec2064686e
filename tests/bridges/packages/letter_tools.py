"""A classic environment with a tool whose answer contains the letter to say."""

import verifiers as vf
from datasets import Dataset


def look_up(name: str) -> str:
    """Find the letter of a name.

    Args:
        name: whose letter.
    """
    return {"ann": "q"}[name]


def right(completion, answer):
    return float(completion[-1].content.strip() == answer)


def load_environment():
    rows = Dataset.from_dict({"question": ["which letter has ann?"], "answer": ["q"]})
    return vf.ToolEnv(tools=[look_up], dataset=rows, rubric=vf.Rubric(funcs=[right]), max_turns=3)
