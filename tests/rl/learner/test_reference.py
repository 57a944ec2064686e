"""References: the initial policy and how it is refreshed, a teacher's tokenizer and its server."""

import json
import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
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
from rl.records import MicroBatch, RankBatch
from rl.runtime.failure import RunFailed
from tests.support import tiny_policy
from tests.support.answers import Answers

torch.set_num_threads(1)

VOCABULARY = 320
SHARED = {"top_k": 3, "sees_hint": False}


def setting(folder, temperature=1.0, *, reads_candidates=False):
    policy = SimpleNamespace(ranks=Ranks(0, 1, torch.device("cpu")), has_adapter=False)
    return ReferenceSetting(
        policy=policy,
        model=folder,
        dtype=torch.float32,
        temperature=temperature,
        logprob_chunk=7,
        max_seq_len=64,
        seed=0,
        vocabulary=VOCABULARY,
        reads_candidates=reads_candidates,
    )


def test_the_options_of_an_endpoint_are_those_of_its_client(folder, monkeypatch):
    monkeypatch.setenv("TEACHER_KEY", "secret")
    options = {"api_key_variable": "TEACHER_KEY", "timeout": 7.0}
    given = replace(teacher("http://127.0.0.1:9/v1", max_retries=3, top_k=1), **options)
    client = given.start(setting(folder))._client(3)
    assert vars(client) | options | {"max_retries": 3} == vars(client)
    assert client.max_mib > 200  # 100,000 tokens with 16 candidates of 100 bytes


def test_a_hub_model_is_that_of_the_revision_in_its_own_dtype(folder, monkeypatch):
    asked = []
    monkeypatch.setattr(local_file, "local_folder", lambda *given: asked.append(given) or folder)
    model = FrozenModel(path="a/b", revision="v2", dtype="bfloat16", **SHARED)
    assert model.start(setting(folder))._module.model.dtype == torch.bfloat16
    assert asked == [("a/b", "v2", "reference")]


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


def frozen(folder: Path) -> FrozenModel:
    return FrozenModel(path=str(folder), revision=None, dtype="float32", **SHARED)


def test_a_teacher_scores_the_completion_tokens_and_never_changes(folder):
    teacher = frozen(folder).start(setting(folder))
    found = teacher.score([batch()])[0].logprobs
    teacher.after_step(1)
    model = tiny_policy.exact_model(folder, seed=5)
    expected = []
    for ids, at in (([5, 6, 7, 8], [2, 3]), ([9, 4], [1])):
        logits = model(input_ids=torch.tensor([ids])).logits[0]
        logprobs = torch.log_softmax(logits.detach(), -1)
        expected += [float(logprobs[i - 1, ids[i]]) for i in at]
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=1e-5)
    assert not found.requires_grad
    torch.testing.assert_close(teacher.score([batch()])[0].logprobs, found, rtol=0, atol=0)


def test_a_teacher_that_computes_padded_rows_asks_for_a_plan_by_padded_tokens(folder, tmp_path):
    noisy = shutil.copytree(folder, tmp_path / "noisy")
    config = json.loads((noisy / "config.json").read_text())
    (noisy / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.1}))
    given = replace(setting(folder), share_prefixes=True)
    both = PerEnvironment(teachers={"words": frozen(folder), "maths": frozen(noisy)})
    assert frozen(folder).start(given).shares_prefixes
    assert not frozen(noisy).start(given).shares_prefixes
    assert not both.start(given).shares_prefixes


class Teacher(Answers):
    """vLLM's answer with prompt_logprobs=0; token t at position i has logprob -(t + i / 8)."""

    status, has_logprobs, failures = 200, True, 0
    message = "broken"
    reshape = None  # a function that returns the response of a choice
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
        entries = [
            {str(t): {"logprob": -(t + i / 8), "rank": 3, "decoded_token": "x"}, **self.likeliest}
            for i, t in enumerate(body["prompt"])
        ]
        logprobs = {"prompt_logprobs": [None, *entries[1:]]} if self.has_logprobs else {}
        choice = {"index": 0, "text": "y", "finish_reason": "length", **logprobs}
        status = 503 if len(self.seen) <= self.failures else self.status
        if status != 200:
            return status, {"error": {"message": self.message}}
        if self.reshape:
            return status, self.reshape(choice)
        return status, {"id": "cmpl-1", "object": "text_completion", "choices": [choice]}


