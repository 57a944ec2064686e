"""Combine policy, objective, reference and critic of a run into one training step."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from rl.config.build import build, component
from rl.config.facts import needs_reference
from rl.config.learned import Learned
from rl.config.schedules import Schedules
from rl.config.schema import Run
from rl.learner.critic import Critic, CriticSettings
from rl.learner.kl import KLPenalty
from rl.learner.logprobs import PolicyModule
from rl.learner.objective import Objective
from rl.learner.observation import Observer
from rl.learner.policy import Policy
from rl.learner.preparation import Preparation
from rl.learner.ranks import Ranks, num_resumed_steps
from rl.learner.reference.protocol import Reference, ReferenceSetting
from rl.model.loading import compile_layers, enable_gradient_checkpointing, load_model
from rl.model.shared_prefixes import share_prefixes, shares_prefixes
from rl.records import RankBatch
from rl.runtime.folder import RunFolder, naming_damage
from rl.runtime.given_files import load_json

log = logging.getLogger(__name__)
_STATE = "learner.json"


def load_for_training(run: Run, folder: Path, *, compiled: bool) -> PreTrainedModel:
    """Load the model in `folder` for training, with the run's adapter."""
    model = load_model(folder, getattr(torch, run.model.dtype), run.seed)
    # adapter_config.json names the base model by hub name (only the newest revision) or folder.
    name = None if run.init_from or run.model.get("revision") else run.model.path
    base = name if name and not Path(name).expanduser().exists() else str(folder)
    model = build(run.adapter)().attach(model, run.seed, base)
    if run.trainer.share_prefixes:
        share_prefixes(model)
    if run.trainer.gradient_checkpointing:
        enable_gradient_checkpointing(model)
    if compiled:
        try:
            compile_layers(model)
        except ValueError as error:
            if run.trainer.compile:
                raise
            log.warning("%s; the layers are not compiled", error)
    return model.train()


class Learner:
    """Policy, objective, reference and critic on one rank. All ranks call each method together."""

    def __init__(self, run: Run, run_folder: RunFolder, ranks: Ranks) -> None:
        self._run, self._ranks, self._model_folder = run, ranks, run_folder.initial_model()
        self._settings = run.trainer
        head_dtype = run.model.head_dtype
        self._head_dtype: torch.dtype | None = getattr(torch, head_dtype) if head_dtype else None
        self._kl: KLPenalty = build(run.kl)()
        self._beta = self._kl.beta
        self._compiled = run.compiles(on_gpu=ranks.device.type == "cuda")
        model = load_for_training(run, self._model_folder, compiled=self._compiled)
        module = PolicyModule(
            model,
            chunk=self._settings.logprob_chunk,
            entropy_gradient=run.entropy_bonus != 0 or "entropy_bonus" in run.schedules,
            kl_from_uniform=Learned.of(run).reads({"kl_from_uniform"}),
            head_dtype=self._head_dtype,
            compiled=self._compiled,
        )
        self.policy = Policy(
            module,
            build(run.optim)(),
            ranks,
            deepspeed_config=run.deepspeed,
            max_steps=run.max_steps,
            max_grad_norm=self._settings.max_grad_norm,
            temperature=run.sampler.temperature,
        )
        if run.init_optimizer and not num_resumed_steps(run_folder, ranks):
            self.policy.load(self._model_folder.parent)  # the checkpoint that contains this model
        self._reference = self._load_reference()
        self._critic = self._load_critic()
        # The plan of micro-batches counts a shared prefix once only if all models compute it once.
        self.shares_prefixes = shares_prefixes(model) and all(
            part.shares_prefixes for part in (self._reference, self._critic) if part
        )
        self._schedules = Schedules.of(run.plain())
        self._objective = Objective(
            component(run.loss), build(run.correction), self._kl, run.entropy_bonus
        )
        self._prepare = Preparation(
            self.policy,
            self._reference,
            keeps_old=run.updates_per_batch > 1,
            kl=self._kl,
            compared=Learned.of(run).advantage_compares,
            critic=self._critic,
            schedules=self._schedules,
        )

    def _load_reference(self) -> Reference | None:
        if not needs_reference(self._run.plain()):
            return None
        setting = ReferenceSetting(
            policy=self.policy,
            model=self._model_folder,
            dtype=getattr(torch, self._run.model.dtype),
            temperature=self._run.sampler.temperature,
            logprob_chunk=self._settings.logprob_chunk,
            max_seq_len=self._run.max_seq_len,
            seed=self._run.seed,
            reads_candidates=Learned.of(self._run).reads_candidates,
            head_dtype=self._head_dtype,
            share_prefixes=self._settings.share_prefixes,
        )
        return build(self._run.reference)().start(setting)

    def _load_critic(self) -> Critic | None:
        setting = CriticSettings(
            lambda: load_for_training(self._run, self._model_folder, compiled=self._compiled),
            self._ranks,
            self._run.deepspeed,
            self._run.max_steps,
            self._settings.max_grad_norm,
        )
        return build(self._run.critic)().start(setting)

    def update(self, batch: RankBatch, observer: Observer | None = None) -> dict[str, float]:
        # Seed dropout and custom losses at every step, so that checkpoints need no RNG state.
        sequence = np.random.SeedSequence((self._run.seed, batch.step, self._ranks.rank))
        torch.manual_seed(int(sequence.generate_state(1, np.uint64)[0]))
        scheduled = self._schedules.values(batch.step)
        self._beta = scheduled.get("kl.beta", self._beta)
        objective = replace(self._objective, **self._schedules.options("", batch.step))
        batches, fixed = self._prepare(batch, self._beta)
        updates = self._run.updates_per_batch
        trained = batches
        if self._critic and self._critic.trains_alone(batch.step):
            zeros = torch.zeros_like
            trained = [replace(b, token_weights=zeros(b.token_weights)) for b in batches]
        stats = self.policy.update(
            batch.step,
            trained,
            self._schedules.at(batch.step, objective, token_loss="loss", correction="correction"),
            updates=updates,
            beta=self._beta,
            observer=observer,
        )
        if self._critic:
            learned = self._critic.update(batch.step, batches, updates)
            # Also count updates that only the critic skipped, so that a broken critic ends the run.
            skipped = max(stats["train/skipped"], learned.get("train/critic_skipped", 0.0))
            stats |= {**learned, "train/skipped": skipped}
        if "train/kl_divergence" in stats:
            stats["train/kl_beta"] = self._beta  # the beta of this step, before it is adapted
            self._beta = self._kl.next_beta(self._beta, stats["train/kl_divergence"])
        # Refresh the reference after the update, because a refresh copies the new weights.
        if self._reference:
            self._reference.after_step(batch.step + 1)
        return {**stats, **fixed, **{f"schedule/{key}": v for key, v in scheduled.items()}}

    def save(self, folder: Path) -> None:
        for part in filter(None, (self.policy, self._critic, self._reference)):
            part.save(folder)
        if self._ranks.first:
            (folder / _STATE).write_text(json.dumps({"beta": self._beta}))

    def load(self, folder: Path) -> None:
        for part in filter(None, (self.policy, self._critic, self._reference)):
            part.load(folder)
        with naming_damage(folder / _STATE) as path:
            self._beta = float(load_json(path.read_bytes())["beta"])
