"""Compose the losses to compare: the loss of the run, and the losses of the command line.

    loss=gspo,dapo correction=none      two arms: the run's command line with these values

An arm is the run's configuration with other values of keys in `CHANGEABLE`. On recorded tokens, no
other key changes the objective's gradient with respect to log pi, the trainer's logprobs.
"""

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hydra import initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from torch import Tensor

from lab.cli.hydra_errors import explain_hydra_error
from lab.cli.launch import compose_config
from lab.losses.recorded import RecordedBatch
from losses.groups import ScoredGroup
from losses.tokens import Tokens
from rl.config.build import build, component
from rl.config.learned import Learned
from rl.config.schedules import Schedules, join_schedules, split_schedules
from rl.config.schema import ConfigError, Run
from rl.config.shipped import CONF
from rl.dry_call.learn import run_with_facts
from rl.learner.objective import Objective
from rl.runtime.folder import RunFolder
from rl.runtime.start_record import read_overrides, read_record
from rl.runtime.text import key_of

CHANGEABLE = ("loss", "correction", "kl", "aggregation", "advantage")
RECORDED = "as recorded"


@dataclass(frozen=True, eq=False)
class Arm:
    name: str
    run: Run
    base: Run  # the run that recorded the tokens
    ignored: tuple[str, ...] = ()  # other keys that the arm changes; the comparison ignores them
    has_model: bool = False  # whether the comparison runs the model (step=true)

    @property
    def changed_keys(self) -> list[str]:
        return [key for key in CHANGEABLE if not self._is_unchanged(key)]

    def __post_init__(self) -> None:
        """Raise ValueError if recorded numbers do not suffice to compute this arm."""
        learned, field = Learned.of(self.run), "kl_from_uniform"
        if (learned.reads_candidates or learned.reads({field})) and not self.has_model:
            needs = f"a loss that compares distributions or reads {field} needs the model"
            raise ValueError(f"{self.name}: {needs}: add step=true")
        if not self._is_unchanged("advantage"):
            if not Learned.of(self.run).batch_credit_is_neutral:
                raise ValueError(
                    f"{self.name}: a comparison cannot compute batch_credit from new advantages: "
                    f"keep the run's advantage, {self.base.advantage['_target_']}"
                )
            is_penalised = build(self.base.kl)().place == "reward" and self.base.kl["beta"]
            is_normalised = self.base.reward["normalise_each"]
            if "estimator" in self.base.critic or is_penalised or is_normalised:
                raise ValueError(
                    f"{self.name}: a comparison cannot compute new advantages from a critic, a KL "
                    "penalty in the reward or normalised rewards: remove advantage=..., or add the "
                    "run's advantage=... if the loss chooses another"
                )

    def _is_unchanged(self, key: str) -> bool:
        own, base = (join_schedules(run.plain())[key] for run in (self.run, self.base))
        return own == base

    def with_credit(self, batch: RecordedBatch) -> tuple[Tokens, Tensor]:
        """Return the tokens with this arm's advantages, and the weight of each token [N].

        Raise ValueError if the arm depends on the whole batch and not all of it was recorded.
        """
        needs_batch = self.has_model or hasattr(component(self.run.loss), "statistics")
        if (needs_batch or not self._is_unchanged("aggregation")) and not batch.is_whole:
            raise ValueError(
                f"{self.name}: this arm depends on the whole batch of step {batch.step}, but the "
                "run recorded only some of its groups: train with record=all"
            )
        tokens, weights = batch.tokens, batch.weights
        if not self._is_unchanged("advantage"):
            tokens = _recompute_advantages(batch, self)
        return tokens, weights if self._is_unchanged("aggregation") else _weights(self.run, batch)

    def gradient(self, batch: RecordedBatch, beta: float) -> tuple[float, Tensor]:
        """Return the objective of the recorded tokens, and its gradient [N] with respect to log pi.

        `beta`: the recorded weight of the KL penalty. An arm with another `kl` uses its own weight.
        """
        kl = build(self.run.kl)()
        if self.run.kl["beta"] and batch.tokens.ref_logprobs is None:
            raise ValueError(
                f"{self.name}: the run recorded no reference logprobs: remove kl=..., or add "
                "kl=none if the loss chooses a penalty"
            )
        tokens, weights = self.with_credit(batch)
        schedules, loss = Schedules.of(vars(self.run)), component(self.run.loss)
        objective = Objective(loss, build(self.run.correction), kl, self.run.entropy_bonus)
        objective = replace(objective, **schedules.options("", batch.step))
        objective = schedules.at(batch.step, objective, token_loss="loss", correction="correction")
        if hasattr(loss, "statistics"):
            statistics = loss.statistics(tokens).double()  # `tokens` has the tokens of all ranks
            objective = replace(objective, token_loss=partial(loss, statistics=statistics))
        logprobs = tokens.logprobs.clone().requires_grad_()
        if not self._is_unchanged("kl"):
            beta = schedules.options("kl", batch.step).get("beta", kl.beta)
        loss, _ = objective.per_token(tokens, logprobs, tokens.entropies, beta)
        value = (weights.to(loss.dtype) * loss).sum()
        value.backward()
        assert logprobs.grad is not None
        return value.item(), logprobs.grad


