"""What learns: the policy, its objective, and what follows the policy from step to step.

Built from the configuration alone; knows nothing of rollouts, vLLM or files other than its own.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from rl.config.build import build
from rl.config.facts import compares_distributions, needs_reference, takes_turns
from rl.config.schema import Run
from rl.learner.critic import Critic, CriticSetting
from rl.learner.kl import KLPenalty
from rl.learner.layers import compile_layers, recompute_layers
from rl.learner.objective import Batch, Objective
from rl.learner.observation import Observer
from rl.learner.policy import Policy
from rl.learner.preparation import Preparation
from rl.learner.ranks import Ranks
from rl.learner.reference.protocol import Reference, ReferenceSetting
from rl.model.loading import load_model
from rl.records import RankBatch
from rl.run.folder import RunFolder


def load_trained(run: Run, folder: Path) -> PreTrainedModel:
    """Return the model in `folder` with the run's adapter."""
    model = load_model(folder, getattr(torch, run.model["dtype"]), run.seed)
    model = build(run.adapter)().attach(model, run.seed, _public_name(run, folder))
    if run.trainer["gradient_checkpointing"]:
        recompute_layers(model)
    if run.trainer["compile"]:
        compile_layers(model)
    return model.train()


def _public_name(run: Run, folder: Path) -> str:
    """What others may call the model: its name on the hub, else where it lies here."""
    name = run.model.get("path")
    return name if name and not Path(name).expanduser().exists() else str(folder)


def _weightless(batch: Batch) -> Batch:
    """A micro-batch in which no token counts: the policy passes it over."""
    return replace(batch, token_weights=torch.zeros_like(batch.token_weights))


def _compares(run: Run) -> bool:
    """Whether the advantage has a baseline: then a reward by itself is worth nothing."""
    advantage, alone = build(run.advantage), [1.0]
    if takes_turns(run.advantage["_target_"]):
        return not any(advantage([alone])[0])
    return advantage(alone) == [0.0]


_STATE = "learner.json"


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """Knobs of the training processes (conf/train.yaml explains them)."""

    ranks: int | None
    devices: list[int | str] | None
    tokens_per_micro_batch: int
    logprob_chunk: int
    max_grad_norm: float
    gradient_checkpointing: bool
    compile: bool
    num_threads: int | None
    checkpoint_every: int
    keep_checkpoints: int
    max_nonfinite_steps: int
    wait_timeout: float


class Learner:
    """One rank's share; all ranks call every method together."""

    def __init__(self, run: Run, run_folder: RunFolder, ranks: Ranks) -> None:
        self._run, self._ranks = run, ranks
        self._settings: TrainerSettings = build(run.trainer)()
        self._temperature: float = build(run.sampler)().temperature
        self._dtype: torch.dtype = getattr(torch, run.model["dtype"])
        head_dtype = run.model["head_dtype"]
        self._head_dtype: torch.dtype | None = getattr(torch, head_dtype) if head_dtype else None
        self._kl: KLPenalty = build(run.kl)()
        self._beta = self._kl.beta
        self.policy = self._load_policy(run_folder.model())
        self._reference = self._load_reference(run_folder.model())
        self._critic = self._load_critic(run_folder.model())
        self._objective = Objective(
            build(run.loss), build(run.correction), self._kl, run.entropy_bonus
        )
        self._prepare = Preparation(
            self.policy,
            self._reference,
            keeps_old=run.updates_per_batch > 1,
            kl=self._kl,
            compared=_compares(run),
            critic=self._critic,
        )

    def _load_policy(self, folder: Path) -> Policy:
        run, settings = self._run, self._settings
        return Policy(
            load_trained(run, folder),
            build(run.optim)(),
            self._ranks,
            deepspeed_config=run.deepspeed,
            max_steps=run.max_steps,
            max_grad_norm=settings.max_grad_norm,
            logprob_chunk=settings.logprob_chunk,
            temperature=self._temperature,
            entropy_gradient=run.entropy_bonus != 0,
            head_dtype=self._head_dtype,
        )

    def _load_reference(self, folder: Path) -> Reference | None:
        """None where nothing reads one: it would cost as much memory as the policy."""
        if not needs_reference(asdict(self._run)):
            return None
        setting = ReferenceSetting(
            policy=self.policy,
            model=folder,
            dtype=self._dtype,
            temperature=self._temperature,
            logprob_chunk=self._settings.logprob_chunk,
            max_seq_len=self._run.max_seq_len,
            seed=self._run.seed,
            vocabulary=self.policy.vocabulary,
            reads_candidates=compares_distributions(self._run.loss["_target_"]),
            head_dtype=self._head_dtype,
        )
        return build(self._run.reference)().start(setting)

    def _load_critic(self, folder: Path) -> Critic | None:
        """A model and an optimizer beside the policy's, if the run has a critic."""
        setting = CriticSetting(
            lambda: load_trained(self._run, folder),
            self._ranks,
            self._run.deepspeed,
            self._run.max_steps,
            self._settings.max_grad_norm,
        )
        return build(self._run.critic)().start(setting)

    def update(self, batch: RankBatch, observer: Observer | None = None) -> dict[str, float]:
        """Train on a batch, and let what follows the policy follow; return the step's metrics.

        `observer`: is shown what the first update makes of every token.
        """
        batches, fixed = self._prepare(batch, self._beta)
        updates = self._run.updates_per_batch
        alone = self._critic is not None and self._critic.trains_alone(batch.step)
        stats = self.policy.update(
            batch,
            self._objective,
            batches=[_weightless(b) for b in batches] if alone else batches,
            updates=updates,
            beta=self._beta,
            observer=observer,
        )
        if self._critic:
            learned = self._critic.update(batch.step, batches, updates)
            # A run whose critic is broken must end as one whose policy is.
            skipped = max(stats["train/skipped"], learned.get("train/critic_skipped", 0.0))
            stats |= {**learned, "train/skipped": skipped}
        if "train/kl_divergence" in stats:
            stats["train/kl_beta"] = self._beta  # the one that acted, before it is adapted
            self._beta = self._kl.next_beta(self._beta, stats["train/kl_divergence"])
        # After the update: a refresh takes the weights that it has just made.
        if self._reference:
            self._reference.after_step(batch.step + 1)
        return {**stats, **fixed}

    def save(self, folder: Path) -> None:
        """Write everything that `load` needs."""
        self.policy.save(folder)
        if self._critic:
            self._critic.save(folder)
        if self._reference:
            self._reference.save(folder)
        if self._ranks.first:
            # All else that moves is DeepSpeed's or the reference's.
            (folder / _STATE).write_text(json.dumps({"beta": self._beta}))

    def load(self, folder: Path) -> None:
        """Take up the state that `save` wrote."""
        self.policy.load(folder)
        if self._critic:
            self._critic.load(folder)
        if self._reference:
            self._reference.load(folder)
        self._beta = json.loads((folder / _STATE).read_text())["beta"]
