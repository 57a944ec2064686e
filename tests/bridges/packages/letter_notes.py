"""A classic environment whose tool gets a hidden argument from the episode's state."""

import verifiers as vf
from datasets import Dataset


def note(letter: str, notes: list) -> str:
    """Write a letter down.

    Args:
        letter: what to write.
    """
    notes.append(letter)
    return f"{len(notes)} noted"


class LetterNotes(vf.StatefulToolEnv):
    def __init__(self, **kwargs):
        super().__init__(max_turns=4, **kwargs)
        self.add_tool(note, args_to_skip=["notes"])

    async def setup_state(self, state, **kwargs):
        state["notes"] = []

    def update_tool_args(self, tool_name, tool_args, messages, state, **kwargs):
        return {**tool_args, "notes": state["notes"]}


def noted(state, answer):
    return float("".join(state["notes"]) == answer)


def load_environment():
    rows = {"question": ["note q and r"] * 4, "answer": ["qr"] * 4}
    return LetterNotes(dataset=Dataset.from_dict(rows), rubric=vf.Rubric(funcs=[noted]))
