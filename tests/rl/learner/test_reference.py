"""References: the initial policy and how it is refreshed, a teacher's tokenizer and its server."""

from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch

from losses.kl import k1
from rl.learner.kl import KLPenalty
from rl.learner.logprobs import Rows
from rl.learner.preparation import Preparation
from rl.learner.ranks import Ranks
from rl.learner.reference import endpoint as endpoint_file
from rl.learner.reference import local as local_file
from rl.learner.reference.endpoint import Endpoint
from rl.learner.reference.local import FrozenModel, InitialPolicy
from rl.learner.reference.per_env import PerEnvironment
from rl.learner.reference.protocol import ReferenceSetting
from rl.model.tokenizer import Tokenizer
from rl.records import RankBatch
from rl.runtime.failure import RunFailed
from rl.runtime.folder import UnusableFile
from tests.rl.learner.test_objective import ROWS
from tests.support import tiny_policy
from tests.support.answers import Answers

torch.set_num_threads(1)

VOCABULARY = 320
SHARED = {"top_k": 3, "sees_hint": False}


def setting(folder, vocabulary=VOCABULARY, **changes):
    ranks = Ranks(0, 1, torch.device("cpu"))
    policy = SimpleNamespace(ranks=ranks, has_adapter=False, vocabulary=vocabulary)
    sizes = {"logprob_chunk": 7, "max_seq_len": 64, "seed": 0}
    given = {"model": folder, "dtype": torch.float32, "temperature": 1.0, **sizes, **changes}
    return ReferenceSetting(policy=policy, **given)


def batch() -> Rows:
    """Rows of 4 and 3 tokens and one without completion, padded to 5; the prompts are 2 and 1."""
    mask = [[False, False, True, True, False], [False, True, *[False] * 3], [False] * 5]
    token_ids = torch.tensor([[5, 6, 7, 8, 0], [9, 4, 3, 0, 0], [2, 2, 0, 0, 0]])
    return Rows(token_ids, torch.tensor(mask), ("words", "maths", ""))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with weights, its own teacher too."""
    folder = tiny_policy.model_folder(tmp_path_factory.mktemp("reference") / "model")
    tiny_policy.exact_model(folder, seed=5).float().save_pretrained(folder)
    return folder


def frozen(folder):
    return FrozenModel(path=str(folder), revision=None, dtype="float32", **SHARED)


def started(reference, folder, **changes):
    return reference.start(setting(folder, reads_candidates=True, **changes))


def test_a_hub_model_is_that_of_the_revision_in_its_own_dtype(folder, monkeypatch):
    asked = []
    monkeypatch.setattr(local_file, "local_folder", lambda *given: asked.append(given) or folder)
    model = FrozenModel(path="a/b", revision="v2", dtype="bfloat16", **SHARED)
    assert model.start(setting(folder))._module.model.dtype == torch.bfloat16
    assert asked == [("a/b", "v2", "reference")]


def test_a_teacher_scores_the_completion_tokens_and_the_likeliest_ones_and_never_changes(folder):
    teacher = started(frozen(folder), folder)
    (found,) = teacher.score([batch()])
    model, whole = tiny_policy.exact_model(folder, seed=5), []
    for ids, at in (([5, 6, 7], [1, 2]), ([9], [0])):
        whole += torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0, at].detach(), -1)
    whole = torch.stack(whole).float()
    best = whole.topk(3)
    near = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(found.logprobs, whole[range(3), [7, 8, 4]], **near)
    assert found.candidates.tolist() == best.indices.tolist()
    torch.testing.assert_close(found.candidate_logprobs, best.values, **near)
    teacher.after_step(1)
    torch.testing.assert_close(teacher.score([batch()])[0].logprobs, found.logprobs, rtol=0, atol=0)
    # A policy with fewer tokens than the teacher gets none that it does not know.
    first = int(found.candidates[0, 0])
    (found,) = started(frozen(folder), folder, vocabulary=first).score([batch()])
    assert found.candidates.max() < first


class Teacher(Answers):
    """vLLM's answer with prompt_logprobs=0; token t at position i has logprob -(t + i / 8)."""

    failures = 0
    instead = None  # (status, body) of every answer
    max_model_len = 65
    tokens: ClassVar[list] = []  # the tokens of every text; []: there is no such route
    likeliest: ClassVar[dict] = {}  # beside the given token, at each place

    def __init__(self, changes):
        super().__init__()
        self.seen = []
        vars(self).update(changes)

    def answer(self, path, body, number):
        if path == "/tokenize":
            about = {"tokens": self.tokens, "count": 1, "max_model_len": self.max_model_len}
            return 200 if self.tokens else 404, about
        self.seen.append((path, body))
        if len(self.seen) <= self.failures:
            return 503, {}
        entries = [
            {str(t): {"logprob": -(t + i / 8), "rank": 3, "decoded_token": "x"}, **self.likeliest}
            for i, t in enumerate(body["prompt"])
        ]
        return self.instead or (200, {"choices": [{"prompt_logprobs": [None, *entries[1:]]}]})


