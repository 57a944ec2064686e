"""When the supervisor stops watching, and why; small programs replace the processes of a run."""

import errno
import os
import sys
import time
from contextlib import nullcontext
from threading import Timer
from types import SimpleNamespace

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

SLEEP = ["sleep", "30"]
SUPERVISED = ("loss=sft", "sampler=demonstrations", "model.warm_start=null")


class StillWatching(Exception):
    """Raised by the test after its seconds."""


@pytest.fixture
def watched(tmp_path):
    """Watch processes {name: command} for some seconds."""

    def watch(*overrides, seconds=2.0, stop=None, startup_timeout=0.1, lost_after=None, **programs):
        run = Run.of(composed(f"output_dir={tmp_path}", "run_name=r", *overrides))
        run = run.with_values({"inference.startup_timeout": startup_timeout})
        folder = RunFolder(tmp_path / "r")
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.private.make()
        deadline = time.monotonic() + seconds

        def tick() -> None:
            if time.monotonic() > deadline:
                raise StillWatching

        plan, demand = placement(run, [Host()]), Demand(1, 1, 1)
        with Reaper() as reaper, LocalCluster().hosts(folder, reaper, demand) as hosts:
            children = Children(run, folder, reaper, plan, hosts)
            if server := programs.pop("inference", None):
                vllm = hosts.here.start(Start("inference", server, folder.log_of("inference")))
                children._replicas._start_child = lambda replica: vllm
                children._replicas.start()
            for name, command in programs.items():
                children._start(name.replace("_", "."), command, {})
            if lost_after:
                lost = HostLost("the host 10.0.0.9 is lost")
                Timer(lost_after, setattr, (hosts.ranks[0], "lost", lost)).start()
            children.watch(tick, stop or SimpleNamespace(asked=False))

    return watch


RANKS = "trainer_rank0", "trainer_rank1"
VLLM, NO_VLLM = ("model.warm_start=null",), SUPERVISED
FULL = r"ended with status 1, and no space is left at .*free disk space"
# Overrides; what the processes do; the error that ends the run, None for a good end.
ENDS = {
    "every rank finishes": (NO_VLLM, {RANKS[0]: ["true"], RANKS[1]: ["sleep", "0.3"]}, None),
    "one of two ranks finishes": (
        NO_VLLM, {RANKS[0]: ["true"], RANKS[1]: SLEEP}, (StillWatching, None)),
    "a process ends too early": (
        NO_VLLM, {RANKS[0]: SLEEP, "rollouts": ["true"]}, (RunFailed, "rollouts ended with sta")),
    "a process has no memory": (
        NO_VLLM,
        {RANKS[0]: SLEEP, "rollouts": ["sh", "-c", "echo CUDA out of memory; exit 1"]},
        (RunFailed, r"lower inference\.args\.gpu_memory_utilization")),
    "the kernel kills a process": (
        NO_VLLM,
        {RANKS[0]: ["sh", "-c", "kill -9 $$"]},
        (RunFailed, r"memory ran out.*(?s:.*)lower trainer\.tokens_per_micro_batch")),
    "a disk is full": (NO_VLLM, {RANKS[0]: ["false"]}, (RunFailed, FULL)),
    "a server never answers": (
        VLLM, {RANKS[0]: SLEEP, "inference": SLEEP},
        (RunFailed, r"did not answer within inference\.startup_timeout=0\.1")),
}  # fmt: skip


@pytest.mark.parametrize("case", ENDS)
def test_a_run_ends_as_its_processes_end(case, watched, tmp_path, monkeypatch):
    overrides, programs, error = ENDS[case]
    if case == "a disk is full":
        monkeypatch.setattr(module.shutil, "disk_usage", lambda path: SimpleNamespace(free=4096))
    seconds = 2.0 if error and error[0] is StillWatching else 20.0
    with pytest.raises(error[0], match=error[1]) if error else nullcontext():
        watched(*overrides, seconds=seconds, **{"rollouts": SLEEP, **programs})
    logs = {f"{name.replace('_', '.')}.log" for name in ("rollouts", *programs)}
    assert {path.name for path in (tmp_path / "r" / "logs").iterdir()} == logs


class NamedHost:
    """A host of a cluster that starts nothing."""

    devices, lost = (), None

    def __init__(self, address: str) -> None:
        self.address, self.started = address, {}

    def start(self, start: Start) -> SimpleNamespace:
        self.started[start.name] = start
        return SimpleNamespace(group=None, returncode=None)

    def free_port(self) -> int:
        return 4000 + len(self.address)