def arms_of(folder: RunFolder, words: Sequence[str], has_model: bool = False) -> list[Arm]:
    """Return the run's own arm, and an arm per combination of the override values in `words`."""
    # Make user modules importable.
    sys.path += [read_record(folder).get("started_in", "."), str(Path.cwd())]
    try:
        base = Run.load(folder.config)
        arms = [Arm(RECORDED, base, base, has_model=has_model)]
        parsed = OverridesParser.create().parse_overrides(list(words))
    except HydraException as error:
        raise explain_hydra_error(error, list(words)) from error
    except TypeError as error:
        raise ValueError(
            f"{folder} is a run of an older version and lacks options that losses now read: train "
            "the run again, or compare with the older version"
        ) from error
    for override in parsed:
        key = override.get_key_element().lstrip("+~").split("@")[0].split(".")[0]
        if key not in CHANGEABLE:
            raise ValueError(f"{key} cannot be compared: choose from {', '.join(CHANGEABLE)}")
    values = [
        [f"{one.get_key_element()}={value}" for value in one.sweep_string_iterator()]
        if one.is_sweep_override()
        else [str(one.input_line)]
        for one in parsed
    ]
    before = _compose_run(folder, []) if words else {}
    for chosen in product(*values) if words else ():
        config = _compose_run(folder, list(chosen))
        others = config.keys() - {*CHANGEABLE, "run_name"}
        ignored = sorted(key for key in others if config[key] != before.get(key))
        run = run_with_facts(split_schedules(config))
        arms.append(Arm(" ".join(chosen), run, base, tuple(ignored), has_model))
    return arms


def _compose_run(folder: RunFolder, words: list[str]) -> dict[str, Any]:
    record = read_record(folder)
    flags, _ = get_args_parser().parse_known_args(list(map(str, record.get("command", []))))
    started_in = Path(record.get("started_in", "."))
    paths = (started_in / (flags.config_dir or "conf"), started_in / "conf", Path("conf").resolve())
    own = [path for path in dict.fromkeys(paths) if path.is_dir()]
    folders = ",".join(f"file://{path}" for path in [*own, CONF])
    keys = {word.partition("=")[0].split("@")[0] for word in words}
    before = read_overrides(folder)
    kept = [word for word in before if key_of(word).split("@")[0].split(".")[0] not in keys]
    primary = own[0] if flags.config_name and own else CONF
    try:
        with initialize_config_dir(str(primary), version_base=None):
            lines = [f"hydra.searchpath=[{folders}]", *kept, *words]
            return compose_config(flags.config_name or "train", lines)
    except HydraException as error:
        folder_flags = [f"--config-dir={path}" for path in own[:1]]
        found = explain_hydra_error(error, [*folder_flags, *kept, *words]).problems
        raise ConfigError([f"{' '.join(words or ['the run'])}: {p}" for p in found]) from error


def _weights(run: Run, batch: RecordedBatch) -> Tensor:
    """Return the token weights [N] that `run`'s aggregation gives the recorded rollouts."""
    rollouts, turns = batch.tokens.rollout_ids, batch.tokens.turns  # [N]
    groups = dict(zip(rollouts.tolist(), batch.tokens.group_ids.tolist(), strict=True))
    width = int(turns.max()) + 1
    size = (int(rollouts.max()) + 1) * width
    counts = torch.bincount(rollouts * width + turns, minlength=size).view(-1, width)[[*groups]]
    if not Learned.of(run).aggregation_takes_turns:
        lengths = counts.sum(1).tolist()
        return torch.tensor(build(run.aggregation)(lengths, [*groups.values()]))[rollouts]
    by_turn = [np.trim_zeros(row, "b").tolist() for row in counts.numpy()]
    weights = build(run.aggregation)(by_turn, [*groups.values()])
    pairs = zip(rollouts.tolist(), turns.tolist(), strict=True)
    return torch.tensor([weights[rollout][turn] for rollout, turn in pairs])


def _recompute_advantages(batch: RecordedBatch, arm: Arm) -> Tokens:
    """Return the tokens with the advantages that `arm` gives to the recorded shaped rewards."""
    groups: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    trained = {batch.lines[id]["group"] for id in batch.rollout_ids}
    for line in batch.lines.values():
        if line["group"] in trained:
            groups[line["group"], line.get("role")].append(line)
    advantage, numbers = component(arm.run.advantage), dict[str, Any]()
    for members in groups.values():
        if any(line.get("turn_rewards") for line in members):
            raise ValueError(
                f"{arm.name}: a comparison cannot recompute advantages from rewards per turn: "
                "remove advantage=..., or add the run's advantage=... if the loss chooses another"
            )
        rewards = [line["shaped_reward"] for line in members]
        group = ScoredGroup(
            rewards=rewards,
            turn_rewards=[
                None if reward is None else [*[0.0] * (max(line["turns"], 1) - 1), reward]
                for line, reward in zip(members, rewards, strict=True)
            ],
            named_rewards=[line["rewards"] for line in members],
            lengths=[line["tokens"] for line in members],
            rollouts=[SimpleNamespace(**line) for line in members],
        )
        numbers |= zip([line["id"] for line in members], advantage(group), strict=True)
    learned, tokens = Learned.of(arm.run), batch.tokens
    indices = tokens.turns if learned.advantage_by_turn else tokens.positions
    is_number = not (learned.advantage_by_turn or learned.advantage_by_token)
    ids = [batch.rollout_ids[row] for row in tokens.sequence_ids.tolist()]
    values = [
        numbers[id] if is_number else numbers[id][index]
        for id, index in zip(ids, indices.tolist(), strict=True)
    ]
    return replace(tokens, advantages=torch.tensor(values, dtype=tokens.advantages.dtype))
