"""Compare short steps with TRL's GRPO, which generates and trains in a single process.

    pip install --no-deps trl        once, because it is not in the locks
    python -m benchmarks.short_steps [--tokens 5] [--rounds 3] [--steps 15] [k=v ...]
    python -m benchmarks.short_steps --lengths geometric:65:256        answers of uneven length

Both train the same weights in float32 on the same prompts, 256 completions a step and one update,
in alternating rounds. TRL generates with transformers' `generate`. With `--lengths` each of the 16
groups of a step has another limit of tokens, a quantile of the geometric distribution with this
mean and maximum. One JSON line of medians:

    {"tokens": 5, "ours": ..., "generation": ..., "update": ..., "single": ..., "of_single": ...}

`generation` is the time our trainer waits for a batch; `of_single` below 1: offbyone is faster.
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

import yaml

from rl.runtime.folder import RunFolder
from rl.runtime.metrics import column, read_metrics

REPO = Path(__file__).parents[1]
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
    names = [f"limit{number}" for number in range(len(limits))]
    content = {
        "defaults": [*(f"reverse-text@envs.{name}" for name in names), "_self_"],
        "_target_": "envs.mixture.Mixture",
        "weights": dict.fromkeys(names, 1.0),
        "sampling": {
            name: {"max_tokens": limit} for name, limit in zip(names, limits, strict=True)
        },
        "system_prompt": None,
    }
    (folder / "env").mkdir(exist_ok=True)
    (folder / "env" / "ragged.yaml").write_text(yaml.safe_dump(content, sort_keys=False))


def ours(folder: Path, arguments: argparse.Namespace, name: str) -> dict[str, float]:
    """Train with the real vLLM; return the median seconds of a step and of its stages."""
    ragged = []
    if arguments.limits:
        write_environment(folder, arguments.limits)
        ragged = ["--config-dir", str(folder), "env=ragged"]
    settings = [
        *ragged,
        *(f"output_dir={folder}", f"run_name={name}", f"max_steps={arguments.steps}"),
        *(f"batch_size={_BATCH}", f"group_size={_GROUP}", "optim.learning_rate=1e-6"),
        *(f"sampler.max_tokens={arguments.tokens}", "model.dtype=float32", "model.warm_start=null"),
        *arguments.overrides,
    ]
    command = [sys.executable, "train.py", *settings]
    subprocess.run(command, cwd=REPO, check=True, stdout=sys.stderr)
    rows = read_metrics(RunFolder(folder / name))[_FIRST:]
    parts = {"ours": "step", "generation": "wait", "update": "update"}
    return {part: statistics.median(column(rows, f"time/{key}")) for part, key in parts.items()}


def single(folder: Path, arguments: argparse.Namespace, name: str) -> float:
    """Train with TRL in another process; return the median seconds of a step."""
    run = RunFolder(folder / name)
    first = (json.loads(line) for line in (run.path / "rollouts/step_000000.jsonl").open())
    peer = {
        "model": str(run.complete_checkpoints()[-1] / "hf"),
        "prompts": list({one["group"]: one["messages"][:-1] for one in first}.values()),
        "tokens": arguments.tokens,
        "steps": arguments.steps,
        "limits": arguments.limits,
    }
    settings = folder / "peer.json"
    settings.write_text(json.dumps(peer))
    command = [sys.executable, "-m", "benchmarks.short_steps", "--peer", str(settings)]
    done = subprocess.run(command, cwd=REPO, check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout.splitlines()[-1])


def end_rows(model: Any, limits: list[int], eos: int) -> None:
    """Let `generate` end the rows of each group at the group's limit."""
    import torch

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


def peer(model: str, prompts: list[Any], tokens: int, steps: int, limits: list[int]) -> float:
    """Train with TRL in this process; return the median seconds of a step."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    ended: list[float] = []

    class Clock(TrainerCallback):
        """Store the time at which each step ends."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ended.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
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
        policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
        if limits:
            end_rows(policy, limits, tokenizer.eos_token_id)
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
    parser.add_argument("--peer", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    arguments.limits = limits_of(arguments.lengths) if arguments.lengths else []
    arguments.tokens = max([arguments.tokens, *arguments.limits])
    if arguments.peer:
        with redirect_stdout(sys.stderr):
            took = peer(**json.loads(arguments.peer.read_text()))
        print(took)
        return
    rounds: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.rounds):
            took = ours(Path(folder), arguments, f"round{number}")
            took["single"] = single(Path(folder), arguments, f"round{number}")
            rounds.append({**took, "of_single": took["ours"] / took["single"]})
            print(rounds[-1], file=sys.stderr)
    medians = {part: statistics.median(one[part] for one in rounds) for part in rounds[0]}
    line = {"tokens": arguments.tokens, **{k: round(v, 2) for k, v in medians.items()}}
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
