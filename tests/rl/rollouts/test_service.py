"""The rollouts process: the objects that it builds from the configuration, and its service.

The service answers every rank alike, records tokens, and ends the process after an error.
"""

import asyncio
import json
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from envs.episode import Example
from envs.reverse_text import ReverseText
from rl.config.schema import Run
from rl.evaluation.periodic import Evaluator, PeriodicEvaluation
from rl.inference.client import RequestTally
from rl.inference.router import Route
from rl.records import Group, RankBatch
from rl.rollouts import __main__ as main
from rl.rollouts import serving_replicas
from rl.rollouts.buffer import FifoBuffer
from rl.rollouts.dispatcher import DispatcherState
from rl.rollouts.listening import open_server
from rl.rollouts.service import RolloutService
from rl.rollouts.serving_replicas import ServingReplicas
from rl.runtime.endpoint import Endpoint, read_restart_request
from rl.runtime.failure import RunFailed, first_failure
from rl.runtime.folder import RunFolder
from rl.runtime.network import Address
from rl.runtime.status import STOPPED, Status
from rl.runtime.token_files import read_rows
from rl.sampling.demonstrations import DemonstrationSampler
from rl.trainer.rollouts_link import RolloutsLink
from rl.wire import HEADER, Answer, Call, NoMoreBatches, pack, unpack
from tests.support.composing import chosen, composed, learned
from tests.support.forked_groups import forked_groups
from tests.support.replicas import inference
from tests.support.rollouts import graded, rollout
from tests.support.scripted import ScriptedClient, chat_of, tiny_renderer

TOKEN_MEAN = {"_target_": "losses.aggregation.token_mean"}
WRONG = {"_target_": "losses.advantages.group_mean"}  # as an aggregation


def group(*rewards: float) -> Group:
    return graded(rewards, rewards)


class Dispatcher:
    """Hand out one batch at every step."""

    def __init__(self, batch) -> None:
        self.groups, self.buffer, self.on_rejected = batch, FifoBuffer(), None
        self.order = SimpleNamespace(metrics=lambda: {"easy": 0.25})
        self.returned = False

    async def take_batch(self, step):
        if isinstance(self.groups, Exception):
            raise self.groups
        return self.groups

    async def run(self):
        await asyncio.Event().wait()

    async def stop(self):
        self.groups = NoMoreBatches("stopped, as asked", stopped=True)

    def return_batch(self):
        self.returned = True

    def checkpoint(self):
        return DispatcherState(next_index=1)

    def progress(self):
        return "batch 0: nothing"


def service(
    folder, groups, aggregation=TOKEN_MEAN, tally=None, record="none", **facts
) -> RolloutService:
    nodes = {"batch_credit": "none", "loss": "cispo", "record": record}
    run = SimpleNamespace(
        **{key: chosen(key, name) for key, name in nodes.items()},
        aggregation=aggregation,
        learned=learned(**facts),
        trainer=SimpleNamespace(ranks=2, tokens_per_micro_batch=64, wait_timeout=5.0),
    )
    run_folder, tally = RunFolder(folder), tally or RequestTally()
    status = Status(run_folder, "rollouts")
    return RolloutService(run, run_folder, Dispatcher(groups), status, tally)


async def asked(served: RolloutService, *calls: Call) -> list[Answer]:
    async with asyncio.timeout(10):
        return await asyncio.gather(*(served._answer(call) for call in calls))


def next_batch(step: int = 0, *, ranks: tuple[int, ...] = (0,)) -> list[Call]:
    return [Call(what="next_batch", rank=rank, step=step) for rank in ranks]


async def test_a_loss_of_whole_groups_gets_them_and_an_aggregation_by_turn_gets_turns(tmp_path):
    turn_mean = chosen("aggregation", "turn_mean")
    served = service(tmp_path, [group(1.0, 2.0)], turn_mean, aggregation_takes_turns=True)
    served._run.loss = {"_target_": "tests.rl.learner.test_objective.Ranked"}
    answers = await asked(served, *next_batch(ranks=(0, 1)))
    batches = [unpack(answer.value, RankBatch) for answer in answers]
    assert [b.micro_batches[0].rollout_ids.tolist() for b in batches] == [[0, 1], [-1]]
    assert batches[0].micro_batches[0].token_weights[:, 1].tolist() == [0.5, 0.5]