@pytest.fixture
def serve():
    """Return a function that starts a changed teacher and returns its URL and its requests."""
    with ExitStack() as stack:

        def start(**changes):
            teacher = Teacher(changes)
            return stack.enter_context(teacher.serving()), teacher.seen

        yield start


def teacher(url, **changes):
    given = {"api_key_variable": None, "timeout": 10.0, "max_retries": 0, **SHARED, **changes}
    return Endpoint(url=url, model="teacher", **given)


def endpoint(url, folder, max_retries=0, top_k=0):
    remote = teacher(url, max_retries=max_retries, top_k=top_k)
    return remote.start(setting(folder, reads_candidates=top_k > 0))


def test_a_server_scores_all_micro_batches_and_is_asked_again_if_it_fails(serve, folder):
    url, seen = serve(failures=1)
    teacher = endpoint(url + "/", folder, max_retries=1)
    for found in teacher.score([batch(), batch()]):
        assert found.logprobs.tolist() == [-(7 + 2 / 8), -(8 + 3 / 8), -(4 + 1 / 8)]
        assert found.logprobs.dtype == torch.float32
        assert found.candidates is found.candidate_logprobs is None
    assert len(seen) == 4 + 1
    assert teacher.metrics() == {"train/reference_retries": 1}
    # No padding, nothing after the last completion token, and nothing for the row without any.
    assert {tuple(body["prompt"]) for _, body in seen} == {(5, 6, 7, 8), (9, 4)}
    options = {(p, b["model"], b["prompt_logprobs"], b["max_tokens"]) for p, b in seen}
    assert options == {("/v1/completions", "teacher", 0, 1)}


def test_a_server_with_another_tokenizer_or_too_few_tokens_is_refused_at_the_start(serve, folder):
    # It samples a token behind what it scores, and has no place for one behind 64 of 64.
    sample = Tokenizer(folder).encode(endpoint_file._TEST_TEXT)
    endpoint(serve(tokens=sample)[0], folder)
    for changes, said in (
        ({"tokens": sample[:-1]}, "has another tokenizer than the policy, .*loss=sft .*"),
        (
            {"tokens": sample, "max_model_len": 64},
            "accepts 64 tokens, .*max_seq_len=64 tokens.*--max-model-len 65, or lower max_seq_len",
        ),
    ):
        url, seen = serve(**changes)
        with pytest.raises(RunFailed, match=rf"^reference\.url={url}/ {said}$"):
            endpoint(f"{url}/", folder)
        assert not seen


def likely(*logprobs):
    """Tokens 20, 21 and so on with these logprobs, as vLLM names them."""
    return {str(20 + i): {"logprob": x, "rank": i + 1} for i, x in enumerate(logprobs)}