def test_on_several_hosts_every_process_starts_where_it_belongs_and_finds_rank_0(tmp_path):
    few = ("trainer.ranks=3", "inference.replicas=2", "model.warm_start=null")
    run = Run.of(composed(f"output_dir={tmp_path}", "run_name=r", "cluster=ray", *few))
    here, one, two = (NamedHost(name) for name in ("here", "first", "the-other"))
    run_folder = RunFolder(tmp_path / "r")
    run_folder.private.make()
    (tmp_path / "config.json").write_text("{}")
    run_folder.set_model(tmp_path)
    devices = (("0", "1"), ("0",), ("1",))
    plan = Plan(
        inference=tuple(Place(host=1, devices=(name,), threads=None) for name in "56"),
        ranks=tuple(Place(host=0, devices=d, threads=1, local_rank=0) for d in devices),
    )
    hosts = Hosts(here, [two, one], [one, one, two])
    Children(run, run_folder, None, plan, hosts).start()
    assert [*here.started] == ["rollouts"]
    assert [*one.started] == ["inference1", "trainer.rank0", "trainer.rank1"]
    assert [*two.started] == ["inference0", "trainer.rank2"]
    ranks = [(one if rank < 2 else two).started[f"trainer.rank{rank}"] for rank in range(3)]
    assert [start.env["RANK"] for start in ranks] == ["0", "1", "2"]
    common = {"WORLD_SIZE": "3", "MASTER_ADDR": "first", "MASTER_PORT": "4005"}
    assert all(common.items() <= start.env.items() for start in ranks)
    assert not any(start.ends_on_term or start.in_terminal for start in ranks)
    rollouts = here.started["rollouts"].env
    assert (rollouts[module.LISTEN_VARIABLE], rollouts["CUDA_VISIBLE_DEVICES"]) == ("here", "")
    for name, host, gpu in (("inference0", two, "5"), ("inference1", one, "6")):
        start = host.started[name]
        assert start.env["CUDA_VISIBLE_DEVICES"] == gpu
        assert (start.log, start.ends_on_term) == (run_folder.log_of(name), True)
        address = Endpoint.read(run_folder, name).address
        assert (address.host, address.port) == (host.address, host.free_port())


def test_an_error_that_a_process_reported_is_raised_although_all_ranks_end_well(watched, tmp_path):
    rank = ["sh", "-c", REPORTS.replace("RUN", str(tmp_path / "r")).replace("exit 1", "exit 0")]
    with pytest.raises(RunFailed, match=r"^trainer.rank0: mismatch .*\n\(details: .*rank0.log\)$"):
        watched(*SUPERVISED, seconds=20.0, rollouts=SLEEP, trainer_rank0=rank)


def test_a_lost_host_is_reported_instead_of_the_errors_of_other_ranks(watched):
    programs = {"rollouts": SLEEP, "trainer_rank0": ["false"]}
    with pytest.raises(HostLost, match=r"the host 10\.0\.0\.9 is lost"):
        watched(*SUPERVISED, "cluster=ray", seconds=20.0, lost_after=1.5, **programs)


@pytest.mark.parametrize(("debug", "shown"), [("false", ""), ("true", "trainer.rank0\n")])
def test_a_breakpoint_in_a_process_without_a_terminal_says_how_to_debug(
    debug, shown, watched, capfd
):
    stops = [sys.executable, "-c", "breakpoint()"]
    rank = ["sh", "-c", "echo trainer.rank0; sleep 30"]  # with trainer.debug=true in the terminal
    with pytest.raises(RunFailed, match=r"breakpoint.. needs a terminal.*: set trainer.debug=true"):
        watched(
            *SUPERVISED, f"trainer.debug={debug}", seconds=20.0, trainer_rank0=rank, rollouts=stops
        )
    assert capfd.readouterr().out == shown


class AskedLater:
    """Ask for the end at the fourth look, after the status has changed."""

    def __init__(self, status: Status) -> None:
        self.status, self.looks = status, 0

    @property
    def asked(self) -> bool:
        self.looks += 1
        if self.looks == 1:
            self.status.set("batch 3: 0 of 16 rollouts")
        if self.looks == 3:
            self.status.set("waiting for my_env.py:12")
        return self.looks > 3