@pytest.fixture
def serve():
    """Return a function that starts a changed teacher and returns its URL and its requests."""
    with ExitStack() as stack:

        def start(**changes):
            teacher = Teacher(changes)
            return stack.enter_context(teacher.serving()), teacher.seen

        yield start


def teacher(url, *, max_retries, top_k):
    return Endpoint(
        url=url,
        model="teacher",
        api_key_variable=None,
        timeout=10.0,
        max_retries=max_retries,
        top_k=top_k,
        sees_hint=False,
    )


def endpoint(url, folder, max_retries=0, top_k=0):
    remote = teacher(url, max_retries=max_retries, top_k=top_k)
    return remote.start(setting(folder, reads_candidates=top_k > 0))


def test_a_server_s_logprobs_stand_at_the_tokens_they_belong_to(serve, folder):
    url, seen = serve()
    found = endpoint(url + "/", folder).score([batch()])[0].logprobs
    assert found.tolist() == [-(7 + 2 / 8), -(8 + 3 / 8), -(4 + 1 / 8)]
    assert found.dtype == torch.float32
    assert {path for path, _ in seen} == {"/v1/completions"}
    # No padding, nothing after the last completion token, and nothing for the row without any.
    assert sorted(body["prompt"] for _, body in seen) == [[5, 6, 7, 8], [9, 4]]
    assert {(b["model"], b["prompt_logprobs"], b["max_tokens"]) for _, b in seen} == {
        ("teacher", 0, 1)
    }


def test_a_server_is_asked_for_all_micro_batches_together(serve, folder):
    url, seen = serve()
    teacher = endpoint(url, folder)
    assert [len(found.logprobs) for found in teacher.score([batch(), batch()])] == [3, 3]
    assert len(seen) == 4
    assert teacher.metrics() == {"train/reference_retries": 0}


def test_a_server_that_fails_for_a_while_is_asked_again_and_counted(serve, folder):
    url, seen = serve(failures=1)
    teacher = endpoint(url, folder, max_retries=1)
    assert teacher.score([batch()])[0].logprobs.tolist() == [
        -(7 + 2 / 8),
        -(8 + 3 / 8),
        -(4 + 1 / 8),
    ]
    assert teacher.metrics() == {"train/reference_retries": 1}
    assert len(seen) == 3


def test_a_question_that_is_refused_is_not_asked_again(serve, folder):
    url, seen = serve(status=404)
    with pytest.raises(RunFailed, match="answered 404"):
        endpoint(url, folder, max_retries=9).score([batch()])
    assert len(seen) <= 2  # one for each row


def test_a_server_with_another_tokenizer_is_refused_before_the_first_batch(serve, folder):
    sample = Tokenizer(folder).encode(endpoint_file._TEST_TEXT)
    same, seen = serve(tokens=sample)
    endpoint(same, folder)
    other, _ = serve(tokens=sample[:-1])
    with pytest.raises(RunFailed) as caught:
        endpoint(f"{other}/", folder)
    assert str(caught.value).startswith(f"reference.url={other}/ has another tokenizer than the")
    assert "\n" not in str(caught.value)
    assert not seen


def test_a_server_that_could_not_score_the_longest_row_is_refused_before_it_comes(serve, folder):
    # It samples a token behind what it scores, and has no place for one behind 64 of 64.
    url, _ = serve(tokens=Tokenizer(folder).encode(endpoint_file._TEST_TEXT), max_model_len=64)
    with pytest.raises(RunFailed) as caught:
        endpoint(url, folder)
    assert str(caught.value) == (
        f"reference.url={url} accepts 64 tokens, but a request may contain max_seq_len=64 tokens, "
        "and the server must generate one more: start the server with --max-model-len 65, or lower "
        "max_seq_len"
    )


def likely(*logprobs):
    """Tokens 20, 21 and so on with these logprobs, as vLLM names them."""
    return {str(20 + i): {"logprob": x, "rank": i + 1} for i, x in enumerate(logprobs)}