def test_a_server_s_likeliest_tokens_are_those_with_the_highest_logprobs(serve, folder):
    """Places 2 and 3 of one row and 1 of the other; the given tokens have -7.25, -8.375, -4.125."""
    url, seen = serve(likeliest=likely(-0.5, -1.5, -7.5))
    empty = Rows(torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.bool), ("",))
    found, of_none = endpoint(url, folder, top_k=3).score([batch(), empty])
    assert found.logprobs.tolist() == [-7.25, -8.375, -4.125]
    # vLLM adds the given token to its three; where that is likelier than the third, it is one.
    assert found.candidates.tolist() == [[20, 21, 7], [20, 21, 22], [20, 21, 4]]
    thirds = (-7.25, -7.5, -4.125)
    assert found.candidate_logprobs.tolist() == [[-0.5, -1.5, third] for third in thirds]
    assert [body["prompt_logprobs"] for _, body in seen] == [3, 3]  # nothing for a row of no token
    assert (of_none.candidates.shape, of_none.candidates.dtype) == ((0, 3), torch.int64)


def test_candidates_that_the_policy_does_not_know_are_refused(serve, folder):
    url, _ = serve(likeliest={str(VOCABULARY): {"logprob": -0.1, "rank": 1}})
    with pytest.raises(RunFailed, match=f"returns the token id {VOCABULARY}, but the policy"):
        endpoint(url, folder, top_k=1).score([batch()])
    assert endpoint(url, folder, top_k=VOCABULARY)._top_k == VOCABULARY
    with pytest.raises(RunFailed, match=r"reference\.top_k=321 exceeds the policy's vocabulary"):
        endpoint(url, folder, top_k=VOCABULARY + 1)


def test_each_environment_s_rows_are_scored_by_its_own_teacher_in_any_order(serve, folder):
    """Rows words, maths, words: the token of the middle one is the folder's."""
    url, _ = serve(likeliest=likely(-0.5, -1.5, -2.5))
    token_ids = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    mask = torch.tensor([[False, True, True], [False, True, False], [False, False, True]])
    rows = Rows(token_ids, mask, ("words", "maths", "words"))
    (remote,), (local,) = (
        started(one, folder).score([rows]) for one in (teacher(url), frozen(folder))
    )
    assert remote.logprobs.tolist() == [-2.125, -3.25, -5.125, -9.25]
    teachers = {"maths": frozen(folder), "words": teacher(url)}
    reference = started(PerEnvironment(teachers=teachers), folder)
    lone = replace(rows, envs=("words", "words", "words"))
    *found, of_one = reference.score([rows, rows, lone])
    of_folder = torch.tensor([False, False, True, False])
    for field in ("logprobs", "candidates", "candidate_logprobs"):
        theirs, ours = (getattr(scores, field) for scores in (remote, local))
        expected = torch.where(of_folder if theirs.ndim == 1 else of_folder[:, None], ours, theirs)
        for scores in found:
            torch.testing.assert_close(getattr(scores, field), expected)
        torch.testing.assert_close(getattr(of_one, field), theirs)

    alike = PerEnvironment(teachers=dict.fromkeys(("maths", "words"), frozen(folder)))
    warm = replace(rows, temperatures=torch.tensor([[1.0], [2.0], [0.5], [4.0]]))
    sets = torch.tensor([[2, 7, 9], [3, 8, -1], [5, -1, -1], [-1, -1, -1]])
    for each in (warm, replace(rows, kept=sets)):
        (found,), (plain,) = (
            one.start(setting(folder)).score([each]) for one in (alike, frozen(folder))
        )
        torch.testing.assert_close(found.logprobs, plain.logprobs)
        assert found.candidates is plain.candidates is None
    assert found.logprobs[2] == 0
    assert (found.logprobs > local.logprobs + 0.01).tolist() == [True, True, True, False]


