"""A classic environment with a tool whose answer contains the letter to say."""

import verifiers as vf
from datasets import Dataset


def look_up(name: str) -> str:
    """Find the letter of a name.

    Args:
        name: whose letter.
    """
    if name != "ann":
        raise ValueError(f"nobody is called {name}")
    return "q"


def right(completion, answer):
    return float((completion[-1].content or "").strip() == answer)


def load_environment():
    rows = {"question": ["which letter has ann?"] * 4, "answer": ["q"] * 4}
    rubric = vf.Rubric(funcs=[right])
    return vf.ToolEnv(tools=[look_up], dataset=Dataset.from_dict(rows), rubric=rubric, max_turns=4)