def test_a_server_s_likeliest_tokens_are_those_with_the_highest_logprobs(serve, folder):
    """Places 2 and 3 of one row and 1 of the other; the given tokens have -7.25, -8.375, -4.125."""
    url, seen = serve(likeliest=likely(-0.5, -1.5, -7.5))
    (found,) = endpoint(url, folder, top_k=3).score([batch()])
    assert found.logprobs.tolist() == [-7.25, -8.375, -4.125]
    # vLLM adds the given token to its three; where that is likelier than the third, it is one.
    assert found.candidates.tolist() == [[20, 21, 7], [20, 21, 22], [20, 21, 4]]
    assert found.candidate_logprobs.tolist() == [
        [-0.5, -1.5, -7.25],
        [-0.5, -1.5, -7.5],
        [-0.5, -1.5, -4.125],
    ]
    assert {body["prompt_logprobs"] for _, body in seen} == {3}


def test_a_batch_without_tokens_sends_no_request_and_has_no_candidates(serve, folder):
    url, seen = serve()
    empty = Rows(torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.bool), ("",))
    (found,) = endpoint(url, folder, top_k=2).score([empty])
    assert (found.logprobs.shape, found.candidates.shape) == ((0,), (0, 2))
    assert found.candidates.dtype == torch.int64
    (found,) = started(frozen(folder), folder).score([empty])
    assert (found.logprobs.shape, found.candidates.shape) == ((0,), (0, 3))
    assert not seen


def started(reference, folder):
    return reference.start(setting(folder, reads_candidates=True))


def test_a_folder_s_likeliest_tokens_are_those_of_the_whole_distribution(folder):
    (found,) = started(frozen(folder), folder).score([batch()])
    model = tiny_policy.exact_model(folder, seed=5)
    whole = []
    for ids, at in (([5, 6, 7, 8], [2, 3]), ([9, 4], [1])):
        logits = model(input_ids=torch.tensor([ids])).logits[0].detach()
        whole += [torch.log_softmax(logits[i - 1], -1) for i in at]
    best = torch.stack(whole).topk(3)
    assert found.candidates.tolist() == best.indices.tolist()
    torch.testing.assert_close(found.candidate_logprobs, best.values.float(), rtol=1e-5, atol=1e-5)
    assert not found.candidate_logprobs.requires_grad


def test_a_loss_that_compares_no_distributions_gets_no_candidates(serve, folder):
    url, seen = serve()
    for reference in (endpoint(url, folder), frozen(folder).start(setting(folder))):
        (found,) = reference.score([batch()])
        assert found.candidates is None
        assert found.candidate_logprobs is None
    assert {body["prompt_logprobs"] for _, body in seen} == {0}


def test_a_teacher_with_a_larger_vocabulary_names_only_tokens_that_the_policy_knows(folder):
    (whole,) = started(frozen(folder), folder).score([batch()])
    first = int(whole.candidates[0, 0])  # the likeliest token of the first place
    given = replace(setting(folder, reads_candidates=True), vocabulary=first)
    (found,) = frozen(folder).start(given).score([batch()])
    assert found.candidates.max() < first


TOO_MANY = (
    "Requested prompt logprobs of 32, which is greater than max allowed: 20",
    " returns at most 20 likely tokens, fewer than reference.top_k=32: lower top_k, or start the "
    "server with --max-logprobs 32",
)


def test_more_candidates_than_the_server_gives_are_refused(serve, folder):
    url, seen = serve(status=400, message=TOO_MANY[0])
    with pytest.raises(RunFailed) as caught:
        endpoint(url, folder, max_retries=3, top_k=32).score([batch()])
    assert str(caught.value) == f"reference.url={url}{TOO_MANY[1]}"
    assert len(seen) <= 2  # it would be refused again


def test_candidates_that_the_policy_does_not_know_are_refused(serve, folder):
    url, _ = serve(likeliest={str(VOCABULARY): {"logprob": -0.1, "rank": 1}})
    with pytest.raises(RunFailed, match=f"returns the token id {VOCABULARY}, but the policy"):
        endpoint(url, folder, top_k=1).score([batch()])
    assert endpoint(url, folder, top_k=VOCABULARY)._top_k == VOCABULARY
    with pytest.raises(RunFailed, match=r"reference\.top_k=321 exceeds the policy's vocabulary"):
        endpoint(url, folder, top_k=VOCABULARY + 1)


