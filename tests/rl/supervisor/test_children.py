"""When the supervisor stops watching, and why; small programs replace the processes of a run."""

import errno
import os
import sys
import time
from contextlib import nullcontext
from threading import Timer
from types import SimpleNamespace
from typing import Any

import pytest

from rl.cluster.host import Demand, HostLost, Hosts, Start
from rl.cluster.local import LocalCluster
from rl.config.schema import Run
from rl.placement.placement import Place, Plan, placement
from rl.runtime.child import Reaper
from rl.runtime.devices import Host
from rl.runtime.endpoint import Endpoint
from rl.runtime.failure import RunFailed
from rl.runtime.folder import RunFolder
from rl.runtime.status import Status
from rl.supervisor import children as module
from rl.supervisor.children import Children
from rl.supervisor.supervise import reporting_full_disk
from tests.support.composing import composed

SLEEP, RANK, BATCH = "sleep 30", "trainer.rank0", "batch 3: 1 of 2 rollouts"
REPORT = '{"part": "trainer.rank0", "time": 1, "message": "mismatch 3.0 > 0.1"}'
REPORTS = f"mkdir -p $RUN/failures; echo '{REPORT}' >$RUN/failures/trainer.rank0.json"


class StillWatching(Exception):
    """Raised by the test after its seconds."""


@pytest.fixture
def watched(tmp_path):
    """Watch {name: shell command} until the run ends; vLLM is watched only if it is given."""

    def watch(programs, *overrides, seconds=20.0, stop=None, lost_after=None):
        if "inference" not in programs:
            overrides = ("loss=sft", "sampler=demonstrations", *overrides)
        start = ("run_name=r", "model.warm_start=null", "inference.startup_timeout=60")
        run = Run.of(composed(f"output_dir={tmp_path}", *start, *overrides))
        folder = RunFolder(tmp_path / "r")
        folder.private.make()
        deadline = time.monotonic() + seconds

        def tick() -> None:
            if time.monotonic() > deadline:
                raise StillWatching

        plan, demand = placement(run, [Host()]), Demand(1, 1, 1)
        with Reaper() as reaper, LocalCluster().hosts(folder, reaper, demand) as hosts:
            children = Children(run, folder, reaper, plan, hosts)
            for name, text in {"rollouts": SLEEP, **programs}.items():
                command = ["sh", "-c", text]
                if name == "inference":
                    vllm = hosts.here.start(Start(name, command, folder.log_of(name)))
                    children._replicas._start_child = lambda _, vllm=vllm: vllm
                    children._replicas.start()
                else:
                    children._start(name, command, {"RUN": str(folder)})
            if lost_after:
                lost = HostLost("the host 10.0.0.9 is lost")
                Timer(lost_after, setattr, (hosts.ranks[0], "lost", lost)).start()
            children.watch(tick, stop or SimpleNamespace(asked=False))

    return watch


FULL = r"ended with status 1, and no space is left at .*free disk space"
VLLM_ENDED = "inference ended with status 1"
# What the processes do; the error that ends the run, None for a good end; what the test adds.
ENDS: dict[str, tuple[dict[str, str], Any, str | None, dict[str, Any]]] = {
    "every rank finishes": ({RANK: "true", "trainer.rank1": "sleep 0.3"}, None, "", {}),
    "one of two ranks finishes": (
        {RANK: "true", "trainer.rank1": SLEEP}, StillWatching, None, {"seconds": 2.0}),
    "a process ends too early": (
        {RANK: SLEEP, "rollouts": "true"}, RunFailed, "rollouts ended with sta", {}),
    "the kernel kills a process": (
        {RANK: "kill -9 $$"},
        RunFailed, r"memory ran out.*(?s:.*)lower trainer\.tokens_per_micro_batch", {}),
    "a disk is full": ({RANK: "false"}, RunFailed, FULL, {"free": 4096}),
    "a server never answers": (
        {RANK: SLEEP, "inference": SLEEP},
        RunFailed, r"did not answer within inference\.startup_timeout=0\.1",
        {"overrides": ["inference.startup_timeout=0.1"]}),
    "all ranks end well although one reported an error": (
        {RANK: REPORTS}, RunFailed, r"^trainer.rank0: mismatch .*\n\(details: .*rank0.log\)$", {}),
    "a host is lost, which makes its rank fail": (
        {RANK: "false"}, HostLost, r"the host 10\.0\.0\.9 is lost",
        {"overrides": ["cluster=ray"], "lost_after": 1.5}),
    "asked to stop before a batch": ({RANK: SLEEP}, KeyboardInterrupt, None, {"asked": True}),
    "stop requested by a file before vLLM failed to start": (
        {RANK: SLEEP, "inference": "false"}, RunFailed, VLLM_ENDED, {"request": True}),
}  # fmt: skip
# What a rank does when a run that was asked to stop has lost its vLLM.
for case, (does, error, said) in {
    "saves": ("true", None, ""),
    "saves too little": ("echo '{\"step\": 0}' >$RUN/metrics.jsonl", RunFailed, VLLM_ENDED),
    "gives up": (f"{REPORTS}; exit 1", RunFailed, "trainer.rank0: mismatch"),
    "takes too long": (SLEEP, RunFailed, VLLM_ENDED),
}.items():
    programs = {"inference": "false", RANK: f"sleep 1; {does}"}
    more = {"asked": True, "status": BATCH, "overrides": ["trainer.wait_timeout=2"]}
    ENDS[f"stopped without vLLM, and the rank {case}"] = (programs, error, said, more)