async def test_a_version_is_published_once_and_the_first_is_that_of_the_checkpoint(tmp_path):
    found, evaluated, routed = [], [], []
    served = service(tmp_path, [group(1.0)])
    current = served._dispatcher.version = SimpleNamespace(number=-1)

    async def publish(version):
        current.number = version
        found.append((version, len(routed)))  # requests go to updated replicas before groups start

    served._dispatcher.publish, served._dispatcher.step = publish, 3
    served._evaluator = SimpleNamespace(start=evaluated.append)
    served._replicas = SimpleNamespace(publish=routed.append)
    for version in (3, 4, 4):  # 4 again, to a restarted vLLM
        await served._answer(Call(what="publish", version=version, replicas={"inference": 1}))
    assert (found, evaluated) == ([(3, 1), (4, 2)], [3, 4])
    assert routed == [{"inference": 1}] * 3
    current.number = -1
    await served._answer(Call(what="publish", version=2))
    said = "rank 0 resumed after step 2 and the rollouts process after step 3"
    assert said in str(served._failure.result())


async def ended(served: RolloutService, call: Call) -> tuple[Answer, BaseException | None]:
    """Return the answer to a rank, and the error that ends the process once the rank has saved."""
    served._num_connections = 1
    reporting = asyncio.ensure_future(served.watch())
    answer = await asyncio.wait_for(served._answer(call), 5)
    assert first_failure(served._run_folder)
    state = await asyncio.wait_for(served._answer(Call(what="state")), 5)
    assert unpack(state.value, DispatcherState).next_index == 1
    await asyncio.sleep(0.3)
    assert not reporting.done()
    served._num_connections = 0  # the rank has closed its connection
    (error,) = await asyncio.wait_for(asyncio.gather(reporting, return_exceptions=True), 5)
    return answer, error


async def fail():
    raise RunFailed("vLLM is gone")


ERRORS = {
    "plan": (TypeError, "positional argument"),
    "file": (FileExistsError, "File exists"),
    "dispatcher": (ExceptionGroup, "vLLM is gone"),
}


@pytest.mark.parametrize("failing", ERRORS)
async def test_the_ranks_save_before_an_error_ends_this_process(failing, tmp_path):
    if failing == "file":
        (tmp_path / "rollouts").write_text("no folder")
    served = service(tmp_path, [group(1.0, 0.0)], WRONG if failing == "plan" else TOKEN_MEAN)
    if failing == "dispatcher":
        served._dispatcher.run = fail
    if not (in_batch := failing in ("plan", "file")):
        await asyncio.wait_for(served.sample(), 5)
    answer, error = await ended(served, *next_batch(ranks=(1,)))
    kind, said = ERRORS[failing]
    assert (answer.over, answer.stopped) == (STOPPED if in_batch else "stopped, as asked", True)
    assert isinstance(error, kind)
    assert said in first_failure(served._run_folder)["message"]
    assert served._dispatcher.returned == in_batch  # a resumed run plays the groups again


async def test_ranks_that_miss_the_last_evaluation_do_not_end_as_done(tmp_path):
    async def publish(version):
        pass

    def evaluate(version):
        raise RunFailed("vLLM is gone")

    every = {"num_examples": 1, "rollouts_per_example": 1, "temperature": 1.0}
    settings = PeriodicEvaluation(every=1, pass_threshold=1.0, **every)
    served = service(tmp_path, [group(1.0)])
    played = SimpleNamespace(at_version=evaluate)
    served._evaluator = Evaluator(settings, played, [], served._run_folder, last=1)
    served._run.max_steps = 1
    served._dispatcher.version, served._dispatcher.publish = SimpleNamespace(number=0), publish
    async with asyncio.timeout(5):  # before rank 0 has published
        assert not (await served._answer(Call(what="evaluation", version=1))).over
    sampling = asyncio.ensure_future(served.sample())
    await served._answer(Call(what="publish", version=1))
    async with asyncio.timeout(5):
        answers = [await served._answer(Call(what="evaluation", version=1)) for _ in range(2)]
        earlier = await served._answer(Call(what="evaluation", version=0))
    assert not earlier.over  # the next call of the ranks reports the error
    sampling.cancel()
    assert {(answer.over, answer.stopped) for answer in answers} == {("vLLM is gone", False)}


