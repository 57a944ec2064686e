"""Write the token record of a run whose forward passes are made up."""

import json
from dataclasses import replace
from functools import partial

import torch

from rl.config.build import build, component
from rl.config.learned import Learned
from rl.config.schedules import split_schedules
from rl.dry_call.learn import run_with_facts
from rl.learner.objective import Batch, Objective
from rl.learner.observation import observation
from rl.rollouts.plan import plan_batch
from rl.rollouts.sampled_tokens import TokenRecord
from rl.rollouts.service import train_line
from rl.runtime.folder import RunFolder
from rl.trainer.trained_tokens import StepRecord
from tests.support.composing import REPO, composed
from tests.support.forked_groups import forked_groups

STEP, UPDATES = 5, 2


def forward(micro, generator):
    """Return a micro-batch with made-up outputs of a forward pass, old and reference logprobs."""
    batch = Batch.of(micro, torch.device("cpu"), STEP)
    shifts = torch.randn(3, len(batch.turns), generator=generator) * 0.4
    old, ref, logprobs = batch.rollout_logprobs + shifts
    outputs = {"logprobs": logprobs, "entropies": shifts[0].abs()}
    return replace(batch, old_logprobs=old, ref_logprobs=ref, **outputs)


def record_run(path, *overrides, step=STEP, num_groups=6):
    """Write the files of a run with one step of two updates and three ranks, without a model."""
    options = [*overrides, "record=all", f"updates_per_batch={UPDATES}"]
    run = run_with_facts(split_schedules(composed(*options)))
    path.mkdir(exist_ok=True)
    folder = RunFolder(path)
    run.save(folder.config)
    record = {"overrides": options, "command": ["python", "train.py"], "started_in": str(REPO)}
    folder.overrides.write_text(json.dumps(record))
    groups = forked_groups(num_groups=num_groups)
    lines = [
        {"id": id, **train_line(group, played, credit, True)}
        for group in groups
        for id, played, credit in zip(group.rollout_ids, group.rollouts, group.credits, strict=True)
    ]
    folder.rollouts_of(step).parent.mkdir(exist_ok=True)
    folder.rollouts_of(step).write_text("".join(json.dumps(line) + "\n" for line in lines))
    TokenRecord(num_groups=None).write(folder, step, groups)
    ids = TokenRecord(num_groups=None).ids(groups, groups)
    by_turn = Learned.of(run).aggregation_takes_turns
    shares = plan_batch(
        groups, build(run.aggregation), per_turn=by_turn,
        step=step, ranks=3, tokens_per_micro_batch=60, metrics={},
    )  # fmt: skip
    records = [StepRecord(replace(share, record_ids=ids)) for share in shares]
    generator = torch.Generator().manual_seed(0)
    for update in range(UPDATES):
        batches = [
            (record, number, forward(micro, generator))
            for record, share in zip(records, shares, strict=True)
            for number, micro in enumerate(share.micro_batches)
        ]
        loss = component(run.loss)
        if hasattr(loss, "statistics"):
            sums = torch.stack([loss.statistics(batch).double() for *_, batch in batches]).sum(0)
            loss = partial(loss, statistics=sums)
        objective = Objective(loss, build(run.correction), build(run.kl)(), 0.01)
        for record, number, batch in batches:
            logprobs, entropies = batch.logprobs.requires_grad_(), batch.entropies.requires_grad_()
            value, metrics = objective.per_token(batch, logprobs, entropies, run.kl["beta"])
            leaves = [logprobs, entropies]
            grads = torch.autograd.grad(batch.weighted_sum(value), leaves, materialize_grads=True)
            record.observe(update, number, observation(batch, logprobs, value, grads, metrics))
    for rank, record in enumerate(records):
        record.write(folder, rank)
    return folder
