"""One rank of the policy tests: goes through all cases, rank 0 writes what came out.

    python -m tests.support.policy_worker <folder>    RANK, LOCAL_RANK, WORLD_SIZE are set

A process per case would spend its time importing. Nothing is judged here: tests/support/ranks.py
starts the ranks once a session and the tests read <folder>/measured.json.
"""

import dataclasses
import gc
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.support.policy_setup import (
    BUDGETS,
    RATE,
    PlainSteps,
    Watched,
    all_same,
    same,
    without_advantage,
    zero_gradient_fraction,
)
from tests.support.policy_steps import StepCases

GRADIENTS = {  # the shipped ZeRO stages, and how
    1: ("zero0", "zero1", "zero2", "zero3", "zero0 checkpointing", "zero0 compiled"),
    2: (
        *("zero0", "zero1", "zero2", "zero3", "zero3 scattered", "zero3 checkpointing"),
        "zero3_offload scattered",
        "zero2 checkpointing compiled",
    ),
}
STEPS = {
    1: (
        *(("float32", mode) for mode in ("zero0", "zero3")),
        *(("bfloat16", mode) for mode in ("zero0", "zero2", "zero3_offload_optimizer")),
    ),
    2: (
        *(("float32", mode) for mode in ("zero0", "zero1", "zero2", "zero3 scattered")),
        *(
            ("bfloat16", mode)
            for mode in ("zero0", "zero2", "zero3", "zero3_offload", "zero1 sums")
        ),
    ),
}


def main(folder: Path) -> None:
    # Imported by the ranks only: the tests that read results need none of it.
    from rl.learner.ranks import Ranks
    from tests.support.delivery_cases import deliveries
    from tests.support.split_cases import ALONE_MODES, SPLIT_MODES, alone, splits
    from tests.support.update_cases import UPDATE_MODES, around, learner

    torch.set_num_threads(1)
    ranks = Ranks.join(folder / "rendezvous", 60.0)
    cases = Cases(folder, ranks)
    gc.freeze()  # DeepSpeed collects garbage at every start: half a second of looking at imports
    measured = {
        **{f"{dtype} {mode}": cases.steps(dtype, mode) for dtype, mode in STEPS[ranks.world]},
        **{f"gradient {mode}": cases.gradients(mode) for mode in GRADIENTS[ranks.world]},
        **{f"muon {dtype}": cases.muon(dtype) for dtype in ("float32", "bfloat16")},
        **{f"around {mode}": around(cases, mode) for mode in UPDATE_MODES[ranks.world]},
        **{f"sums {mode}": splits(cases, mode) for mode in SPLIT_MODES[ranks.world]},
        **{f"alone {mode}": alone(cases, "bfloat16", mode) for mode in ALONE_MODES[ranks.world]},
        "learner": learner(cases) if ranks.world == 1 else {},
        "checkpoints": cases.checkpoints(),
        "deliveries": deliveries(cases),
    }
    if ranks.first:
        (folder / "measured.json").write_text(json.dumps(measured))


