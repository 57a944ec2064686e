"""The mistakes that `python -m tests.mutations` tries, in the order of a step."""

from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).parents[2]


@dataclass(frozen=True)
class Mutation:
    """A plausible mistake in one file: the text `old`, which occurs once, becomes `new`."""

    name: str  # begins with the module
    file: str
    old: str
    new: str
    named: str = ""  # fast tests that should fail; by default the test file of the module
    server: str = ""  # a test with the real vLLM that should fail, if no fast test can

    @property
    def tests(self) -> list[str]:
        """Return the fast tests, as arguments of pytest."""
        path = Path(self.file)
        named = self.named or f"tests/{path.parent}/test_{path.stem}.py"
        return [] if self.server else named.split()

    def applied(self, root: Path) -> str:
        """Return the file with the mistake; ValueError if `old` does not occur exactly once."""
        text = (root / self.file).read_text()
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: its old text occurs {count} times in {self.file}")
        return text.replace(self.old, self.new)


MUTATIONS = (
    Mutation(
        "gae: the next value is missing",
        "losses/gae.py",
        "delta = rewards[:, step] + gamma * next_value - values[:, step]",
        "delta = rewards[:, step] - values[:, step]",
        "tests/losses/test_estimators.py",
    ),
    Mutation(
        "squared_error: minimum instead of maximum",
        "losses/squared_error.py",
        "torch.maximum(error, clipped)",
        "torch.minimum(error, clipped)",
        "tests/losses/test_estimators.py",
    ),
    Mutation(
        "value_credit: a turn's reward before its last token",
        "rl/learner/value_credit.py",
        "torch.searchsorted(ordered, numbers, right=True)",
        "torch.searchsorted(ordered, numbers, right=False)",
    ),
    Mutation(
        "value_credit: values trained at every token of a turn",
        "rl/learner/value_credit.py",
        "else advantages, returns, starts)",
        "else advantages, returns, trained)",
    ),
    Mutation(
        "token_table: every rollout has the position of the next one",
        "rl/learner/token_table.py",
        "self._starts = lengths.cumsum(0) - lengths",
        "self._starts = lengths.cumsum(0) - lengths[0]",
        "tests/rl/learner/test_critic.py",
    ),
    Mutation(
        "critic: unscored rollouts train",
        "rl/learner/critic.py",
        "table.exists & torch.tensor(batch.rewards).isfinite()[:, None]",
        "table.exists",
    ),
    Mutation(
        "cispo: the sign of the advantage is flipped",
        "losses/cispo.py",
        "loss = -weight * tokens.advantages",
        "loss = weight * tokens.advantages",
        "tests/losses/test_token_losses.py",
    ),
    Mutation(
        "ppo_clip: minimum instead of maximum",
        "losses/ppo_clip.py",
        "loss = torch.maximum(",
        "loss = torch.minimum(",
        "tests/losses/test_token_losses.py",
    ),
    Mutation(
        "masked_is: the mask is missing",
        "losses/masked_is.py",
        "-(keep * ratio * tokens.advantages)",
        "-(ratio * tokens.advantages)",
        "tests/losses/test_token_losses.py",
    ),
    Mutation(
        "dppo: the bounds are swapped",
        "losses/dppo.py",
        "low, high = ~rises & (moved < -delta_low), rises & (moved > delta_high)",
        "low, high = ~rises & (moved < -delta_high), rises & (moved > delta_low)",
        "tests/losses/test_token_losses.py",
    ),
    Mutation(
        "advantages: the standard deviation lacks Bessel's correction",
        "losses/advantages.py",
        "math.fsum(c * c for c in centred) / (len(scorable) - 1)",
        "math.fsum(c * c for c in centred) / len(scorable)",
    ),
    Mutation(
        "aggregation: counts rows instead of tokens",
        "losses/aggregation.py",
        "num_tokens = sum(lengths)",
        "num_tokens = len(lengths)",
    ),
    Mutation(
        "aggregation: counts prompts without tokens",
        "losses/aggregation.py",
        "sum(tokens > 0 for tokens in tokens_of.values())",
        "len(tokens_of)",
    ),
    Mutation(
        "correction: trainer and vLLM are swapped",
        "losses/correction.py",
        "return (old_logprobs - rollout_logprobs).detach()",
        "return (rollout_logprobs - old_logprobs).detach()",
    ),
    Mutation(
        "kl: k3 of the reverse ratio",
        "losses/kl.py",
        "return (-clamped).exp() + clamped - 1",
        "return clamped.exp() - clamped - 1",
        "tests/losses/test_estimators.py",
    ),
    Mutation(
        "objective: the sign of the KL penalty is flipped",
        "rl/learner/objective.py",
        "loss = loss + beta * divergence",
        "loss = loss - beta * divergence",
        "tests/rl/learner/test_objective_by_hand.py",
    ),
    Mutation(
        "objective: the sign of the entropy bonus is flipped",
        "rl/learner/objective.py",
        "loss = loss - self.entropy_bonus * entropies",
        "loss = loss + self.entropy_bonus * entropies",
        "tests/rl/learner/test_objective_by_hand.py",
    ),
    Mutation(
        "objective: divides by the size of the micro-batch",
        "rl/learner/objective.py",
        "(self.token_weights.to(loss.dtype) * loss).sum()",
        "(self.token_weights.to(loss.dtype) * loss).mean()",
        "tests/rl/learner/test_objective_by_hand.py",
    ),
    Mutation(
        "objective: the correction is missing",
        "rl/learner/objective.py",
        "loss = corrected.weights * loss",
        "loss = 1.0 * loss",
        "tests/rl/learner/test_objective_by_hand.py",
    ),
    Mutation(
        "observation: the gradient of the entropies is recorded",
        "rl/learner/observation.py",
        '"grad": grads[0]',
        '"grad": grads[1]',
        "tests/rl/learner/test_objective_by_hand.py",
    ),
    Mutation(
        "observation: corrected tokens count as kept",
        "rl/learner/observation.py",
        "batch.token_weights * correction",
        "batch.token_weights",
        "tests/rl/learner/test_objective_by_hand.py",
    ),
    Mutation(
        "logprobs: the temperature is ignored",
        "rl/learner/output_head.py",
        "torch.float32)).div_(temperature)",
        "torch.float32))",
        "tests/rl/learner/test_logprobs.py",
    ),
    Mutation(
        "logprobs: shifted by one token",
        "rl/model/shared_prefixes.py",
        "return hidden[:, :-1][mask[:, 1:]]",
        "return hidden[:, 1:][mask[:, 1:]]",
        "tests/rl/learner/test_logprobs.py",
    ),
    Mutation(
        "shared_prefixes: a sliding window is ignored",
        "rl/model/shared_prefixes.py",
        'kwargs.get("sliding_window")',
        "None",
    ),
    Mutation(
        "shared_prefixes: completion tokens read the states after them",
        "rl/model/shared_prefixes.py",
        "before=by_row[:, :-1][mask[:, 1:]]",
        "before=by_row[:, 1:][mask[:, 1:]]",
    ),
    Mutation(
        "output head: its weight's gradient summed in bfloat16",
        "rl/learner/output_head.py",
        "torch.zeros_like(weight, dtype=exact)",
        "torch.zeros_like(weight)",
    ),
    Mutation(
        "output head: the entropy's gradient has the other sign",
        "rl/learner/output_head.py",
        "grads.sub_(p.mul_(log_p.add_(entropy))",
        "grads.add_(p.mul_(log_p.add_(entropy))",
    ),
    Mutation(
        "linear layers: gradients of weights are rounded",
        "rl/learner/weight_gradients.py",
        "return torch.mm(*factors, **how)",
        "return torch.mm(*factors, **how).bfloat16()",
    ),
    Mutation(
        "mismatch: stale tokens count in the effective sample size",
        "rl/learner/token_sums.py",
        "each.detach()[fresh].double()",
        "each.detach().double()",
    ),
    Mutation(
        "policy: DeepSpeed's mean over ranks is not reversed",
        "rl/learner/policy.py",
        " * self.ranks.world)",
        ")",
        "tests/rl/learner/test_updates.py::test_a_step_with_divergence_and_entropy_is_that_of_plain_torch",
    ),
    Mutation(
        "policy: stale tokens count as fresh",
        "rl/learner/policy.py",
        "fresh = batch.staleness == 0",
        "fresh = batch.staleness <= 1",
        "tests/rl/learner/test_updates.py::test_several_updates_of_a_batch_are_plain_steps_with_the_old_logprobs_fixed",
    ),
    Mutation(
        "policy: skipped steps are not reported",
        "rl/learner/policy.py",
        '"train/skipped": float(math.isnan(norm))',
        '"train/skipped": 0.0',
        "tests/rl/learner/test_policy.py::test_steps_by_muon_are_those_of_torch_on_the_same_gradients_and_are_resumed",
    ),
    Mutation(
        "optim: the schedule ends one step late",
        "rl/learner/optim.py",
        "max(max_steps - 1 - self.warmup_steps, 1)",
        "max(max_steps - self.warmup_steps, 1)",
    ),
    Mutation(
        "kl: beta is adapted in the wrong direction",
        "rl/learner/kl.py",
        "kl / self.target_kl - 1,",
        "1 - kl / self.target_kl,",
        "tests/rl/learner/test_objective_by_hand.py",
    ),
    Mutation(
        "preparation: the penalty lacks beta",
        "rl/learner/preparation.py",
        "return beta * self.kl.estimator(",
        "return self.kl.estimator(",
        "tests/rl/learner/test_updates.py::test_a_penalty_in_the_reward_counts_the_tokens_of_a_rollout_on_all_ranks",
    ),
    Mutation(
        "preparation: each rank computes its own mean penalty",
        "rl/learner/preparation.py",
        "        dist.all_reduce(sums)",
        "        pass",
        "tests/rl/learner/test_updates.py::test_a_penalty_in_the_reward_counts_the_tokens_of_a_rollout_on_all_ranks",
    ),
    Mutation(
        "reference: refreshes a step late",
        "rl/learner/learner.py",
        "self._reference.after_step(batch.step + 1)",
        "self._reference.after_step(batch.step)",
        "tests/rl/learner/test_learner.py::test_an_adaptive_beta_and_a_moving_reference_survive_a_checkpoint",
    ),
    Mutation(
        "learner: a resumed run starts with the first beta",
        "rl/learner/learner.py",
        'json.dumps({"beta": self._beta})',
        'json.dumps({"beta": self._kl.beta})',
        "tests/rl/learner/test_learner.py::test_an_adaptive_beta_and_a_moving_reference_survive_a_checkpoint",
    ),
    Mutation(
        "pusher: must_differ is ignored",
        "rl/weights/pusher.py",
        "if must_differ and fingerprint == self._last:",
        "if False:",
    ),
    Mutation(
        "pusher: vLLM stays paused",
        "rl/weights/pusher.py",
        "                receiver.resume()\n",
        "                pass\n",
    ),
    Mutation(
        "pusher: a restarted replica counts as connected",
        "rl/weights/pusher.py",
        "            self._connected.discard(receiver.replica.name)\n",
        "",
        "tests/rl/weights/test_several_replicas.py",
    ),
    Mutation(
        "probe: shifted by a token",
        "rl/weights/probe.py",
        "row[1:n]",
        "row[: n - 1]",
        "tests/rl/weights/test_pusher.py",
    ),
    Mutation(
        "fingerprint: ignores shapes",
        "rl/weights/fingerprint.py",
        "{name}:{tuple(weights[name].shape)}:{weights[name].dtype}",
        "{name}:{weights[name].dtype}",
    ),
    Mutation(
        "memory_file: loads weights without checking the fingerprint",
        "rl/weights/memory_file.py",
        "if found != expected:",
        "if False:",
    ),
    Mutation(
        "vllm_proof: LoRA's B is not scaled",
        "rl/weights/vllm_proof.py",
        "(1 if is_a else form.get_rank_and_scaling(name)[1])",
        "1",
        server="tests/runs/test_layer_proof.py",
    ),
    Mutation(
        "loop: pushes the version of the step instead of the next",
        "rl/trainer/loop.py",
        "step + 1, batch.micro_batches[0], stats, watch.phase",
        "step, batch.micro_batches[0], stats, watch.phase",
    ),
    Mutation(
        "loop: a resumed run drops a line too few",
        "rl/trainer/loop.py",
        "self.metrics.truncate_after(self.start - 1)",
        "self.metrics.truncate_after(self.start)",
    ),
    Mutation(
        "loop: the count of skipped steps is not reset",
        "rl/trainer/nonfinite.py",
        "self._in_a_row + 1 if skipped else 0",
        "self._in_a_row + int(skipped > 0)",
        named="tests/rl/trainer/test_loop.py",
    ),
    Mutation(
        "checkpoint: is complete before its state is written",
        "rl/trainer/checkpoint.py",
        """            run_folder.state_of(temporary).write_text(json.dumps(state))
            if final.exists():
                _delete_checkpoint(final)
            flush_and_rename(temporary, final)
""",
        """            if final.exists():
                _delete_checkpoint(final)
            flush_and_rename(temporary, final)
            run_folder.state_of(final).write_text(json.dumps(state))
""",
    ),
    Mutation(
        "rollouts_link: every rank gets the share of rank 0",
        "rl/trainer/rollouts_link.py",
        'Call(what="next_batch", rank=self._rank, step=step,',
        'Call(what="next_batch", step=step,',
        "tests/rl/test_wire.py",
    ),
    Mutation(
        "dispatcher: admits one version too early",
        "rl/rollouts/dispatcher.py",
        "limit = (version + 1 + self.max_staleness)",
        "limit = (version + 2 + self.max_staleness)",
    ),
    Mutation(
        "dispatcher: rejected groups are not replaced",
        "rl/rollouts/dispatcher.py",
        ") * self._new_per_step + self._num_rejected",
        ") * self._new_per_step",
    ),
    Mutation(
        "dispatcher: a group's version is that of its end",
        "rl/rollouts/dispatcher.py",
        "Group(index, example, version, rollouts,",
        "Group(index, example, self.version.number, rollouts,",
    ),
    Mutation(
        "dispatcher: trained groups come again after a resume",
        "rl/rollouts/dispatcher.py",
        "self._untrained.pop(group.index) for group in new",
        "self._untrained[group.index] for group in new",
    ),
    Mutation(
        "dispatcher: replayed and shown groups count for admission",
        "rl/rollouts/dispatcher.py",
        "self._new_per_step = self.buffer.num_new(self.groups_per_step)",
        "self._new_per_step = self.groups_per_step",
        "tests/rl/rollouts/test_mixed_buffer.py",
    ),
    Mutation(
        "mixed_buffer: a replayed group may be one version too old",
        "rl/rollouts/mixed_buffer.py",
        "step - g.version <= self.max_staleness",
        "step - g.version <= self.max_staleness + 1",
    ),
    Mutation(
        "mixed_buffer: a resumed run has no group to replay",
        "rl/rollouts/mixed_buffer.py",
        "list[Group]) if stored else []",
        "list[Group])[:0] if stored else []",
    ),
    Mutation(
        "mixed_buffer: a demonstration has a reward",
        "rl/rollouts/mixed_buffer.py",
        "Credit(None, (0.0,)",
        "Credit(1.0, (0.0,)",
    ),
    Mutation(
        "mixed_buffer: groups without an advantage are replayed",
        "rl/rollouts/mixed_buffer.py",
        "(c.compared == () or any(c.advantages))",
        "(c.compared == () or c.advantages)",
    ),
    Mutation(
        "plan: every token comes from the policy",
        "rl/rollouts/plan.py",
        "np.full(row.length, source, np.int8)",
        "np.full(row.length, 0, np.int8)",
        "tests/rl/rollouts/test_mixed_buffer.py",
    ),
    Mutation(
        "by_source: a demonstration has the policy's loss",
        "losses/by_source.py",
        "select(result.loss, imitation)",
        "select(result.loss)",
        "tests/losses/test_token_losses.py",
    ),
    Mutation(
        "finished group: a hint sees no reward",
        "rl/sampling/finished_group.py",
        "episode.reward = rollout.reward",
        "episode.reward = None",
        "tests/rl/sampling/test_hints.py",
    ),
    Mutation(
        "finished group: a hint of another rollout is reused",
        "rl/sampling/finished_group.py",
        "if newest[0] != (messages, prompt.tools):",
        "if not newest[1]:",
        "tests/rl/sampling/test_hints.py",
    ),
    Mutation(
        "dispatcher: pending groups play other examples after a resume",
        "rl/rollouts/dispatcher.py",
        "zip(self.state.pending, self.state.places, strict=True)",
        "[(index, self.order.next(index)) for index in self.state.pending]",
    ),
    Mutation(
        "buffer: an early batch counts as late",
        "rl/rollouts/buffer.py",
        "step + 1 + i // count > v + max_staleness",
        "step + 1 + i // count >= v + max_staleness",
    ),
    Mutation(
        "buffer: the newest are drawn first",
        "rl/rollouts/buffer.py",
        "self._groups.sort(key=lambda group: (group.version, group.index))",
        "self._groups.sort(key=lambda group: (-group.version, group.index))",
    ),
    Mutation(
        "credit: length is rewarded",
        "rl/rollouts/credit.py",
        "reward=c.reward - penalty",
        "reward=c.reward + penalty",
    ),
    Mutation(
        "packing: one rank gets all long rows",
        "rl/rollouts/packing.py",
        "        loads[lightest] += row.length\n",
        "",
        "tests/rl/rollouts/test_plan.py",
    ),
    Mutation(
        "plan: aggregates rollouts instead of prompts",
        "rl/rollouts/plan.py",
        "[group_ids[i] for i in training]",
        "[i for i in training]",
    ),
    Mutation(
        "plan: masked rollouts train",
        "rl/rollouts/plan.py",
        "in enumerate(everything) if credit.trains]",
        "in enumerate(everything)]",
        "tests/rl/rollouts/test_credit.py",
    ),
    Mutation(
        "resume_rules: the loss may change",
        "rl/config/resume_rules.py",
        '    "inference",\n',
        '    "inference",\n    "loss",\n',
    ),
)
