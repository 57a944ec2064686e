"""More cases of policy_worker.py: tokens that every rank records, beside the whole objective."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

BETA, BONUS = 0.3, 0.2
LOSSES = ("gspo", "ppo_clip", "cispo", "own")


def recorded(cases: Any, policy: Any) -> dict[str, Any]:
    """Two updates of forked groups, the second unobserved; the files of all ranks, joined."""
    from losses.aggregation import sequence_mean
    from losses.correction import tis_sequence
    from losses.kl import k3
    from rl.learner.kl import KLPenalty
    from rl.learner.objective import Batch
    from rl.rollouts.plan import plan_batch
    from rl.rollouts.sampled_tokens import TokenRecord
    from rl.runtime.folder import RunFolder
    from rl.runtime.token_files import read_rows
    from rl.trainer.trained_tokens import StepRecord
    from tests.support.forked_groups import forked_groups
    from tests.support.summed_objective import SummedObjective
    from tests.support.tiny_policy import filled

    *groups, rejected = forked_groups(num_groups=7)
    everything = TokenRecord(num_groups=None)
    folder = RunFolder(cases.folder / f"record{policy.zero_stage}")
    result: dict[str, Any] = {}

    def micro_batches(ranks: int, rank: int, budget: int, dtype: torch.dtype) -> Any:
        shares = plan_batch(
            groups, sequence_mean, step=step, ranks=ranks,
            tokens_per_micro_batch=budget, metrics={},
        )  # fmt: skip
        ids = everything.ids(groups, [*groups, rejected])
        share = replace(shares[rank], record_ids=ids)
        micros = (Batch.of(micro, cases.ranks.device, step) for micro in share.micro_batches)
        return share, [filled(micro, old=True, dtype=dtype) for micro in micros]

    for step, name in enumerate(LOSSES):
        objective = SummedObjective(
            loss(name),
            partial(tis_sequence, cap=1.05),
            KLPenalty(estimator=k3, beta=9.0, place="loss", target_kl=None),
            BONUS,
        )
        share, batches = micro_batches(cases.ranks.world, cases.ranks.rank, 60, torch.float32)
        record = StepRecord(share)
        policy.update(
            share, objective, batches=batches, updates=2, beta=BETA, observer=record.observe
        )
        record.write(folder, cases.ranks.rank)
        if cases.ranks.first:
            everything.write(folder, step, [*groups, rejected])
        dist.barrier()
        rows = {(row.id, row.row): row for row in read_rows(folder, step)}
        whole, all_batches = micro_batches(1, 0, 10**6, torch.float64)
        result[name] = beside(objective, whole, all_batches, rows)
        result[name]["observed"] = [len(record._observations), len(batches)]
    return result


def beside(objective: Any, whole: Any, batches: Any, rows: Any) -> dict[str, Any]:
    """The recorded grads beside autograd's of the objective of all rows at once, in float64."""
    keys, leaves, total = [], [], torch.zeros((), dtype=torch.float64)

    def column(name: str, keyed: Any) -> Any:
        values = [rows[key].columns[name][rows[key].columns["mask"]] for key in keyed]
        return torch.tensor([x for each in values for x in each], dtype=torch.float64)

    for micro, batch in zip(whole.micro_batches, batches, strict=True):
        ids = [whole.record_ids[i] for i in micro.rollout_ids]
        keyed = list(zip(ids, micro.row_numbers.tolist(), strict=True))
        leaf = column("pi", keyed).requires_grad_()
        total = total + objective(batch, leaf, column("entropy", keyed), BETA)[0]
        keys.append(keyed)
        leaves.append(leaf)
    expected = torch.cat(torch.autograd.grad(total, leaves))
    found = torch.cat([column("grad", keyed) for keyed in keys])
    trained = {key for keyed in keys for key in keyed}
    return {
        "error": float((found - expected).abs().max() / expected.abs().max()),
        "different": len({round(float(each), 12) for each in expected}),
        "trained": {key for key, row in rows.items() if row.trained} == trained,
        "untrained": sorted({id for id, _ in rows.keys() - trained}),
        "forked": any(row > 0 for _, row in trained),
    }


def loss(name: str) -> Any:
    """A shipped loss, or one that a user might write."""
    from losses.tokens import TokenLoss, log_ratio, mean_per_sequence
    from rl.config.build import build
    from tests.support.composing import chosen

    def own(tokens: Any) -> Any:
        gap = log_ratio(tokens.anchor, tokens.logprobs)
        means = mean_per_sequence(gap.square(), tokens.sequence_ids, tokens.num_sequences)
        focus = (-means).exp()[tokens.sequence_ids]
        return TokenLoss(-focus * tokens.advantages * gap.exp(), {"focus": focus.detach()})

    return own if name == "own" else build(chosen("loss", name))