@pytest.mark.parametrize("shares", [False, True])
def test_a_reference_scores_the_policy_s_choices_after_its_own_prompt(folder, shares):
    """The rows are 5 | 6 7 and 5 | 6, and the hinted prompt is 9 4."""
    mask = np.pad(ROWS.completion_mask, ((0, 0), (1, 0)))
    rows = np.array([[5, 6, 7], [5, 6, 0]], np.int32)
    hints = np.array([[9, 4, 6, 7], [9, 4, 6, 0]], np.int32)
    micro = replace(ROWS, token_ids=rows, hinted_token_ids=hints, hinted_mask=mask)
    micro = replace(micro, envs=("words", "words"))
    given = setting(folder, share_prefixes=shares)
    kl = KLPenalty(estimator=k1, beta=0.0, place="loss", target_kl=None)
    reference = frozen(folder).start(given)
    assert reference.shares_prefixes == shares
    prepare = Preparation(given.policy, reference, keeps_old=False, kl=kl, compared=True)
    ((prepared,), _) = prepare(RankBatch(0, (micro,)), 0.0)
    scored = torch.tensor(hints).long()
    logits = tiny_policy.exact_model(folder, seed=5)(input_ids=scored).logits[:, :-1]
    expected = torch.log_softmax(logits.detach(), -1)[mask[:, 1:]][range(3), [6, 7, 6]]
    torch.testing.assert_close(prepared.ref_logprobs, expected.float(), rtol=1e-5, atol=1e-5)
    assert prepared.token_ids.tolist() == rows.tolist()  # what the policy trains on


@pytest.mark.usefixtures("one_rank")
def test_in_bfloat16_too_a_reference_follows_by_the_mix_and_survives_a_checkpoint(folder, tmp_path):
    """Two hundred refreshes of 0.01 towards a policy that stands still: 0.99 ** 200 are left."""
    given = setting(folder, dtype=torch.bfloat16)
    slow, fast = (InitialPolicy(refresh_every=1, refresh_mix=x, **SHARED) for x in (0.01, 1.0))
    both = PerEnvironment(teachers={"slow": slow, "fast": fast})
    teachers = both.start(given)
    reference = teachers._teachers["slow"]
    start = {n: p.clone() for n, p in reference._module.model.named_parameters()}
    given.policy.weights = lambda: {name: tensor + 1 for name, tensor in start.items()}
    for step in range(100):
        teachers.after_step(step)
    teachers.save(tmp_path)
    loaded = both.start(given)
    loaded.load(tmp_path)
    other = loaded._teachers["slow"]
    for name, parameter in loaded._teachers["fast"]._module.model.named_parameters():
        assert torch.equal(parameter, start[name] + 1)
    for name, average in reference._average.items():  # in float32, not as rounded to bfloat16
        assert torch.equal(other._average[name], average)
    for step in range(100):
        other.after_step(step)
    for name, parameter in other._module.model.named_parameters():
        # The tolerance is the spacing of bfloat16 between 1 and 4, where the norms' weights are.
        moved, expected = parameter.float() - start[name].float(), 1 - 0.99**200
        torch.testing.assert_close(moved, torch.full_like(moved, expected), rtol=0, atol=0.02)
    damaged, *_ = sorted(tmp_path.rglob("reference.safetensors"))
    damaged.write_bytes(b"no tensors")
    with pytest.raises(UnusableFile, match=f"{damaged} is damaged .*: delete its checkpoint"):
        loaded.load(tmp_path)


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (500, {"error": "broken"}, 'answered 500: {"error": "broken"}'),
        (
            400,
            "Requested prompt logprobs of 32, which is greater than max allowed: 20",
            "returns at most 20 likely tokens, fewer than reference.top_k=32: lower top_k, or "
            "start the server with --max-logprobs 32",
        ),
        (200, {"choices": [{}]}, "returns no prompt_logprobs: use a vLLM server"),
        (
            200,
            {"choices": [{"prompt_logprobs": [None] * 9}]},
            "did not send the prompt_logprobs of each token, .* vLLM server",
        ),
    ],
)
def test_an_answer_without_scores_ends_the_run_with_one_message(serve, folder, status, body, said):
    url, _ = serve(instead=(status, body))
    with pytest.raises(RunFailed, match=rf"^reference\.url={url} {said}$"):
        endpoint(url, folder, top_k=32).score([batch()])