def test_each_environment_s_rows_are_scored_by_its_own_teacher(serve, folder):
    """ "words" by the server, "maths" by the folder; then both the other way round."""
    url, seen = serve(likeliest=likely(-0.5, -1.5, -2.5))
    remote = teacher(url, max_retries=0, top_k=3)
    alone = {
        "remote": started(remote, folder).score([batch()])[0],
        "local": started(frozen(folder), folder).score([batch()])[0],
    }
    seen.clear()
    both = PerEnvironment(teachers={"words": remote, "maths": frozen(folder)})
    reference = started(both, folder)
    first, second = reference.score([batch(), batch()])
    assert [body["prompt"] for _, body in seen] == [[5, 6, 7, 8], [5, 6, 7, 8]]
    for field in ("logprobs", "candidates", "candidate_logprobs"):
        remote_part, local_part = (getattr(alone[name], field) for name in ("remote", "local"))
        expected = torch.cat([remote_part[:2], local_part[2:]])  # two tokens of "words", then one
        torch.testing.assert_close(getattr(first, field), expected)
        torch.testing.assert_close(getattr(second, field), expected)
    swapped = PerEnvironment(teachers={"words": frozen(folder), "maths": remote})
    (found,) = started(swapped, folder).score([batch()])
    expected = torch.cat([alone["local"].logprobs[:2], alone["remote"].logprobs[2:]])
    torch.testing.assert_close(found.logprobs, expected)
    assert reference.metrics() == {"train/reference_retries": 0}


