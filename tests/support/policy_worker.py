"""One rank of the policy tests: goes through all cases, rank 0 writes what came out.

    python -m tests.support.policy_worker <folder>    RANK, LOCAL_RANK, WORLD_SIZE are set

A process per case would spend its time importing. Nothing is judged here: `measurements` starts the
ranks once a session and the tests read <folder>/measured.json.
"""

import dataclasses
import functools
import gc
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

REPO = Path(__file__).parents[2]
GRADIENTS = {  # the shipped ZeRO stages, and how
    1: ("zero0", "zero1", "zero2", "zero3", "zero0 checkpointing"),
    2: ("zero0", "zero1", "zero2", "zero3", "zero3 scattered", "zero3 checkpointing"),
}
STEPS = {
    1: (
        *(("float32", mode) for mode in ("zero0", "zero3")),
        *(("bfloat16", mode) for mode in ("zero0", "zero2")),
    ),
    2: (
        *(("float32", mode) for mode in ("zero0", "zero1", "zero2", "zero3 scattered")),
        *(("bfloat16", mode) for mode in ("zero0", "zero2", "zero3", "zero1 sums")),
    ),
}
BUDGETS = {"one": 10_000, "several": 60, "rows": 1}  # tokens of a micro-batch
RATE = 0.01


def measurements(world: int, module: str = __name__) -> dict[str, Any]:
    """What `world` ranks measured; they are started at the first call, and never again."""
    measured, log = _run(world, module)
    assert measured is not None, f"the ranks failed:\n{log}"
    return measured