class GoneTerminal:
    """A standard output that was closed."""

    def write(self, text):
        raise OSError(5, "Input/output error")

    flush = write


def test_a_stop_request_after_the_first_batch_lets_the_run_save(watched, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdout", GoneTerminal())
    status = Status(RunFolder(tmp_path / "r"), "rollouts")
    programs = {"rollouts": SLEEP, "trainer_rank0": SLEEP}
    with pytest.raises(StillWatching):
        watched(*SUPERVISED, seconds=4.0, stop=AskedLater(status), **programs)
    assert RunFolder(tmp_path / "r").stop_request.exists()


def test_a_stop_request_before_the_first_batch_ends_the_run_at_once(watched):
    programs = {"rollouts": SLEEP, "trainer_rank0": SLEEP}
    with pytest.raises(KeyboardInterrupt):
        watched(*SUPERVISED, stop=SimpleNamespace(asked=True), **programs)


def test_on_a_cpu_the_trainer_keeps_few_kernels_unless_the_user_says_more(monkeypatch):
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "1024")
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    told = module._device_environment(Place(host=0, devices=(), threads=1), shared=False)
    kept = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "1024"}
    assert told == {"DS_ACCELERATOR": "cpu", "OMP_WAIT_POLICY": "PASSIVE", **kept}


def test_a_rank_knows_that_it_must_use_its_gpu_and_waits_for_a_vllm_that_shares_it(monkeypatch):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    place = Place(host=0, devices=("0",), threads=1)
    alone = {"DS_ACCELERATOR": "cuda", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert module._device_environment(place, shared=False) == alone
    shared = module._device_environment(place, shared=True)
    assert shared == {**alone, "OFFBYONE_WAIT_FOR_VLLM": "1"}
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):  # the new name goes first
        monkeypatch.setenv(name, f"of {name}")
        told = module._device_environment(place, shared=False)
        assert told["PYTORCH_ALLOC_CONF"] == f"of {name}"


def test_a_full_disk_of_the_supervisor_is_reported_with_a_remedy():
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "r/config.yaml")
    sentence = r"No space left.*r/config.yaml'?: free space on this disk"
    with pytest.raises(RunFailed, match=sentence), reporting_full_disk():
        raise full
    with pytest.raises(PermissionError), reporting_full_disk():
        raise PermissionError


REPORT = '{"part": "trainer.rank0", "time": 1, "message": "mismatch 3.0 > 0.1"}'
REPORTS = f"mkdir -p RUN/failures; echo '{REPORT}' >RUN/failures/trainer.rank0.json; exit 1"
SAVES = {  # what a rank does when a run that was asked to stop has lost its vLLM
    "saves": ("true", None),
    "saves too little": (
        "echo '{\"step\": 0}' >RUN/metrics.jsonl",
        "inference ended with status 1",
    ),
    "gives up": (REPORTS, "trainer.rank0: mismatch"),
    "is killed": ("kill -9 $$", "inference ended with status 1"),
    "takes too long": ("sleep 30", "inference ended with status 1"),
}


@pytest.mark.parametrize("what", SAVES)
def test_a_stopped_run_that_lost_vllm_ends_well_if_every_rank_saved(what, watched, tmp_path):
    run_folder, (does, said) = RunFolder(tmp_path / "r"), SAVES[what]
    Status(run_folder, "rollouts").set("batch 3: 1 of 2 rollouts")
    rank = ["sh", "-c", "sleep 1; " + does.replace("RUN", str(run_folder))]
    programs = {"inference": ["false"], "rollouts": SLEEP, "trainer_rank0": rank}
    limits = {"seconds": 20.0, "startup_timeout": 60.0, "stop": SimpleNamespace(asked=True)}
    with nullcontext() if said is None else pytest.raises(RunFailed, match=said):
        watched("model.warm_start=null", "trainer.wait_timeout=2", **limits, **programs)


def test_a_stop_request_before_the_first_batch_does_not_hide_a_failed_start(watched, tmp_path):
    run_folder = RunFolder(tmp_path / "r")
    run_folder.path.mkdir(parents=True)
    run_folder.stop_request.touch()  # by a signalled process or the user
    programs = {"inference": ["false"], "rollouts": SLEEP, "trainer_rank0": SLEEP}
    with pytest.raises(RunFailed, match="inference ended with status 1"):
        watched("model.warm_start=null", seconds=20.0, startup_timeout=60.0, **programs)