async def test_if_an_error_cannot_be_reported_the_ranks_save_and_fail(tmp_path):
    (tmp_path / "failures").write_text("no folder, as on a full disk")
    served = service(tmp_path, [group(1.0)], WRONG)
    calls = next_batch(ranks=(0, 1)) + next_batch(1, ranks=(0, 1))
    answers = [await served._answer(call) for call in calls]
    assert not any(answer.stopped for answer in answers)
    (over,) = {answer.over for answer in answers}
    assert "positional argument" in over


async def test_a_rank_gets_no_answer_instead_of_a_state_that_cannot_be_saved(tmp_path):
    def fail():
        raise ValueError("no state")

    served = service(tmp_path, [group(1.0)])
    served._dispatcher.checkpoint = fail
    with pytest.raises(ValueError, match="no state"):
        await served._answer(Call(what="state"))


async def test_requests_retried_since_the_last_batch_are_logged_with_this_one(tmp_path):
    """The metrics of buffer, order and replicas are logged under their own prefixes."""

    async def replica_metrics():
        return {"inference/restarts": 2}

    tally = RequestTally(num_retried=5)  # of the start
    served = service(tmp_path, [group(1.0)], tally=tally)
    served._replicas = SimpleNamespace(metrics=replica_metrics)
    served._dispatcher.buffer.rejected["too_easy"] = 4
    counted, metrics = [], {}
    for step, retried in enumerate((7, 7, 10)):
        tally.num_retried = retried
        (answer,) = await asked(served, *next_batch(step))
        metrics = unpack(answer.value, RankBatch).metrics
        counted.append(metrics["rollout/retried_requests"])
    assert counted == [2.0, 0.0, 3.0]
    own = {"buffer/rejected_too_easy": 4.0, "order/easy": 0.25, "inference/restarts": 2}
    assert metrics == metrics | own


async def test_over_tcp_the_service_answers_only_connections_that_begin_with_the_key(tmp_path):
    folder = RunFolder(tmp_path)
    folder.private.make()
    folder.private.make_key()
    key, call = folder.private.key.read_bytes(), pack(*next_batch())
    wrong = HEADER.pack(len(key)) + key[:-1] + bytes([key[-1] ^ 1])
    async with open_server(folder, service(tmp_path, [group(1.0)]).serve, "127.0.0.1"):
        address = Endpoint.read(folder, "rollouts").address
        for beginning in (b"", wrong, HEADER.pack(1 << 40), key):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(beginning + HEADER.pack(len(call)) + call)
            with suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(HEADER.size), 5) == b""
            writer.close()
        link = RolloutsLink(folder, rank=0)
        await asyncio.to_thread(link.connect, 5.0)
        assert (await asyncio.to_thread(link.next_batch, 0, 5.0)).step == 0


async def test_every_rank_stops_before_the_same_batch(tmp_path):
    served, waiting = service(tmp_path, [group(0.0, 1.0)]), asyncio.Event()
    router = SimpleNamespace(end=waiting.set)  # requests that wait for a restart of vLLM fail
    served._replicas = SimpleNamespace(router=router, metrics=lambda: asyncio.sleep(0, {}))
    reporting = asyncio.ensure_future(served.watch())
    (one,) = await asked(served, *next_batch())
    served._run_folder.stop_request.touch()
    async with asyncio.timeout(5):
        while not isinstance(served._dispatcher.groups, NoMoreBatches):
            await asyncio.sleep(0.02)
    (other,) = await asked(served, *next_batch(ranks=(1,)))
    ends = await asked(served, *next_batch(1, ranks=(0, 1)))
    await asyncio.wait_for(waiting.wait(), 5)
    reporting.cancel()
    assert (one.over, other.over) == ("", "")
    assert [(end.over, end.stopped) for end in ends] == [("stopped, as asked", True)] * 2


@pytest.mark.parametrize("record", ["none", "all"])
async def test_the_whole_batch_is_recorded_once_when_the_ranks_ask_for_it(record, tmp_path):
    served = service(tmp_path, [group(1.0, 2.0)], record=record)
    await asked(served, *next_batch(ranks=(0, 1)))
    file = RunFolder(tmp_path).tokens_of(0, "rollouts")
    assert file.is_file() == (record == "all")
    before = file.stat().st_mtime_ns if record == "all" else 0
    answers = await asked(served, *(Call(what="record_all", rank=r, step=0) for r in (1, 0)))
    assert [unpack(answer.value, list) for answer in answers] == [["000000.0", "000000.1"]] * 2
    assert len(read_rows(RunFolder(tmp_path), 0)) == 2
    assert record == "none" or file.stat().st_mtime_ns == before


