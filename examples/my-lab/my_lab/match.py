"""Play the last checkpoint of a run of env=duel against the policy with which the run began.

    python -m my_lab.match outputs/<run_name> 400

Each policy plays each role in half of the games. A draw counts as half a win. The library
transformers computes both policies, without vLLM.
"""

import asyncio
import json
import math
import sys
from pathlib import Path
from typing import Any, cast

import torch
import yaml
from transformers import AutoModelForCausalLM

from envs.episode import Episode
from envs.messages import Message, assistant
from envs.protocol import PolicyTurn
from my_lab.duel import ROLES, Duel
from rl.model.tokenizer import load_renderer

MAX_TOKENS = 12


class Policy:
    """A policy that samples its answers at temperature 1."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._renderer = load_renderer(folder, "qwen3")

    @torch.no_grad()
    def answer(self, messages: list[Message]) -> Message:
        tokens = self._renderer.render_ids(cast("Any", messages), add_generation_prompt=True)
        stops, prompt = set(self._renderer.get_stop_token_ids()), len(tokens)
        while len(tokens) < prompt + MAX_TOKENS and tokens[-1] not in stops:
            logits = self._model(torch.tensor([tokens])).logits[0, -1]
            tokens.append(int(torch.multinomial(logits.softmax(-1), 1)))
        said = [token for token in tokens[prompt:] if token not in stops]
        return assistant(self._renderer.parse_response(said).content or "")


async def play(env: Duel, by_role: dict[str, Policy], number: int) -> dict[str, float]:
    """Return the reward of each role in one game."""

    async def speak(messages: list[Message], tools: Any, *, role: str = "") -> PolicyTurn:  # noqa: ARG001
        return PolicyTurn(by_role[role].answer(messages), False, 0, 0)

    episode = Episode(env.examples("train")[number % 100], [])
    await env.play(episode, cast("Any", speak))
    won = {}
    for episode.role in ROLES:
        won[episode.role] = (await env.score(episode))["won"]
    return won


def main(run: Path, num_games: int) -> None:
    """Print the win rate of the last checkpoint and the bounds of its 95 % interval."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    options = yaml.safe_load((run / "config.yaml").read_text())["env"]
    env = Duel(**{key: value for key, value in options.items() if key != "_target_"})
    last = max((run / "checkpoints").glob("step_*"))
    trained = Policy(last / "hf")
    start = Policy(Path((run / "model.txt").read_text().split("\n")[0]))
    wins = []
    for number in range(num_games):
        own = ROLES[number % 2]
        policies = {role: trained if role == own else start for role in ROLES}
        wins.append((asyncio.run(play(env, policies, number))[own] + 1) / 2)
    rate = sum(wins) / num_games
    half = 1.96 * math.sqrt(sum((win - rate) ** 2 for win in wins) / (num_games - 1) / num_games)
    bounds = [round(rate - half, 3), round(rate + half, 3)]
    found = {"checkpoint": last.name, "games": num_games, "win_rate": rate, "interval": bounds}
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