@functools.cache
def _run(world: int, module: str) -> tuple[dict[str, Any] | None, str]:
    """What was measured, None if the ranks failed, and the end of what they printed."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        common = {
            "WORLD_SIZE": str(world),
            "DS_ACCELERATOR": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(REPO),
        }
        with log.open("w") as output:
            ranks = [
                subprocess.Popen(
                    [sys.executable, "-m", module, folder],
                    cwd=REPO,
                    env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
                for rank in range(world)
            ]
            try:
                for process in ranks:
                    process.wait(timeout=240)
            except subprocess.TimeoutExpired:
                pass  # the missing result says it
            finally:
                for process in ranks:
                    process.kill()
                    process.wait()
        result = Path(folder) / "measured.json"
        measured = json.loads(result.read_text()) if result.exists() else None
        return measured, log.read_text()[-8000:]


def main(folder: Path) -> None:
    # Imported by the ranks only: the tests that read results need none of it.
    from rl.learner.ranks import Ranks
    from tests.support.split_cases import SPLIT_MODES, splits
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
        "learner": learner(cases) if ranks.world == 1 else {},
        "checkpoints": cases.checkpoints(),
    }
    if ranks.first:
        (folder / "measured.json").write_text(json.dumps(measured))


def without_advantage(row: Any) -> Any:
    return dataclasses.replace(row, advantage=0.0)


def zero_gradient_fraction(rows: Any) -> float:
    """Share of the completion tokens whose row has no advantage."""
    idle = sum(r.row.num_completion for r in rows if not r.advantage)
    return idle / sum(r.row.num_completion for r in rows)


class CountingSGD(torch.optim.SGD):
    """Weights before minus weights after are the gradient itself."""

    steps = 0

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        super().step(closure)


class Watched:
    """A configured optimizer that keeps the gradients of every step, and whose they are."""

    def __init__(self, optim: Any) -> None:
        self.rate = optim.rate
        self._optim = optim
        self.gradients: list[list[Tensor]] = []

    def optimizer(self, parameters: Any, embeddings: Any) -> torch.optim.Optimizer:
        made = self._optim.optimizer(parameters, embeddings)
        self.owners = [id(p) for group in made.param_groups for p in group["params"]]
        made.register_step_pre_hook(self._keep)
        return made

    def _keep(self, optimizer: Any, *_: Any) -> None:
        held = [p.grad for group in optimizer.param_groups for p in group["params"]]
        self.gradients.append([gradient.clone() for gradient in held if gradient is not None])


class PlainSteps:
    """Stands in for rl.learner.optim.AdamW."""

    def __init__(self, rate: float = 1.0) -> None:
        self._rate = rate

    def optimizer(self, parameters: Any, embeddings: Any) -> torch.optim.Optimizer:
        self.made = CountingSGD([p for p in parameters if p.requires_grad], lr=123.0)
        return self.made

    def rate(self, step: int, max_steps: int) -> float:
        return self._rate


class Cases:
    """Policies under all ZeRO stages, and what is done with them."""

    def __init__(self, folder: Path, ranks: Any) -> None:
        from losses.aggregation import token_mean
        from losses.cispo import cispo
        from rl.learner.objective import Objective
        from tests.support import tiny_policy as tiny

        self.folder, self.ranks = folder, ranks
        # Every rank writes a folder of its own: they would race for a shared one.
        sources = folder / f"models{ranks.rank}"
        self.sources = {d: tiny.model_folder(sources / d, d) for d in ("float32", "bfloat16")}
        self.loss = functools.partial(cispo, clip_low=0.0, clip_high=5.0)
        self.objective = Objective(self.loss)
        self.twin = tiny.exact_model(self.sources["float32"])
        self.batches = [tiny.weighted(self.twin, token_mean, seed) for seed in range(2)]
        self.rows = self.batches[0]

    def policy(self, dtype: str, mode: str, optim: Any, seed: int = 0, **changes: Any) -> Any:
        from rl.learner.policy import Policy
        from tests.support.tiny_policy import TEMPERATURE

        model = self.model(dtype, seed)
        if "checkpointing" in mode:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        settings = {"max_steps": 10, "max_grad_norm": 1e9, "logprob_chunk": 7, **changes}
        return Policy(
            model,
            optim,
            self.ranks,
            deepspeed_config=deepspeed_config(mode),
            temperature=TEMPERATURE,
            **settings,
        )

    def model(self, dtype: str, seed: int) -> Any:
        from rl.model.loading import load_model

        return load_model(self.sources[dtype], getattr(torch, dtype), seed)

    def adamw(self, **changes: Any) -> Any:
        from rl.learner.optim import AdamW

        knobs = {
            "learning_rate": RATE,
            "beta1": 0.9,
            "beta2": 0.99,
            "eps": 1e-12,
            "weight_decay": 0.0,
            "schedule": "constant",
            "warmup_steps": 0,
            "min_ratio": 0.1,
        }
        return AdamW(**{**knobs, **changes})

    def batch(self, rows: Any, split: str = "several", step: int = 0) -> Any:
        return self.split(rows, BUDGETS.get(split, 1), step)

    def split(self, rows: Any, budget: int, step: int = 0) -> Any:
        from rl.rollouts.plan import plan

        shares = plan(
            rows,
            step=step,
            ranks=self.ranks.world,
            tokens_per_micro_batch=budget,
            metrics={},
        )
        return shares[self.ranks.rank]

    def everywhere(self, policy: Any) -> dict[str, Tensor]:
        """A copy of the weights, on every rank."""
        found = [{name: tensor.clone() for name, tensor in policy.weights().items()}]
        dist.broadcast_object_list(found, src=0)
        return found[0]

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

    def steps(self, dtype: str, mode: str) -> dict[str, Any]:
        """Two updates in one go; the same with a break; the same with bad batches between."""
        from tests.support.tiny_policy import flat

        first, second = (self.batch(rows) for rows in self.batches)
        policy = self.policy(dtype, mode, self.adamw())
        result: dict[str, Any] = {"weights": self.named(policy, dtype)}
        start = self.everywhere(policy)
        policy.update(first, self.objective)
        middle = self.everywhere(policy)
        result["first"] = float((flat(middle) - flat(start)).abs().median())
        saved = self.folder / f"{dtype} {mode}"
        policy.save(saved)
        result["export"] = self.exported(policy, dtype, saved / "hf")
        policy.update(second, self.objective)
        end = self.everywhere(policy)
        result["resumed"] = self.resumed(dtype, mode, saved, second, middle, end)
        result["bad"] = self.bad(dtype, mode, middle, end)
        result["rates"] = self.rates(dtype, mode)
        if dtype == "bfloat16":
            result["small"] = self.small(mode)
        return result

    def named(self, policy: Any, dtype: str) -> dict[str, Any]:
        from rl.model.loading import load_model

        model = load_model(self.sources[dtype], getattr(torch, dtype), 0)
        expected, found = dict(model.named_parameters()), policy.weights()
        elsewhere = [None] * self.ranks.world
        dist.all_gather_object(elsewhere, len(found))
        return {
            "missing": sorted(expected.keys() - found.keys()),
            "more": sorted(found.keys() - expected.keys()),
            "equal": all(same(found[name], expected[name]) for name in found),
            "per_rank": elsewhere,
            "head": "lm_head.weight" in found,
        }

    def exported(self, policy: Any, dtype: str, folder: Path) -> dict[str, Any]:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from rl.model.loading import load_model

        policy.export(folder, self.sources[dtype])
        token_ids = self.batch(self.rows).micro_batches[0].token_ids
        weights, logprobs = self.everywhere(policy), policy.logprobs(token_ids)
        if not self.ranks.first:
            return {}
        twin = load_model(self.sources[dtype], getattr(torch, dtype), 1)
        twin.load_state_dict(weights, strict=False)
        twin.set_attn_implementation("sdpa")  # what everybody else computes with
        read: Any = AutoModelForCausalLM.from_pretrained
        loaded, report = read(folder, dtype="auto", output_loading_info=True)
        token_ids = torch.tensor(token_ids).long()
        with torch.no_grad():
            expected, found = (m(token_ids).logits for m in (twin.eval(), loaded.eval()))
        plain = torch.log_softmax(found[:, :-1].float(), -1).gather(-1, token_ids[:, 1:, None])[
            ..., 0
        ]
        return {
            "identical": same(expected, found),
            "dtype": str(found.dtype),
            "complaints": sum(len(found) for found in report.values() if found),
            "logprobs": float((plain - logprobs[:, 1:]).abs().max()),
            "first": float(logprobs[:, 0].abs().max()),
            "text": AutoTokenizer.from_pretrained(folder).decode([104, 105]),
        }

    def resumed(
        self, dtype: str, mode: str, saved: Path, second: Any, middle: Any, end: Any
    ) -> dict[str, Any]:
        policy = self.policy(dtype, mode, self.adamw(), seed=1)
        policy.load(saved)
        loaded = self.everywhere(policy)
        policy.update(second, self.objective)
        return {
            "weights": all_same(loaded, middle),
            "next": all_same(self.everywhere(policy), end),
        }

    def bad(self, dtype: str, mode: str, middle: Any, end: Any) -> dict[str, Any]:
        """Batches that must change nothing, and then the batch that would have come next."""
        from losses.tokens import TokenLoss
        from rl.learner.objective import Objective

        first, second = (self.batch(rows) for rows in self.batches)
        policy = self.policy(dtype, mode, self.adamw())
        policy.update(first, self.objective)
        # Finite, with an infinite gradient; infinite, with a finite one.
        steep = Objective(lambda t: TokenLoss((t.logprobs - t.logprobs.detach()).sqrt(), {}))
        high = Objective(lambda t: TokenLoss(t.logprobs + math.inf, {}))
        counted = [i for i, r in enumerate(self.rows) if r.row.num_completion]
        lengths = sorted(counted, key=lambda i: self.rows[i].length)
        nan = [
            [
                dataclasses.replace(row, advantage=math.nan) if i == spoilt else row
                for i, row in enumerate(self.rows)
            ]
            for spoilt in (lengths[1], lengths[-1])
        ]
        trials = {
            "nan, several": (self.batch(nan[0]), self.objective),
            "nan, rows": (self.batch(nan[1], "rows"), self.objective),
            "steep": (first, steep),
            "high": (first, high),
        }
        result: dict[str, Any] = {}
        for name, (batch, objective) in trials.items():
            stats = policy.update(batch, objective)
            unchanged = all_same(self.everywhere(policy), middle)
            result[name] = {
                "unchanged": unchanged,
                "skipped": stats["train/skipped"],
                "grad_norm": stats["train/grad_norm"],
                "loss": stats["train/loss"],
            }
        stats = policy.update(self.batch([]), self.objective)
        result["empty"] = {
            "unchanged": all_same(self.everywhere(policy), middle),
            **{name: stats[f"train/{name}"] for name in ("empty", "skipped", "grad_norm", "loss")},
        }
        stats = policy.update(second, self.objective)
        result["next"] = {
            "empty": stats["train/empty"],
            "same": all_same(self.everywhere(policy), end),
            "skipped": stats["train/skipped"],
        }
        return result

    def rates(self, dtype: str, mode: str) -> list[dict[str, float]]:
        """Without memory, Adam's updates are as long as the rate, in every direction."""
        from tests.support.tiny_policy import flat

        knobs = {"beta1": 0.0, "beta2": 0.0, "warmup_steps": 2}
        optim = self.adamw(**knobs, schedule="linear", min_ratio=0.0)
        policy = self.policy(dtype, mode, optim)
        before, result = self.everywhere(policy), []
        for step in (0, 1, 9):
            stats = policy.update(self.batch(self.rows, step=step), self.objective)
            after = self.everywhere(policy)
            moved = (flat(after) - flat(before)).abs()
            result.append({"moved": float(moved.median()), "rate": stats["train/learning_rate"]})
            before = after
        return result

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
        nan = [dataclasses.replace(row, advantage=math.nan) for row in self.rows]
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


def deepspeed_config(mode: str) -> dict[str, Any]:
    import yaml

    stage, *how = mode.split()
    config = yaml.safe_load((REPO / f"conf/deepspeed/{stage}.yaml").read_text())
    if "scattered" in how:  # the weights of so small a model would stay whole on every rank
        config["zero_optimization"] |= {
            "stage3_param_persistence_threshold": 0,
            "stage3_model_persistence_threshold": 0,
        }
    if "sums" in how:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def all_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
