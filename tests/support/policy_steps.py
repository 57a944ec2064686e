"""Cases of policy_worker.py: optimizer steps, what they leave on disk, and how they go on."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.policy_setup import Setup, all_same, same


class StepCases(Setup):
    """Steps in every dtype and ZeRO stage, beside plain torch."""

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
                dataclasses.replace(row, advantages=math.nan) if i == spoilt else row
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
