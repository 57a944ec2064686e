"""Train for one step with TRL's GRPO on an environment of offbyone.

    pip install --no-deps --target .venv/trl trl==1.16.0      # changes no pinned package
    export PYTHONPATH=.venv/trl MODEL=outputs/<run>/checkpoints/step_000150/hf
    python examples/other-trainers/trl_grpo.py $MODEL

TRL samples one turn for each prompt, and the environment scores this turn. So the environment must
have a single turn. This program was tested on a CPU with TRL 1.16.0.
"""

import asyncio
import sys
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

from envs.protocol import Environment
from offbyone.environments import load
from offbyone.episodes import PlayedEpisode

STEPS, GROUP_SIZE, NUM_PROMPTS = 1, 4, 64


def reward_function(env: Environment) -> Callable[..., list[float]]:
    """Return a reward function for TRL that plays the only turn of each episode."""
    examples = env.examples("train")

    async def score(index: int, answer: list[dict[str, str]]) -> float:
        played = PlayedEpisode(env, examples[index])
        message = {"role": "assistant", "content": answer[0]["content"]}
        await played.take_turn(message, cut_off=False)
        rewards = await played.rewards()
        return sum(weight * rewards[name] for name, weight in env.reward_weights.items())

    def reward(completions: list[Any], index: list[int], **_: Any) -> list[float]:
        return [asyncio.run(score(i, c)) for i, c in zip(index, completions, strict=True)]

    return reward


def main(model_folder: str) -> None:
    """Train for STEPS steps and print the reward and the gradient norm of each."""
    env = load("reverse-text", reward_weights={"exact": 0.0, "similarity": 1.0})
    examples = env.examples("train")
    rows = [{"prompt": examples[i].messages, "index": i} for i in range(NUM_PROMPTS)]
    with TemporaryDirectory() as folder:
        options = GRPOConfig(
            output_dir=folder,
            max_steps=STEPS,
            num_generations=GROUP_SIZE,
            per_device_train_batch_size=2 * GROUP_SIZE,
            max_completion_length=16,
            learning_rate=1e-4,
            bf16=False,
            use_cpu=True,
            report_to=[],
            logging_steps=1,
            save_strategy="no",
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model_folder),
            reward_funcs=reward_function(env),
            args=options,
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(model_folder),
        )
        trainer.train()
        for line in trainer.state.log_history:
            print({key: line[key] for key in ("step", "reward", "grad_norm") if key in line})


if __name__ == "__main__":
    main(sys.argv[1])
