"""Compare short steps with TRL's GRPO, which generates and trains in a single process.

    pip install --no-deps trl        once, because it is not in the locks
    python -m benchmarks.short_steps [--tokens 5] [--rounds 3] [--steps 15] [k=v ...]
    python -m benchmarks.short_steps --lengths geometric:65:256        answers of uneven length

Both train the same weights in float32 on the same prompts, 256 completions a step and one update,
in alternating rounds. TRL generates with transformers' `generate`. With `--lengths` each of the 16
groups of a step has another limit of tokens, a quantile of the geometric distribution with this
mean and maximum. `generation` is the time our trainer waits for a batch; `of_single` below 1:
offbyone is faster.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stdout
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks._measuring import in_another_process, say
from rl.runtime.commit import REPO
from rl.runtime.folder import RunFolder
from rl.runtime.metrics import column, read_metrics

_BATCH, _GROUP = 256, 16
_FIRST = 3  # steps that do not count, because they compile kernels and fill caches


def limits_of(lengths: str) -> list[int]:
    """Return the token limit of each group, such as for geometric:65:256."""
    _, mean, most = lengths.split(":")
    count = _BATCH // _GROUP
    shares = [(number + 0.5) / count for number in range(count)]
    exact = [math.log1p(-share) / math.log1p(-1 / float(mean)) for share in shares]
    return [min(max(math.ceil(one), 1), int(most)) for one in exact]


def write_environment(folder: Path, limits: list[int]) -> None:
    """Write env=ragged: one environment for each limit, all equally frequent."""
    limit_of = {f"limit{number}": limit for number, limit in enumerate(limits)}
    content = {
        "defaults": [*(f"reverse-text@envs.{name}" for name in limit_of), "_self_"],
        "_target_": "envs.mixture.Mixture",
        "weights": dict.fromkeys(limit_of, 1.0),
        "sampling": {name: {"max_tokens": limit} for name, limit in limit_of.items()},
        "system_prompt": None,
    }
    (folder / "env").mkdir(exist_ok=True)
    (folder / "env" / "ragged.yaml").write_text(yaml.safe_dump(content, sort_keys=False))


def ours(folder: RunFolder, asked: argparse.Namespace, limits: list[int]) -> dict[str, float]:
    """Train with the real vLLM; return the median seconds of a step and of its stages."""
    output, ragged = folder.path.parent, []
    if limits:
        write_environment(output, limits)
        ragged = ["--config-dir", str(output), "env=ragged"]
    settings = [
        *(f"output_dir={output}", f"run_name={folder.path.name}", f"max_steps={asked.steps}"),
        *(f"batch_size={_BATCH}", f"group_size={_GROUP}", "optim.learning_rate=1e-6"),
        *(f"sampler.max_tokens={asked.tokens}", "model.dtype=float32", "model.warm_start=null"),
    ]
    command = [sys.executable, "train.py", *ragged, *settings, *asked.overrides]
    subprocess.run(command, cwd=REPO, check=True, stdout=sys.stderr)
    rows = read_metrics(folder)[_FIRST:]
    stages = {"ours": "step", "generation": "wait", "update": "update"}
    return {name: statistics.median(column(rows, f"time/{key}")) for name, key in stages.items()}


def end_rows(model: Any, limits: list[int], eos: int) -> None:
    """Let `generate` end the rows of each group at the group's limit."""
    generate, rows = model.generate, torch.tensor(limits).repeat_interleave(_GROUP)

    def ending(**given: Any) -> Any:
        start = given["input_ids"].shape[1]

        def force(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            ended = (rows <= ids.shape[1] - start + 1)[:, None]
            only = torch.full_like(scores, -torch.inf)
            only[:, eos] = 0.0
            return torch.where(ended, only, scores)

        return generate(**given, logits_processor=[force])

    model.generate = ending


def single(run: Path, tokens: int, steps: int, limits: list[int]) -> float:
    """Train our start weights on our prompts with TRL; return the median seconds of a step."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    model = RunFolder(run).complete_checkpoints()[-1] / "hf"
    lines = map(json.loads, (run / "rollouts/step_000000.jsonl").read_text().splitlines())
    prompts = list({one["group"]: one["messages"][:-1] for one in lines}.values())
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    ended: list[float] = []

    class Clock(TrainerCallback):
        """Store the time at which each step ends."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ended.append(time.perf_counter())

    if limits:
        end_rows(policy, limits, tokenizer.eos_token_id)
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=_BATCH,
            num_generations=_GROUP,
            max_completion_length=tokens,
            learning_rate=1e-6,
            beta=0.0,
            max_steps=steps,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        GRPOTrainer(
            model=policy,
            processing_class=tokenizer,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts * steps]),
            reward_funcs=lambda completions, **_: [float(len(str(c)) % 7) for c in completions],
            callbacks=[Clock()],
        ).train()
    return statistics.median(b - a for a, b in pairwise(ended[_FIRST - 1 :]))


def main() -> None:
    """Let both train in alternating rounds, then print the medians."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--lengths", default="", help="geometric:MEAN:MAXIMUM instead of --tokens")
    parser.add_argument("overrides", nargs="*")
    asked = parser.parse_args()
    limits = limits_of(asked.lengths) if asked.lengths else []
    asked.tokens = max([asked.tokens, *limits])
    rounds: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as name:
        for number in range(asked.rounds):
            folder = RunFolder(Path(name) / f"round{number}")
            took = ours(folder, asked, limits)
            given = (folder.path, asked.tokens, asked.steps, limits)
            took["single"] = in_another_process(single, *given)
            rounds.append({**took, "of_single": took["ours"] / took["single"]})
            print(rounds[-1], file=sys.stderr)
    medians = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    say(tokens=asked.tokens, **medians)


if __name__ == "__main__":
    main()