async def test_both_files_of_the_rollouts_process_name_the_same_rollouts(tmp_path):
    groups = forked_groups(num_groups=3)
    served = service(tmp_path, groups[:2], record="all")
    served._dispatcher.on_rejected(groups[2])
    answers = await asked(served, *next_batch(4, ranks=(0, 1)))
    batches = [unpack(answer.value, RankBatch) for answer in answers]
    folder = RunFolder(tmp_path)
    lines = [json.loads(line) for line in folder.rollouts_of(4).read_text().splitlines()]
    assert [line["id"] for line in lines] == [f"00000{g}.{i}" for g in range(3) for i in range(3)]
    # One rollout is masked; the last group is rejected.
    assert [line["used"] for line in lines] == [True, True, False, *[True] * 3, *[False] * 3]
    rows = read_rows(folder, 4)
    ids = [(line["id"], row) for line in lines for row in range(line["num_rows"])]
    assert [(row.id, row.row) for row in rows] == ids
    played = [row for g in groups for rollout in g.rollouts for row in rollout.rows]
    for row, sequence in zip(rows, played, strict=True):
        names = {"token_ids": "token_ids", "mask": "completion_mask"}
        names |= {"version": "token_versions", "turns": "turns"}
        for name, attribute in names.items():
            np.testing.assert_array_equal(row.columns[name], getattr(sequence, attribute))
        mu = np.where(sequence.completion_mask, sequence.rollout_logprobs, np.nan)
        np.testing.assert_array_equal(row.columns["mu"], mu)
    # Both ranks know all ids, for either may have any row.
    assert {batch.record_ids for batch in batches} == {tuple(x["id"] for x in lines[:6])}
    await asked(served, *next_batch(5))
    assert len(folder.rollouts_of(5).read_text().splitlines()) == 6  # without the rejected group


class Begun(Exception):
    """Raised with the arguments of the service, so that `main` ends before it listens."""

    @classmethod
    def begin(cls, *given):
        raise cls(*given)


class Connecting:
    """A client that notes the settings with which a chat is opened."""

    settings: Any = None

    @asynccontextmanager
    async def connect(self, setting):
        Connecting.settings = setting
        yield chat_of(ScriptedClient())


async def begun(folder, monkeypatch, *overrides):
    """Return the settings of the chat, and the dispatcher of a run with these overrides."""
    monkeypatch.setattr(main, "RolloutService", Begun.begin)
    config = composed("env=reverse-text", "group_size=4", "seed=5", *overrides)
    config |= {"client": {"_target_": f"{__name__}.Connecting"}, "output_dir": str(folder)}
    config["learned"] = learned()
    run = Run.of(config)
    run_folder = RunFolder(run.folder)
    run_folder.path.mkdir(parents=True)
    run_folder.set_model(folder)
    run.save(run_folder.config)
    with pytest.raises(Begun) as caught:
        await main.main(run_folder)
    return Connecting.settings, caught.value.args[2]


async def test_the_limits_of_sampling_count_replicas_and_attempts(tmp_path, monkeypatch):
    limits = ("sampler.max_concurrent=100", "sampler.max_prompt_len=200")
    two = ("inference.replicas=2", "inference.args.max_num_seqs=8", "sampler.seeded=true")
    setting, dispatcher = await begun(tmp_path / "two", monkeypatch, *limits, *two)
    assert (setting.num_seqs, dispatcher.max_concurrent) == (16, 100)  # both replicas together
    assert dispatcher.play_group.__self__.seed == 5
    assert dispatcher.order.pools[0].examples._limit == 201
    assert dispatcher.stateful.keys() == {"advantage", "env", "strategy"}
    assert [told.__name__ for told in dispatcher.version.listeners] == ["begin_version"]
    attempts = ("strategy=extremes", "strategy.factor=3")  # 12 per 4 rollouts
    setting, dispatcher = await begun(tmp_path / "attempts", monkeypatch, *limits, *attempts)
    assert (setting.num_seqs, dispatcher.max_concurrent) == (None, 33)
    assert dispatcher.play_group.__self__.seed is None