def test_rows_of_environments_in_any_order_come_back_in_that_order(serve, folder):
    """Rows words, maths, words: the token of the middle one is the folder's."""
    url, _ = serve()
    token_ids = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    mask = torch.tensor([[False, True, True], [False, True, False], [False, False, True]])
    rows = Rows(token_ids, mask, ("words", "maths", "words"))
    remote = teacher(url, max_retries=0, top_k=3)
    teachers = {"maths": frozen(folder), "words": remote}
    (found,) = PerEnvironment(teachers=teachers).start(setting(folder)).score([rows])
    (local,) = frozen(folder).start(setting(folder)).score([rows])
    expected = [-(2 + 1 / 8), -(3 + 2 / 8), float(local.logprobs[2]), -(9 + 2 / 8)]
    assert found.logprobs.tolist() == pytest.approx(expected, rel=1e-5)
    lone = replace(rows, envs=("words", "words", "words"))
    (found,) = PerEnvironment(teachers=teachers).start(setting(folder)).score([lone])
    assert found.logprobs.tolist() == [-2.125, -3.25, -5.125, -9.25]
    warm = replace(rows, temperatures=torch.tensor([[1.0], [2.0], [0.5], [4.0]]))
    alike = PerEnvironment(teachers=dict.fromkeys(("maths", "words"), frozen(folder)))
    found, expected = (one.start(setting(folder)).score([warm]) for one in (alike, frozen(folder)))
    torch.testing.assert_close(found[0].logprobs, expected[0].logprobs)
    sets = torch.tensor([[2, 7, 9], [3, 8, -1], [5, -1, -1], [-1, -1, -1]])
    limited = replace(rows, kept=sets)
    found, among = (one.start(setting(folder)).score([limited]) for one in (alike, frozen(folder)))
    torch.testing.assert_close(found[0].logprobs, among[0].logprobs)
    (full,) = frozen(folder).start(setting(folder)).score([rows])
    assert found[0].logprobs[2] == 0
    assert (found[0].logprobs > full.logprobs + 0.01).tolist() == [True, True, True, False]


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("hinted", [False, True])
def test_a_reference_scores_the_policy_s_choices_after_its_own_prompt(folder, hinted, shares):
    """The rows are 5 6 | 7 8 3 with a reply at 8, and 5 6 | 7 1; the hinted prompt is 9 4 6."""
    rows = np.array([[5, 6, 7, 8, 3], [5, 6, 7, 1, 0]], np.int32)
    mask = np.array([[0, 0, 1, 0, 1], [0, 0, 1, 1, 0]], np.bool_)
    hints = np.array([[9, 4, 6, 7, 8, 3], [9, 4, 6, 7, 1, 0]], np.int32)
    of_row = dict.fromkeys(
        ("rollout_ids", "group_ids", "first_positions", "row_numbers"), np.zeros(2, np.int32)
    )
    micro = MicroBatch(
        token_ids=rows,
        completion_mask=mask,
        rollout_logprobs=np.zeros((2, 5), np.float32),
        advantages=np.zeros((2, 5), np.float32),
        token_weights=np.ones((2, 5), np.float32),
        token_versions=np.zeros((2, 5), np.int32),
        turns=np.zeros((2, 5), np.int32),
        source=np.zeros((2, 5), np.int8),
        **of_row,
        envs=("words", "words"),
        hinted_token_ids=hints if hinted else None,
        hinted_mask=np.pad(mask, ((0, 0), (1, 0))) if hinted else None,
    )
    given = replace(setting(folder), share_prefixes=shares)
    kl = KLPenalty(estimator=k1, beta=0.0, place="loss", target_kl=None)
    reference = frozen(folder).start(given)
    assert reference.shares_prefixes == shares
    prepare = Preparation(given.policy, reference, keeps_old=False, kl=kl, compared=True)
    ((prepared,), _) = prepare(RankBatch(0, (micro,)), 0.0)
    scored = torch.tensor(hints if hinted else rows).long()
    logits = tiny_policy.exact_model(folder, seed=5)(input_ids=scored).logits
    logprobs, start = torch.log_softmax(logits.detach(), -1), 2 + hinted
    expected = [(0, 0, 7), (0, 2, 3), (1, 0, 7), (1, 1, 1)]  # row, place in the completion, token
    expected = torch.stack([logprobs[i, start + j - 1, token] for i, j, token in expected])
    torch.testing.assert_close(prepared.ref_logprobs, expected.float(), rtol=1e-5, atol=1e-5)
    assert prepared.token_ids.tolist() == rows.tolist()  # what the policy trains on


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks") / "rendezvous"
    torch.distributed.init_process_group("gloo", f"file://{path}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_in_bfloat16_too_a_reference_follows_by_the_mix_and_survives_a_checkpoint(folder, tmp_path):
    """Two hundred refreshes of 0.01 towards a policy that stands still: 0.99 ** 200 are left."""
    given = replace(setting(folder), dtype=torch.bfloat16)
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
        torch.testing.assert_close(
            parameter.float() - start[name].float(),
            torch.full(parameter.shape, 1 - 0.99**200),
            rtol=0.0,
            atol=0.02,  # the spacing of bfloat16 between 1 and 4, where the norms' weights are
        )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"status": 500}, ' answered 500: {"error": {"message": "broken"}}'),
        ({"has_logprobs": False}, " returns no prompt_logprobs: use a vLLM server"),
    ],
    ids=["broken", "no logprobs"],
)
def test_a_server_that_fails_ends_the_run_with_one_message(serve, folder, changes, said):
    url, _ = serve(**changes)
    with pytest.raises(RunFailed) as caught:
        endpoint(url, folder).score([batch()])
    assert str(caught.value) == f"reference.url={url}{said}"


def choices(choice, entries):
    return {"choices": [{**choice, "prompt_logprobs": entries}]}


@pytest.mark.parametrize(
    "reshape",
    [
        lambda choice: {},
        lambda choice: [],
        lambda choice: {"choices": []},
        lambda choice: {"choices": ["x"]},
        lambda choice: choices(choice, 5),
        lambda choice: choices(choice, choice["prompt_logprobs"][:1]),
        lambda choice: choices(choice, [None] * 9),
        lambda choice: choices(choice, [{"1": {"logprob": -1.0}}] * 9),
        lambda choice: choices(choice, [{str(t): {"logprob": None} for t in range(9)}] * 9),
    ],
)
def test_a_server_that_answers_in_another_shape_ends_the_run_with_its_url(serve, folder, reshape):
    url, _ = serve(reshape=reshape)
    said = rf"^reference\.url={url} did not send the prompt_logprobs of each token, .* vLLM server$"
    with pytest.raises(RunFailed, match=said):
        endpoint(url, folder).score([batch()])
