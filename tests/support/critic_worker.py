"""One rank of the critic's tests under DeepSpeed, in the manner of policy_worker.py.

python -m tests.support.critic_worker <folder>    RANK, LOCAL_RANK, WORLD_SIZE are set
"""

import gc
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.forked_groups import forked_groups, plain_credit
from tests.support.policy_setup import (
    BUDGETS,
    PlainSteps,
    Setup,
    all_same,
    deepspeed_config,
    with_layers,
)
from tests.support.split_cases import StandingStill

GRADIENTS = {  # the shipped ZeRO stages, and how
    1: ("zero0", "zero1", "zero2 compiled", "zero3 checkpointing"),
    2: ("zero0", "zero1", "zero2", "zero3 scattered checkpointing"),
}
KEPT = {  # dtype, how, with an adapter
    1: (("float32", "zero0", False), ("bfloat16", "zero0", True)),
    2: (
        *(("float32", "zero2", False), ("float32", "zero3 scattered", False)),
        *(("bfloat16", "zero1", False), ("bfloat16", "zero3", True)),
    ),
}
SUMS = {1: ("zero0", "zero3"), 2: ("zero0", "zero2")}
WAYS = {  # over, split, updates, clip
    "tokens": ("tokens", "one", 1, None),
    "turns": ("turns", "several", 1, None),
    "rows": ("tokens", "rows", 1, None),
    "clipped": ("tokens", "several", 3, 0.1),
}
GAMMA, GAE_LAMBDA, RATE = 0.9, 0.8, 0.01


def main(folder: Path) -> None:
    from rl.learner.ranks import Ranks

    torch.set_num_threads(1)
    ranks = Ranks.join(folder / "rendezvous", 60.0)
    cases = CriticCases(folder, ranks)
    gc.freeze()
    measured = {
        **{f"gradient {mode}": cases.gradients(mode) for mode in GRADIENTS[ranks.world]},
        **{
            f"{dtype} {mode}": cases.kept(dtype, mode, adapter)
            for dtype, mode, adapter in KEPT[ranks.world]
        },
        **{f"sums {mode}": cases.sums(mode) for mode in SUMS[ranks.world]},
        "learner": cases.learner() if ranks.world == 1 else {},
    }
    if ranks.first:
        (folder / "measured.json").write_text(json.dumps(measured))


def penalty_of(row: Any) -> list[float]:
    return (0.1 * torch.tensor(row.token_ids)[row.completion_mask].double().cos()).tolist()


