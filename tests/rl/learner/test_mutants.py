"""Single parts of the learner, without a model: sums over ranks, penalties, what is kept."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from losses.kl import k1
from rl.learner.kl import KLPenalty
from rl.learner.learner import Learner
from rl.learner.logprobs import PolicyModule
from rl.learner.objective import Batch
from rl.learner.policy import Policy
from rl.learner.preparation import Preparation
from rl.learner.rows import Scores
from rl.records import MicroBatch, RankBatch


@pytest.fixture(scope="module")
def alone():
    """A world of one rank."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield SimpleNamespace(device=torch.device("cpu"), first=True, world=1)
    dist.destroy_process_group()


class Biased(nn.Module):
    """A model of five words whose head has a bias, as far as PolicyModule asks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5)

    def get_output_embeddings(self):
        return self.head

    def base_model(self, input_ids, use_cache):
        return SimpleNamespace(last_hidden_state=self.embedding(input_ids))


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_bias_of_the_output_head_counts(temperature):
    torch.manual_seed(0)
    model = Biased()
    tokens, mask = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[False, True, False, True]])
    logprobs, _ = PolicyModule(model, chunk=1)(tokens, mask, temperature)
    logits = model.head(model.embedding(tokens))[0]
    expected = (logits / temperature).log_softmax(-1)[[0, 2], [2, 4]]
    torch.testing.assert_close(logprobs, expected)


def micro(versions):
    shape = (1, len(versions))
    return MicroBatch(
        token_ids=np.zeros(shape, np.int32),
        completion_mask=np.array([versions]) >= 0,
        rollout_logprobs=np.zeros(shape, np.float32),
        advantages=np.ones(shape, np.float32),
        token_weights=np.ones(shape, np.float32),
        token_versions=np.array([versions], np.int32),
        turns=np.array([versions], np.int32).clip(max=0),
        rollout_ids=np.zeros(1, np.int32),
        first_positions=np.zeros(1, np.int32),
        row_numbers=np.zeros(1, np.int32),
    )


def test_a_penalty_is_beta_times_the_divergence_of_a_rollout(alone):
    policy = SimpleNamespace(ranks=alone, score=lambda batch: torch.tensor([-1.0, -2.0]))
    scores = Scores(torch.tensor([-1.5, -1.0]))
    reference = SimpleNamespace(score=lambda batches: [scores] * len(batches), metrics=dict)
    kl = KLPenalty(estimator=k1, beta=0.5, place="reward", target_kl=None)
    prepare = Preparation(
        policy, reference, False, kl, compared=False
    )  # no baseline: all of it counts
    batch = RankBatch(
        step=0,
        micro_batches=(micro([-1, 0, 0]),),
        rewards=np.array([2.0], np.float32),
        group_ids=np.zeros(1, np.int32),
    )
    ((prepared,), metrics) = prepare(batch, 0.1)  # the present beta, not the first
    lost = 0.1 * (0.5 - 1.0)
    assert metrics["train/kl_penalty"] == pytest.approx(lost)
    assert prepared.advantages.tolist() == pytest.approx([1.0 - lost] * 2)


@pytest.fixture
def learner(alone, tmp_path):
    """A learner whose policy takes steps of divergence 10 and saves nothing."""
    made = Learner.__new__(Learner)
    made._run, made._ranks = SimpleNamespace(updates_per_batch=1), alone
    made._kl = KLPenalty(estimator=k1, beta=0.1, place="loss", target_kl=1.0)
    made._beta, made._objective = made._kl.beta, None
    made._critic = None
    made._prepare = lambda batch, beta: ([], {})
    made.policy = SimpleNamespace(
        update=lambda *_, **__: {"train/kl_divergence": 10.0},
        save=lambda folder: None,
        load=lambda folder: None,
    )
    made.steps = []
    made._reference = SimpleNamespace(
        after_step=made.steps.append, save=lambda folder: None, load=lambda folder: None
    )
    return made


def test_the_reference_hears_how_many_steps_are_done(learner):
    for step in range(3):
        learner.update(RankBatch(step=step, micro_batches=()))
    assert learner.steps == [1, 2, 3]


def test_beta_goes_on_where_it_was_after_a_checkpoint(learner, tmp_path):
    learner.update(RankBatch(step=0, micro_batches=()))
    moved = learner._beta
    assert moved == pytest.approx(0.1 * 1.02)
    learner.save(tmp_path)
    learner._beta = 7.0
    learner.load(tmp_path)
    assert learner._beta == moved


class Engine:
    """Logprobs of two tokens out of one weight; keeps what goes backward."""

    def __init__(self, norm=1.0) -> None:
        self.weight = torch.tensor([1.0, 2.0], requires_grad=True)
        self.optimizer, self.norm = SimpleNamespace(param_groups=[]), norm
        self.module = nn.Module()  # without parameters: what DeepSpeed does to them is its own test

    def __call__(self, token_ids, mask, temperature, *, entropies, candidates):
        return -self.weight, self.weight.detach()

    def backward(self, value):
        value.backward()

    def step(self):
        pass

    def zero_optimization_stage(self):
        return 0

    def get_global_grad_norm(self):
        return self.norm


def updated(alone, world=1, norm=1.0):
    """The metrics of step 4, the gradient, and which weight the objective gave to a logprob."""
    policy = Policy.__new__(Policy)
    policy.ranks = SimpleNamespace(device=alone.device, world=world, any=bool)
    policy.engine, policy._temperature = Engine(norm), 1.0

    def per_token(batch, logprobs, entropies, beta):
        return logprobs, {}

    batch = Batch.of(micro([-1, 3, 4]), alone.device, 4)
    weights = torch.tensor([3.0, 5.0])
    batch = replace(batch, rollout_logprobs=torch.tensor([-9.0, -2.5]), token_weights=weights)
    metrics = policy._update([batch], SimpleNamespace(per_token=per_token), 0.0, 1e-3, None)
    return metrics, policy.engine.weight.grad.tolist()


def test_gradients_are_summed_over_ranks_where_deepspeed_averages(alone):
    assert updated(alone)[1] == [-3.0, -5.0]
    assert updated(alone, world=2)[1] == [-6.0, -10.0]


def test_only_tokens_of_the_version_in_training_say_how_far_the_engine_is_off(alone):
    assert updated(alone)[0]["mismatch/sampled_mean_abs"] == pytest.approx(0.5)


@pytest.mark.parametrize(("norm", "skipped"), [(1.0, 0), (float("nan"), 1), (float("inf"), 1)])
def test_a_step_without_a_finite_gradient_is_reported_as_skipped(norm, skipped, alone):
    assert updated(alone, norm=norm)[0]["train/skipped"] == skipped


def test_what_batch_keeps_of_a_micro_batch_is_what_was_sampled():
    batch = Batch.of(micro([-1, 3, 4]), torch.device("cpu"), 4)
    assert batch.staleness.tolist() == [1, 0]
