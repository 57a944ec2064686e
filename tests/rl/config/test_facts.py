"""A user's own loss, sampler, aggregation obey the rules of ours: by what they say and read."""

from importlib import invalidate_caches
from pathlib import Path

import pytest

from rl.config.check import check
from rl.config.facts import fact, is_imitator, is_marked, is_supervised, reads, uses_ratio
from rl.config.schema import ConfigError
from rl.config.signatures import source
from tests.support.composing import composed

LOSSES = """
import torch
import torch.nn.functional as F
from losses.tokens import TokenLoss, Tokens, ratio_to
from losses import gspo
from knobs_helpers import Gate, lesson

_gate = Gate()


def label_smoothing(tokens: Tokens, *, smoothing: float) -> TokenLoss:
    '''Reads no tokens.advantages.'''
    return TokenLoss(-tokens.logprobs * (1 - smoothing), {})


def by_hand(tokens: Tokens) -> TokenLoss:
    ratio = ratio_to(tokens.anchor, tokens.logprobs)
    return TokenLoss(-ratio * tokens.advantages, {})


def by_a_helper(tokens: Tokens) -> TokenLoss:
    return TokenLoss(-lesson(tokens) * tokens.logprobs, {})


def by_a_class(tokens: Tokens) -> TokenLoss:
    return TokenLoss(_gate(tokens), {})


def by_an_import(tokens: Tokens) -> TokenLoss:
    from losses.cispo import cispo

    return cispo(tokens, clip_low=0.0, clip_high=5.0)


def by_a_name(tokens: Tokens) -> TokenLoss:
    return TokenLoss(getattr(tokens, "advantages") * F.logsigmoid(tokens.logprobs), {})


def whole_sequences(tokens: Tokens) -> TokenLoss:
    return gspo.gspo(tokens, clip_low=3e-4, clip_high=4e-4)
"""

HELPERS = """
class Gate:
    def __call__(self, tokens):
        return -self._strength(tokens) * tokens.logprobs

    def _strength(self, tokens):
        return tokens.ref_logprobs - tokens.logprobs


def lesson(tokens):
    return tokens.advantages
"""

SEQUENCES = """
from losses.tokens import TokenLoss, Tokens, mean_per_sequence

PER_SEQUENCE = True


def mine(tokens: Tokens, *, ratio_low: float, ratio_high: float) -> TokenLoss:
    return TokenLoss(tokens.advantages * (tokens.logprobs - tokens.anchor), {})


ORDERED = ("ratio_low", "ratio_high")
"""

SAMPLERS = """
from dataclasses import dataclass
from typing import ClassVar

import rl.sampling.demonstrations as demonstrations


@dataclass(frozen=True, kw_only=True)
class Proverbs(demonstrations.Imitator):
    book: str

    def conversations(self, env, rng):
        while True:
            yield [{"role": "user", "content": "?"}, {"role": "assistant", "content": self.book}]


@dataclass(frozen=True, kw_only=True)
class Remote:
    uses_vllm: ClassVar[bool] = True
    max_staleness: int
"""


@pytest.fixture
def own(modules: Path) -> Path:
    """A folder with modules and choices of a user's own."""
    files = {
        "knobs_losses.py": LOSSES,
        "knobs_helpers.py": HELPERS,
        "knobs_sequences.py": SEQUENCES,
        "knobs_samplers.py": SAMPLERS,
        "loss/smooth.yaml": "_target_: knobs_losses.label_smoothing\nsmoothing: 0.1\n",
        "loss/helped.yaml": "_target_: knobs_losses.by_a_helper\n",
        "loss/mine.yaml": "_target_: knobs_sequences.mine\nratio_low: 0.5\nratio_high: 2.0\n",
        "sampler/proverbs.yaml": "_target_: knobs_samplers.Proverbs\nmax_staleness: 1\nbook: b\n",
        "env/remote.yaml": "_target_: knobs_samplers.Remote\nmax_staleness: 1\n",
    }
    for name, text in files.items():
        (modules / name).parent.mkdir(exist_ok=True)
        (modules / name).write_text(text)
    invalidate_caches()
    return modules


def problems(own: Path, *overrides: str) -> list[str]:
    """What is wrong with a run of own parts, composed as by --config-dir."""
    config = composed(*overrides, f"output_dir={own}/outputs", "run_name=r", config_dir=own)
    try:
        check(config)
    except ConfigError as error:
        return error.problems
    return []