async def test_credits_follow_the_schedules_at_the_version_of_their_group(tmp_path, monkeypatch):
    rise = "{_target_: rl.schedule.linear, start: 0.0, end: 1.0, steps: 4}"
    limit = ("truncation=penalty", "truncation.limit=2", "truncation.start=0.0")
    changes = (f"reward.length_penalty={rise}", f"truncation.weight={rise}")
    _, dispatcher = await begun(tmp_path, monkeypatch, *limit, *changes)
    example = Example(0, "reverse-text", [])
    found = [dispatcher.credit(example, [rollout(9.0, lengths=(2,))], v) for v in (0, 4)]
    # Version 4: 1 for each of two tokens, and the whole weight of 1 at the limit of two.
    assert [credit.reward for (credit,) in found] == [9.0, 9.0 - 2 - 1]


def test_demonstrations_depend_on_the_seed_of_the_run_and_on_the_group():
    sizes = {"min_length": 8, "max_length": 8, "num_train": 5, "num_eval": 5}
    env = ReverseText(**sizes, reward_weights={"exact": 1.0})
    sampler = DemonstrationSampler(max_staleness=0, corruption_rate=0.0)

    def texts(seed, group, *size):
        run: Any = SimpleNamespace(seed=seed, group_size=2, max_seq_len=256)
        demonstrate = main._demonstrator(run, sampler, env, tiny_renderer())
        rollouts = demonstrate(group, Example(0, env.name, []), *size)
        return tuple(rollout.messages[0]["content"] for rollout in rollouts)

    assert len({texts(0, "0"), texts(1, "0"), texts(0, "1")}) == 3
    assert texts(0, "0") == texts(0, "0", 3)[:2]


def started(folder: RunFolder, name: str, incarnation: int) -> None:
    Endpoint(Address(path=folder.path / name), incarnation).write(folder, name)


def serving(folder: RunFolder, *incarnations: int) -> ServingReplicas:
    """Return replicas that were restarted so often, each with the newest weights."""
    names = [f"inference{i}" for i in range(len(incarnations))]
    for name, incarnation in zip(names, incarnations, strict=True):
        started(folder, name, incarnation)
    replicas = ServingReplicas(folder, inference(len(names)))
    replicas.publish(dict(zip(names, incarnations, strict=True)))
    return replicas


async def test_metrics_count_since_the_last_batch_and_a_single_replica_has_none(
    tmp_path, monkeypatch
):
    counts = {"inference0": [(10.0, 5.0), (30.0, 20.0)], "inference1": [None, (0.0, 0.0)]}
    monkeypatch.setattr(
        serving_replicas, "prefix_cache_counts", lambda replica: counts[replica.name].pop(0)
    )
    replicas = serving(RunFolder(tmp_path), 1, 2)
    for i, route in enumerate(replicas.router.routes):
        route.num_groups, route.num_completions, route.num_tokens = 1, 2 + i, 30 + i
    whole = {"inference/replicas_alive": 2, "inference/restarts": 3}
    whole |= {"inference0/groups": 1, "inference1/groups": 1}
    first = {"inference0/completions": 2, "inference1/completions": 3}
    first |= {"inference0/tokens": 30, "inference1/tokens": 31}
    hits = {"inference0/prefix_hits": 0.5}  # the other one was unreachable
    assert await replicas.metrics() == whole | first | hits
    hits = {"inference0/prefix_hits": 15 / 20, "inference1/prefix_hits": 0.0}
    assert await replicas.metrics() == whole | dict.fromkeys(first, 0) | hits
    started(RunFolder(tmp_path), "inference", 0)
    replicas = ServingReplicas(RunFolder(tmp_path), inference(1))
    replicas.publish({"inference": 0})
    assert len(replicas.router.routes) == 1
    assert await replicas.metrics() == {}


async def test_a_replica_that_the_supervisor_has_restarted_gets_no_more_requests(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(serving_replicas, "_CHECK_INTERVAL_S", 0.01)
    folder = RunFolder(tmp_path)
    replicas = serving(folder, 0, 1)
    first: Route = replicas.router.routes[0]
    watching = asyncio.ensure_future(replicas.watch())
    await asyncio.sleep(0.1)
    assert not first.lost
    started(folder, "inference0", 1)
    async with asyncio.timeout(10):
        while not first.lost:
            await asyncio.sleep(0.01)
    watching.cancel()
    replicas.publish({"inference0": 0, "inference1": 1})  # the new process has no pushed weights
    assert [route.replica.name for route in replicas.router.routes] == ["inference1"]
    why = "the supervisor has restarted it"
    assert read_restart_request(folder, "inference0", 0) == why
    assert read_restart_request(folder, "inference1", 1) is None