@pytest.mark.parametrize("case", ENDS)
def test_a_run_ends_as_its_processes_end(case, watched, tmp_path, monkeypatch):
    programs, error, said, more = ENDS[case]
    run_folder, more = RunFolder(tmp_path / "r"), dict(more)
    run_folder.path.mkdir()
    if free := more.pop("free", None):
        monkeypatch.setattr(module.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    if status := more.pop("status", ""):
        Status(run_folder, "rollouts").set(status)
    if more.pop("request", False):
        run_folder.stop_request.touch()
    stop = SimpleNamespace(asked=more.pop("asked", False))
    with pytest.raises(error, match=said) if error else nullcontext():
        watched(programs, *more.pop("overrides", []), stop=stop, **more)
    logs = {f"{name}.log" for name in ("rollouts", *programs)}
    assert {path.name for path in (tmp_path / "r" / "logs").iterdir()} == logs


@pytest.mark.parametrize(("debug", "shown"), [("false", ""), ("true", "trainer.rank0\n")])
def test_a_breakpoint_without_a_terminal_says_how_to_debug(debug, shown, watched, capfd):
    programs = {"rollouts": f"{sys.executable} -c 'breakpoint()'"}
    programs[RANK] = "echo trainer.rank0; sleep 30"  # with trainer.debug=true in the terminal
    with pytest.raises(RunFailed, match=r"breakpoint.. needs a terminal.*: set trainer.debug=true"):
        watched(programs, f"trainer.debug={debug}")
    assert capfd.readouterr().out == shown


def test_a_stop_request_after_the_first_batch_lets_the_run_save(watched, tmp_path, monkeypatch):
    def closed_terminal(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("builtins.print", closed_terminal)
    run_folder, looks = RunFolder(tmp_path / "r"), list[int]()
    status = Status(run_folder, "rollouts")

    class AskedLater:
        """Ask for the end at the fourth look, after the status has changed."""

        @property
        def asked(self) -> bool:
            looks.append(len(looks))
            status.set(BATCH if len(looks) == 1 else "waiting for my_env.py:12")
            return len(looks) > 3

    with pytest.raises(StillWatching):
        watched({RANK: SLEEP}, seconds=4.0, stop=AskedLater())
    assert run_folder.stop_request.exists()


def host_that_starts_nothing(address: str) -> Any:
    host = SimpleNamespace(address=address, devices=(), lost=None, started={})
    host.start = lambda start: (
        host.started.update({start.name: start}) or SimpleNamespace(group=None, returncode=None)
    )
    host.free_port = lambda: 4000 + len(address)
    return host


def test_on_several_hosts_every_process_starts_where_it_belongs_and_finds_rank_0(tmp_path):
    few = ("trainer.ranks=3", "inference.replicas=2", "model.warm_start=null")
    run = Run.of(composed(f"output_dir={tmp_path}", "run_name=r", "cluster=ray", *few))
    here, one, two = (host_that_starts_nothing(name) for name in ("here", "first", "the-other"))
    run_folder = RunFolder(tmp_path / "r")
    run_folder.private.make()
    (tmp_path / "config.json").write_text("{}")
    run_folder.set_model(tmp_path)
    place = Place(host=0, devices=("0",), threads=1, local_rank=0)
    vllm = tuple(Place(host=1, devices=(name,), threads=None) for name in "56")
    plan = Plan(inference=vllm, ranks=(place,) * 3)
    Children(run, run_folder, None, plan, Hosts(here, [two, one], [one, one, two])).start()
    assert [*here.started] == ["rollouts"]
    assert here.started["rollouts"].env[module.LISTEN_VARIABLE] == "here"
    assert [*one.started] == ["inference1", "trainer.rank0", "trainer.rank1"]
    assert [*two.started] == ["inference0", "trainer.rank2"]
    for rank, host in enumerate((one, one, two)):
        env = host.started[f"trainer.rank{rank}"].env
        found = {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "first"}
        assert env | found | {"MASTER_PORT": "4005"} == env
    for name, host, gpu in (("inference0", two, "5"), ("inference1", one, "6")):
        assert host.started[name].env["CUDA_VISIBLE_DEVICES"] == gpu
        address = Endpoint.read(run_folder, name).address
        assert (address.host, address.port) == (host.address, host.free_port())


def test_a_full_disk_of_the_supervisor_is_reported_with_a_remedy():
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "r/config.yaml")
    sentence = r"No space left.*r/config.yaml'?: free space on this disk"
    with pytest.raises(RunFailed, match=sentence), reporting_full_disk():
        raise full
    with pytest.raises(PermissionError), reporting_full_disk():
        raise PermissionError