@pytest.mark.parametrize(
    "overrides",
    [
        ["loss=smooth", "sampler=demonstrations"],
        ["loss=smooth", "sampler=proverbs"],
        ["loss=sft", "sampler=proverbs"],
        ["loss=sft", "sampler=proverbs", "group_size=1"],
        ["loss=smooth", "sampler=proverbs", "updates_per_batch=2"],
        ["loss=mine", "aggregation=sequence_mean"],
    ],
    ids=" ".join,
)
def test_own_parts_that_go_together_are_allowed(overrides: list[str], own: Path) -> None:
    assert problems(own, *overrides) == []


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["loss=smooth"], "knobs_losses.label_smoothing imitates whatever it is given"),
        (
            ["loss=helped", "sampler=proverbs"],
            "knobs_losses.by_a_helper needs rewards, and knobs_samplers.Proverbs gives text that",
        ),
        (
            ["loss=cispo", "sampler=proverbs"],
            "losses.cispo.cispo needs rewards and the sampler's logprobs, and knobs_samplers.",
        ),
        (["loss=mine"], "knobs_sequences.mine gives a whole sequence one weight"),
        (
            ["loss=mine", "aggregation=sequence_mean", "loss.ratio_low=3.0"],
            "loss.ratio_low=3.0 is not below loss.ratio_high=2.0: move one of them",
        ),
        (
            ["loss=sft", "sampler=proverbs", "evaluation=default", "evaluation.temperature=1"],
            "evaluation plays the policy, and with knobs_samplers.Proverbs no vLLM is started",
        ),
        (["loss=sft", "sampler=proverbs", "buffer=difficulty"], "buffer says what to do with"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_own_parts_that_do_not_go_together_are_refused(
    overrides: list[str], said: str, own: Path
) -> None:
    (problem,) = problems(own, *overrides)
    assert problem.startswith(said)


@pytest.mark.parametrize(
    ("loss", "what_is_read"),
    [
        ("label_smoothing", set()),
        ("by_hand", {"advantages", "anchor"}),
        ("by_a_helper", {"advantages"}),
        ("by_a_class", {"ref_logprobs"}),
        ("by_an_import", {"advantages", "anchor"}),
        ("by_a_name", {"advantages"}),
        ("whole_sequences", {"advantages", "anchor"}),
    ],
)
def test_a_loss_reads_what_its_helpers_read_and_not_what_its_neighbours_do(
    loss: str, what_is_read: set[str], own: Path
) -> None:
    target = f"knobs_losses.{loss}"
    fields = ("advantages", "anchor", "rollout_logprobs", "old_logprobs", "ref_logprobs")
    assert {field for field in fields if reads(target, {field})} == what_is_read
    assert is_supervised(target) == (not what_is_read)
    assert uses_ratio(target) == ("anchor" in what_is_read)


def test_a_mark_holds_for_what_calls_it_for_the_functions_named_and_for_subclasses(
    own: Path,
) -> None:
    assert is_marked("knobs_losses.whole_sequences", "PER_SEQUENCE")
    assert not is_marked("knobs_losses.by_hand", "PER_SEQUENCE")
    assert is_marked("losses.aggregation.sequence_mean", "PER_SEQUENCE")
    assert not is_marked("losses.aggregation.token_mean", "PER_SEQUENCE")
    assert is_imitator("knobs_samplers.Proverbs")
    assert not is_imitator("knobs_samplers.Remote")
    assert fact("rl.learner.optim.Muon", "whole_matrices", False)
    assert not fact("rl.learner.optim.AdamW", "whole_matrices", False)


def test_a_file_may_say_no_to_a_mark_of_what_it_calls(own: Path) -> None:
    (own / "knobs_no.py").write_text(
        "from losses.gspo import gspo\nPER_SEQUENCE = False\n\n\ndef f(tokens):\n"
        "    return gspo(tokens, clip_low=1.0, clip_high=1.0)\n"
    )
    invalidate_caches()
    assert not is_marked("knobs_no.f", "PER_SEQUENCE")


def test_no_library_is_parsed_to_know_what_a_loss_reads(own: Path) -> None:
    assert reads("knobs_losses.by_a_name", {"advantages"})
    assert source.cache_info().currsize == 2  # its own file and losses/tokens.py: no torch
