"""A classic environment of two turns: write letters, and then more of them."""

import verifiers as vf
from datasets import Dataset

ASK = "write letters like {}"


class LetterGame(vf.MultiTurnEnv):
    async def setup_state(self, state):
        state["asked_for_more"] = 0

    async def env_response(self, messages, state, **kwargs):
        state["asked_for_more"] += 1
        if self.fail:
            raise RuntimeError("the game is broken")
        return [{"role": "user", "content": "more"}]


def letters(completion, answer):
    """Return the share of the requested letter in the text of both turns."""
    said = "".join(m.content or "" for m in completion if m.role == "assistant")
    return said.count(answer) / max(1, len(said))


def lower(completion):
    said = "".join(m.content or "" for m in completion if m.role == "assistant")
    return sum(c.islower() for c in said) / max(1, len(said))


def asked(state):
    return state["asked_for_more"]


def together(completions):
    return [float(len(completions))] * len(completions)


def load_environment(size=40, own_eval=True, fail=False, grouped=False):
    def data(alphabet):
        rows = [alphabet[i % len(alphabet)] for i in range(size)]
        questions = [ASK.format(letter) for letter in rows]
        return Dataset.from_dict({"question": questions, "answer": rows})

    funcs, weights = [letters, lower, asked], [1.0, 0.5, 0.0]
    if grouped:
        funcs, weights = [*funcs, together], [*weights, 1.0]
    return LetterGame(
        dataset=data("abc"),
        eval_dataset=data("xyz") if own_eval else None,
        system_prompt="be brief",
        max_turns=2,
        rubric=vf.Rubric(funcs=funcs, weights=weights),
        fail=fail,
    )
