"""A critic: a model that predicts the discounted sum of future rewards before each token.

    V(token) = head(hidden state before the token)     head: a linear layer with one output

The critic starts from the policy's initial model, adapter included, with a head of zeros. Before
the policy's first update on a batch, value_credit.py computes advantages and returns from the
critic's values. After the policy's last update, the critic is trained towards these returns:

    sum over the states of the global batch of  loss(V, return) / number of states

If a trained rollout has a reward, its states are all its tokens (over=tokens) or the first token of
each turn (over=turns). The critic ignores the token weights of the objective.

B: rows, T: padded length, N: completion tokens of a micro-batch, H: hidden size. R: rollouts of the
global batch, L: maximum completion tokens per rollout, K: maximum turns per rollout.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from losses.tokens import TokenLoss
from rl.config.ranges import NonNegativeInt
from rl.learner.deepspeed_engine import linearise, load_engine, save_engine, start_engine, take_step
from rl.learner.objective import Batch
from rl.learner.optim import AdamW
from rl.learner.ranks import Ranks
from rl.learner.token_table import TokenTable
from rl.learner.value_credit import Estimator, ValueCredit, ValueTargets, credit, rewards_at_tokens
from rl.learner.weight_gradients import linear, without_gradients
from rl.model.shared_prefixes import shares_prefixes, states_before
from rl.records import RankBatch

ValueLoss = Callable[[Tensor, Tensor, Tensor], TokenLoss]
"""(values [N], returns [N], values before the step's first update [N]) -> loss [N]"""


@dataclass(frozen=True)
class CriticSettings:
    load: Callable[[], PreTrainedModel]  # loads another copy of the policy's initial model
    ranks: Ranks
    deepspeed_config: dict[str, Any]
    max_steps: int
    max_grad_norm: float


@dataclass(frozen=True, kw_only=True)
class NoCritic:
    estimates: ClassVar[bool] = False

    def start(self, setting: CriticSettings) -> None:
        """Load no model, and return None."""


@dataclass(frozen=True, kw_only=True)
class ValueModel:
    """The options of conf/critic/value.yaml."""

    estimator: Estimator
    loss: ValueLoss
    optim: AdamW
    over: Literal["tokens", "turns"]
    whiten: bool
    head_start: NonNegativeInt

    def start(self, setting: CriticSettings) -> "Critic":
        return Critic(self, setting)


class ValueModule(nn.Module):
    """A causal language model with a scalar head in place of its output head."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.body = cast("PreTrainedModel", model.base_model)  # the model without its output head
        width = cast("nn.Embedding", self.body.get_input_embeddings()).weight.shape[-1]
        # Start from zeros, because a random head would add noise to the advantages.
        self.head = nn.Linear(width, 1, dtype=model.dtype, device=model.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    @property
    def embeddings(self) -> list[nn.Parameter]:
        return [*self.body.get_input_embeddings().parameters(), *self.head.parameters()]

    def forward(self, token_ids: Tensor, mask: Tensor) -> Tensor:
        """Return the values [N] of the tokens [B, T] at which `mask` is True, row by row."""
        with without_gradients(self):
            before = states_before(self.body, token_ids, mask)  # [N, H]
        # Compute values in float32, because bfloat16 has only three significant digits.
        exact = torch.promote_types(before.dtype, torch.float32)
        return linear(before.to(exact), self.head.weight, self.head.bias).squeeze(-1)


class Critic:
    """The value model and its optimizer on one rank. All ranks call every method together."""

    def __init__(self, options: ValueModel, setting: CriticSettings) -> None:
        self._options, self._ranks, self._max_steps = options, setting.ranks, setting.max_steps
        model = setting.load()
        self.shares_prefixes = shares_prefixes(model)
        module = ValueModule(model)
        self._engine = start_engine(
            module,
            options.optim.optimizer(module.parameters(), module.embeddings),
            setting.deepspeed_config,
            max_grad_norm=setting.max_grad_norm,
            half=model.dtype == torch.bfloat16,
            external=module.head.parameters(),
        )

    def trains_alone(self, step: int) -> bool:
        return step < self._options.head_start

    @torch.no_grad()
    def values(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Return the values [N] of each micro-batch, computed without dropout."""
        self._engine.eval()
        values = [self._engine(batch.token_ids, batch.mask) for batch in batches]
        self._engine.train()
        return values

    def credit(
        self, batch: RankBatch, batches: Sequence[Batch], kl_penalties: Sequence[Tensor]
    ) -> tuple[list[Batch], dict[str, float]]:
        """Return (micro-batches with advantages and value targets, metrics). Collective."""
        own, table = self.values(batches), TokenTable(batch, batches)
        columns = [own, [b.turns for b in batches], *([kl_penalties] if kl_penalties else [])]
        values, turns, *penalties = table.gather(*columns)  # [R, L] each
        # `trained` [R, L] is True for the trained tokens of rollouts that have a reward.
        trained = table.exists & torch.tensor(batch.rewards).isfinite()[:, None]
        turn_rewards = torch.tensor(batch.turn_rewards, dtype=torch.float64)  # [R, K]
        turn_rewards[turn_rewards.isnan()] = 0.0  # NaN pads rollouts with fewer turns
        rewards = rewards_at_tokens(turn_rewards, turns, table.exists)
        result = credit(
            values,
            turns,
            trained,
            rewards - penalties[0] if penalties else rewards,
            estimator=self._options.estimator,
            over=self._options.over,
            whiten=self._options.whiten,
        )
        weights = result.states.double() / result.states.sum().clamp(min=1)  # [R, L]
        parts = map(table.scatter, (result.advantages, result.returns, weights))
        credited = [
            replace(b, advantages=a.to(v), value_targets=ValueTargets(r.to(v), v, w.to(v)))
            for b, v, a, r, w in zip(batches, own, *parts, strict=True)
        ]
        metrics = _metrics(values, result)
        if penalties:
            total, num_rollouts = (penalties[0] * trained).sum(), trained.any(1).sum()
            metrics["train/kl_penalty"] = float(total / num_rollouts.clamp(min=1))
        return credited, metrics

    def update(self, step: int, batches: Sequence[Batch], updates: int) -> dict[str, float]:
        """Take `updates` steps and return mean metrics. Return {} if no rank has a state."""
        pairs = [(batch, cast("ValueTargets", batch.value_targets)) for batch in batches]
        if not self._ranks.any(any(bool(targets.weights.any()) for _, targets in pairs)):
            return {}
        rate = self._options.optim.rate(step, self._max_steps)
        metrics = [self._update(pairs, rate) for _ in range(updates)]
        names = dict.fromkeys(name for one in metrics for name in one)
        means = {name: sum(one.get(name, 0.0) for one in metrics) / updates for name in names}
        return {**means, "train/critic_learning_rate": rate}

    def _update(self, pairs: Sequence[tuple[Batch, ValueTargets]], rate: float) -> dict[str, float]:
        sums: dict[str, Tensor] = {}
        for batch, targets in pairs:
            output = self._engine(batch.token_ids, batch.mask)
            values = output.detach().requires_grad_()
            result = self._options.loss(values, targets.returns, targets.old_values)
            value = (targets.weights * result.loss).sum()
            gradients = torch.autograd.grad(value, [values])
            # DeepSpeed averages gradients over ranks, and the factor `world` makes the mean a sum.
            self._engine.backward(linearise(value, gradients, [output]) * self._ranks.world)
            for name, numbers in {"value_loss": result.loss, **result.metrics}.items():
                share = (targets.weights * numbers).detach().sum().double()
                sums[name] = sums.get(name, torch.zeros_like(share)) + share
        # Send names with the sums, because a loss may return a metric for some micro-batches only.
        own = json.dumps({f"train/{name}": float(total) for name, total in sums.items()})
        totals = Counter[str]()
        for text in self._ranks.gather(own):
            totals.update(json.loads(text))
        norm = take_step(self._engine, rate)
        return {
            **totals,
            "train/critic_grad_norm": norm,
            "train/critic_skipped": float(math.isnan(norm)),
        }

    def save(self, folder: Path) -> None:
        save_engine(self._engine, folder / "critic")

    def load(self, folder: Path) -> None:
        load_engine(self._engine, folder / "critic")


def _metrics(values: Tensor, result: ValueCredit) -> dict[str, float]:
    predicted, returns = values[result.states], result.returns[result.states]
    if not len(predicted):
        return {}
    variance, residual = (float(x.var(correction=0)) for x in (returns, returns - predicted))
    return {
        "train/value_mean": float(predicted.mean()),
        "train/return_mean": float(returns.mean()),
        "train/explained_variance": 1 - residual / variance if variance > 0 else math.nan,
    }