class Cases(StepCases):
    """All of them."""

    def gradients(self, mode: str) -> dict[str, Any]:
        """One step of plain SGD for each split, from wherever the last one led."""
        from tests.support.tiny_policy import flat, reference, relative_error

        optim = PlainSteps()
        policy = self.policy("float32", mode, optim)
        result: dict[str, Any] = {}
        before = self.everywhere(policy)
        given = {
            "lone": self.rows[:1],  # with two ranks, the second has nothing to do
            **dict.fromkeys(BUDGETS, self.rows),
            "idle": [*self.rows[:5], *map(without_advantage, self.rows[5:])],
        }
        for split, rows in given.items():
            self.twin.load_state_dict(before, strict=False)
            value, gradient = reference(self.twin, rows, self.loss)
            batch, steps = self.batch(rows, split), optim.made.steps
            stats = policy.update(batch, self.objective)
            after = self.everywhere(policy)
            update = {name: before[name].double() - after[name].double() for name in before}
            before = after
            result[split] = {
                "micro_batches": len(batch.micro_batches),
                "error": relative_error(update, gradient),
                "norm": float(flat(gradient).norm()),
                "grad_norm": stats["train/grad_norm"],
                "value": value,
                "loss": stats["train/loss"],
                "steps": optim.made.steps - steps,
                "zero_gradient_fraction": stats["train/zero_gradient_fraction"],
                "expected_idle": zero_gradient_fraction(rows),
            }
        still = policy.update(self.batch(list(map(without_advantage, self.rows))), self.objective)
        unmoved = all_same(before, self.everywhere(policy))
        result["still"] = {"unmoved": unmoved, "grad_norm": still["train/grad_norm"]}
        return {**result, "clipped": self.clipped(mode)}

    def clipped(self, mode: str) -> dict[str, float]:
        from tests.support.tiny_policy import flat

        policy = self.policy("float32", mode, PlainSteps(), max_grad_norm=0.5)
        before = self.everywhere(policy)
        stats = policy.update(self.batch(self.rows), self.objective)
        update = flat(self.everywhere(policy)) - flat(before)
        return {"update": float(update.norm()), "grad_norm": stats["train/grad_norm"]}

    def muon(self, dtype: str) -> dict[str, Any]:
        """Steps under ZeRO 0, and those of torch's two optimizers on the very same gradients."""
        batches = [self.batch(self.batches[i % 2], step=step) for i, step in enumerate((0, 1, 9))]
        watched = Watched(self.muon_optim())
        policy = self.policy(dtype, "zero0", watched)
        watched.gradients.clear()  # DeepSpeed has taken a step of its own
        start = self.everywhere(policy)
        names = {id(p): name for name, p in policy.engine.module.model.named_parameters()}
        plain = PlainMuon(start, [names[owner] for owner in watched.owners])
        result: dict[str, Any] = {"equal": []}
        saved = self.folder / f"muon {dtype}"
        weights = [start]
        for batch, rate in zip(batches, (RATE / 2, RATE, RATE / 10), strict=True):
            if batch is batches[-1]:
                policy.save(saved)
            policy.update(batch, self.objective)
            plain.step(watched.gradients[-1], rate)
            weights.append(self.everywhere(policy))
            result["equal"].append(all_same(weights[-1], plain.weights(getattr(torch, dtype))))
        middle, found = weights[-2:]
        result["steps"] = len(watched.gradients)
        result["moved"] = {name: not same(start[name], found[name]) for name in start}
        result["masters"] = sorted(
            {str(p.dtype) for g in policy.engine.optimizer.param_groups for p in g["params"]}
        )
        again = self.policy(dtype, "zero0", self.muon_optim(), seed=1)
        again.load(saved)
        result["loaded"] = all_same(self.everywhere(again), middle)
        nan = [dataclasses.replace(row, advantages=math.nan) for row in self.rows]
        stats = again.update(self.batch(nan, step=9), self.objective)
        result["skipped"] = [stats["train/skipped"], all_same(self.everywhere(again), middle)]
        again.update(batches[2], self.objective)
        result["next"] = all_same(self.everywhere(again), found)
        return result

    def muon_optim(self) -> Any:
        from rl.learner.optim import Muon

        knobs = {**vars(self.adamw(schedule="linear", warmup_steps=2, weight_decay=0.1))}
        return Muon(**knobs, momentum=0.9, nesterov=True, ns_steps=5, adamw_ratio=0.5)

    def small(self, mode: str) -> dict[str, Any]:
        """Updates of 1.5e-3 to weights of 1; the next in bfloat16 are 4e-3 and 8e-3 away."""
        policy = self.policy("bfloat16", mode, self.adamw(learning_rate=1.5e-3))
        moved = []
        for _ in range(5):
            policy.update(self.batch(self.rows), self.objective)
            norms = [w for name, w in self.everywhere(policy).items() if "norm" in name]
            moved.append(sum(int((w != 1).sum()) for w in norms) / sum(w.numel() for w in norms))
        return {"moved": moved}

    def checkpoints(self) -> dict[str, Any]:
        from rl.run.failure import RunFailed
        from rl.run.folder import RunFolder
        from rl.trainer.checkpoint import save_checkpoint

        run_folder = RunFolder(self.folder / "run")
        policy = self.policy("float32", "zero1", self.adamw())
        source = self.sources["float32"]

        def names() -> list[str]:
            return sorted(path.name for path in run_folder.checkpoints.iterdir())

        def save(step: int, **changes: Any) -> Path:
            given = {"rollouts": {"next": step}, "model": source, "keep": 2, **changes}
            return save_checkpoint(_learner(policy), run_folder, step=step, **given)

        result: dict[str, Any] = {"none": run_folder.resumed() is None}
        result["returned"] = [save(step).name for step in (1, 2, 10)]
        result["kept"] = names()
        try:
            failing = _learner(_failing(policy))
            save_checkpoint(failing, run_folder, step=11, rollouts={}, model=source, keep=2)
        except RunFailed as error:
            result["failed"] = str(error)
            result["left behind"] = [p.name for p in run_folder.checkpoints.glob(".*")]
        torch.distributed.barrier()  # a run would have ended: no rank still clears up
        result["complete after failure"] = [path.name for path in run_folder.complete_checkpoints()]
        save(11)
        save(11, rollouts={"next": "again"})
        result["kept at last"] = names()
        found = run_folder.resumed()
        result["resumed"] = [found.step, found.folder.name, found.rollouts] if found else None
        result["files"] = sorted(path.name for path in found.folder.iterdir()) if found else []
        policy.load(run_folder.checkpoint(11))
        return result


class PlainMuon:
    """torch.optim.Muon and torch.optim.AdamW in float32, sorted by the names of the weights."""

    def __init__(self, start: dict[str, Tensor], names: list[str]) -> None:
        self.masters = {
            name: torch.nn.Parameter(weight.float().clone()) for name, weight in start.items()
        }
        self.names = names
        hidden = [self.masters[name] for name in names if "_proj" in name]
        words = [self.masters[name] for name in names if "embed" in name]
        norms = [self.masters[name] for name in names if "norm" in name]
        assert len(hidden) + len(words) + len(norms) == len(start)
        self.muon = torch.optim.Muon(
            hidden, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw"
        )
        groups = [{"params": words, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
        self.adamw = torch.optim.AdamW(groups, betas=(0.9, 0.99), eps=1e-12)

    def step(self, gradients: list[Tensor], rate: float) -> None:
        for name, gradient in zip(self.names, gradients, strict=True):
            self.masters[name].grad = gradient.clone()
        for optimizer, ratio in ((self.muon, 1.0), (self.adamw, 0.5)):
            for group in optimizer.param_groups:
                group["lr"] = rate * ratio
            optimizer.step()

    def weights(self, dtype: torch.dtype) -> dict[str, Tensor]:
        return {name: master.detach().to(dtype) for name, master in self.masters.items()}


def _learner(policy: Any) -> Any:
    """A learner of which nothing but the policy is to be kept."""
    return SimpleNamespace(policy=policy, save=policy.save)


def _failing(policy: Any) -> Any:
    """The policy, on a disk that is full by the time the export starts."""

    class Failing:
        ranks, save = policy.ranks, policy.save

        def export(self, folder: Path, source: Path) -> None:
            raise OSError("no space left on device")

    return Failing()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