class Twin:
    """The value model in float64, a row at a time."""

    def __init__(self, model: Any) -> None:
        self.body = model.base_model
        width = model.config.hidden_size
        self.head = {
            "weight": torch.zeros(1, width, dtype=torch.float64, requires_grad=True),
            "bias": torch.zeros(1, dtype=torch.float64, requires_grad=True),
        }
        self.parameters = {f"body.{name}": p for name, p in self.body.named_parameters()}
        self.parameters |= {f"head.{name}": p for name, p in self.head.items()}

    @torch.no_grad()
    def load(self, weights: dict[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(weights[name])

    def values(self, row: Any) -> Tensor:
        ids = torch.tensor(row.token_ids, dtype=torch.int64)
        hidden = self.body(input_ids=ids[None], use_cache=False).last_hidden_state[0, :-1]
        before = hidden[torch.tensor(row.completion_mask)[1:]]
        return before @ self.head["weight"][0] + self.head["bias"]


class CriticCases(Setup):
    """Critics of any dtype and stage, on batches of forked rollouts with several turns."""

    def __init__(self, folder: Path, ranks: Any) -> None:
        super().__init__(folder, ranks)
        self.groups = [forked_groups(seed) for seed in range(2)]

    def critic(
        self, dtype: str, mode: str, optim: Any, seed: int = 0, *, adapter: bool = False
    ) -> Any:
        from losses.gae import gae
        from losses.squared_error import squared_error
        from rl.learner.critic import CriticSetting, ValueModel
        from rl.model.lora import LoRA

        def load() -> Any:
            model = self.model(dtype, seed)
            with_layers(model, mode)
            knobs = {"rank": 4, "alpha": 8.0, "target_modules": "all-linear", "rslora": False}
            if adapter:
                model = self.model(dtype, 0)  # the base comes from files
                LoRA(**knobs, dropout=0.0, modules_to_save=[]).attach(model, seed, "base")
            return model.train()

        config = deepspeed_config(mode)
        setting = CriticSetting(load, self.ranks, config, max_steps=10, max_grad_norm=1e9)
        return ValueModel(
            estimator=partial(gae, gamma=GAMMA, gae_lambda=GAE_LAMBDA),
            loss=partial(squared_error, clip=None),
            optim=optim,
            over="tokens",
            whiten=False,
            head_start=0,
        ).start(setting)

    def shares(self, groups: Any, split: str) -> tuple[Any, list[Any]]:
        """This rank's batch, and its micro-batches as tensors."""
        from losses.aggregation import token_mean
        from rl.learner.objective import Batch
        from rl.rollouts.plan import plan_batch

        batch = plan_batch(
            groups,
            token_mean,
            step=0,
            ranks=self.ranks.world,
            tokens_per_micro_batch=BUDGETS[split],
            metrics={},
        )[self.ranks.rank]
        return batch, [Batch.of(micro, self.ranks.device, 0) for micro in batch.micro_batches]

    def credited(self, critic: Any, groups: Any, split: str = "several") -> list[Any]:
        batch, batches = self.shares(groups, split)
        return critic.credit(batch, batches, [])[0]

    def weights(self, critic: Any) -> dict[str, Tensor]:
        """A copy of what is trained; every rank comes to it by itself."""
        from rl.learner.deepspeed_engine import whole

        weights = {}
        for name, parameter in critic._engine.module.named_parameters():
            if parameter.requires_grad:
                with whole(critic._engine, [parameter]):
                    weights[name] = parameter.detach().clone()
        return weights

    def gradients(self, mode: str) -> dict[str, Any]:
        """Advantages and steps of plain SGD, beside plain torch in float64."""
        from losses.squared_error import squared_error
        from tests.support.tiny_policy import exact_model

        critic = self.critic("float32", mode, PlainSteps(RATE))
        twin = Twin(exact_model(self.sources["float32"]))
        knobs = critic._knobs
        result: dict[str, Any] = {"first values": self.largest(critic)}
        critic.update(0, self.credited(critic, self.groups[1]), 1)  # a head that is not zero
        for name, (over, split, updates, clip) in WAYS.items():
            critic._knobs = replace(knobs, over=over, loss=partial(squared_error, clip=clip))
            result[name] = self.compared(critic, twin, split, updates, clip)
        return result

    def largest(self, critic: Any) -> float:
        values = critic.values(self.shares(self.groups[0], "several")[1])
        return max(float(each.abs().max()) for each in values if len(each))

    def compared(
        self, critic: Any, twin: Twin, split: str, updates: int, clip: float | None
    ) -> dict[str, Any]:
        from tests.support.tiny_policy import relative_error

        groups, before = self.groups[0], self.weights(critic)
        twin.load(before)
        batch, batches = self.shares(groups, split)
        penalties = [0.1 * b.token_ids[b.mask].double().cos() for b in batches]
        credited, _ = critic.credit(batch, batches, penalties)
        over = critic._knobs.over
        with torch.no_grad():
            expected = plain_credit(
                *(groups, lambda row: twin.values(row).tolist(), penalty_of),
                gamma=GAMMA,
                gae_lambda=GAE_LAMBDA,
                over=over,
            )
        result: dict[str, Any] = {"advantages": self.furthest(credited, expected)}
        stats = critic.update(0, credited, updates)
        after = self.weights(critic)
        values, norms = [], []
        for old in [self.old_values(twin, groups)] * updates:
            value = plain_loss(twin, groups, expected, old, clip)
            value.backward()
            gradients = {name: p.grad.clone() for name, p in twin.parameters.items()}
            norms.append(float(sum(g.square().sum() for g in gradients.values())) ** 0.5)
            values.append(float(value.detach()))
            with torch.no_grad():
                for name, parameter in twin.parameters.items():
                    parameter -= RATE * gradients[name]
                    parameter.grad = None
        update = {name: after[name].double() - before[name].double() for name in after}
        wanted = {n: p.detach() - before[n].double() for n, p in twin.parameters.items()}
        return {
            **result,
            "micro_batches": len(batches),
            "error": relative_error(update, wanted),
            "losses": [sum(values) / updates, stats["train/value_loss"]],
            "norms": [sum(norms) / updates, stats["train/critic_grad_norm"]],
            "clipped": stats.get("train/value_clip_fraction"),
        }

    def old_values(self, twin: Twin, groups: Any) -> list[Tensor]:
        rows = [row for group in groups for r in group.rollouts for row in r.sequences]
        with torch.no_grad():
            return [twin.values(row) for row in rows]

    def furthest(self, credited: Sequence[Any], expected: Any) -> float:
        """Largest difference of an advantage, over all ranks, beside the largest advantage."""
        worst = torch.zeros(1)
        for b in credited:
            places = zip(b.rollout_ids.tolist(), b.positions.tolist(), strict=True)
            wanted = torch.tensor([expected.get(p, (0.0,))[0] for p in places])
            gap = (b.advantages.cpu() - wanted).abs()
            worst = torch.maximum(worst, gap.max()) if len(gap) else worst
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        return float(worst) / max(abs(advantage) for advantage, *_ in expected.values())

    def kept(self, dtype: str, mode: str, adapter: bool) -> dict[str, Any]:
        """Two steps, a checkpoint and a third; the third from the checkpoint; and bad batches."""
        critic = self.critic(dtype, mode, self.adamw(), adapter=adapter)
        for groups in self.groups:
            critic.update(0, self.credited(critic, groups), 1)
        middle, folder = self.weights(critic), self.folder / f"critic {dtype} {mode}"
        folder.mkdir(exist_ok=True)
        critic.save(folder)
        stats = critic.update(2, self.credited(critic, self.groups[0]), 2)
        end, values = self.weights(critic), self.largest(critic)
        other = self.critic(dtype, mode, self.adamw(), seed=1, adapter=adapter)
        differs = not all_same(self.weights(other), middle)
        other.load(folder)
        result: dict[str, Any] = {
            "trained": sorted({name.partition(".")[0] for name in middle}),
            "adapter alone": all("lora_" in name or "head." in name for name in middle),
            "files": sorted(path.name for path in (folder / "critic").iterdir()),
            "loaded": differs and all_same(self.weights(other), middle),
        }
        result |= self.bad(other, middle)
        again = other.update(2, self.credited(other, self.groups[0]), 2)
        result["next"] = all_same(self.weights(other), end) and again == stats
        result["values"] = self.largest(other) == values > 0
        return result

    def bad(self, critic: Any, before: dict[str, Tensor]) -> dict[str, Any]:
        """Batches that must change nothing."""
        credited = self.credited(critic, self.groups[0])
        if self.ranks.rank == self.ranks.world - 1:  # one rank's trouble is everybody's
            targets = credited[0].value_targets
            broken = replace(targets, returns=targets.returns + math.inf)
            credited[0] = replace(credited[0], value_targets=broken)
        stats = critic.update(2, credited, 1)
        result = {
            "skipped": stats["train/critic_skipped"],
            "unchanged": all_same(self.weights(critic), before),
        }
        untrained = [
            replace(group, credits=tuple(replace(c, trains=False) for c in group.credits))
            for group in self.groups[0]
        ]
        nothing = {}
        for name, groups in {"untrained": untrained, "empty": []}.items():
            nothing[name] = critic.update(2, self.credited(critic, groups), 1)
        unmoved = all_same(self.weights(critic), before)
        return {**result, "nothing": nothing, "still unchanged": unmoved}

    def sums(self, mode: str) -> dict[str, Any]:
        """The gradient of a bfloat16 batch row by row, beside the sum of what each row gives."""
        from rl.learner import critic as module

        class Drawn(module.ValueModule):
            """With a head that lets gradients through to the body."""

            def __init__(self, model: Any) -> None:
                super().__init__(model)
                torch.nn.init.normal_(self.head.weight, generator=torch.Generator().manual_seed(0))

        optim, shipped = StandingStill(), module.ValueModule
        module.ValueModule = Drawn
        critic = self.critic("bfloat16", mode, optim)
        module.ValueModule = shipped
        credited = self.credited(critic, forked_groups(2, num_groups=8), "rows")
        critic.update(0, credited, 1)
        together, total = optim.made.gradient, torch.zeros_like(optim.made.gradient)
        for batch in credited:
            if critic.update(0, [batch], 1):
                total += optim.made.gradient
        squares = torch.stack([(together - total).square().sum(), total.square().sum()])
        dist.all_reduce(squares)  # a rank may hold but a share
        return {
            "micro_batches": len(credited) * self.ranks.world,
            "error": float((squares[0] / squares[1]).sqrt()),
        }

    def learner(self) -> dict[str, Any]:
        """Three steps of loss=ppo with a head start and a penalty, the last from a checkpoint."""
        from rl.config.schema import Run
        from rl.learner.learner import Learner
        from rl.run.folder import RunFolder
        from tests.support.composing import composed

        run_folder = RunFolder(self.folder / "learner")
        run_folder.path.mkdir()
        run_folder.set_model(self.sources["float32"])

        def start(*overrides: str) -> Learner:
            common = ("model.dtype=float32", "optim.learning_rate=1e-3")
            return Learner(Run(**composed(*common, *overrides)), run_folder, self.ranks)

        batch, _ = self.shares(self.groups[0], "several")
        bare = start("loss=ppo", "critic=none")
        result: dict[str, Any] = {"none": sorted(bare.update(batch)), "bare": bare._critic is None}
        ppo = ("loss=ppo", "critic.head_start=1", "kl=k1", "updates_per_batch=2")
        one = start(*ppo)
        before = self.everywhere(one.policy)
        first = one.update(batch)
        result["stood"] = all_same(self.everywhere(one.policy), before)
        result["alone"] = [first["train/empty"], first["train/value_loss"]]
        one.update(replace(batch, step=1))
        result["moved"] = not all_same(self.everywhere(one.policy), before)
        one.save(run_folder.path)
        expected = one.update(replace(batch, step=2))
        other = start(*ppo)
        other.load(run_folder.path)
        found = other.update(replace(batch, step=2))
        different = {name for name in expected if expected[name] != found.get(name)}
        result["different"] = sorted(expected.keys() ^ found.keys() | different)
        result["metrics"] = sorted(expected)
        return result


def plain_loss(
    twin: Twin, groups: Any, expected: Any, old_values: list[Tensor], clip: float | None
) -> Tensor:
    """Mean over the states of the whole batch, one state after the other."""
    losses, rows = [], iter(old_values)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    for i, rollout in enumerate(rollouts):
        position = 0
        for row in rollout.sequences:
            for value, old in zip(twin.values(row), next(rows), strict=True):
                _, target, first = expected.get((i, position), (0.0, 0.0, False))
                error = (value - target) ** 2
                if clip is not None:
                    near = old + (value - old).clamp(-clip, clip)
                    error = torch.maximum(error, (near - target) ** 2)
                losses += [error / 2] if first else []
                position += 1
    return torch.stack(losses).mean()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
