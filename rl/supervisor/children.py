"""The child processes of one run: started at once, watched until the trainer has finished."""

import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from typing import NoReturn

from rl.cluster.host import HeadLost, Host, Hosts, Part
from rl.config.build import build
from rl.config.facts import is_by_hand, spans_hosts
from rl.config.schema import Run
from rl.inference.external import ExternalServers, unfit
from rl.inference.listening import Listening
from rl.inference.process import replica_process
from rl.inference.replica import NOWHERE_YET, Replica, names_of
from rl.inference.server import VLLMServer
from rl.placement.placement import Place, Plan
from rl.report.finished_runs import steps_done
from rl.run.address import Address
from rl.run.child import Reaper, ending, last_lines
from rl.run.failure import RunFailed, first_failure
from rl.run.folder import RunFolder
from rl.run.metrics import read_metrics
from rl.run.status import read_statuses, training_is_done
from rl.run.stop_request import StopRequest
from rl.run.terminal import say
from rl.supervisor.replicas import Replicas

_TICK_S = 0.25
_LOSS_SEEN_S = 5.0  # until a host is known to be lost whose processes have ended
_FULL_BYTES = 1 << 16  # less than what anybody writes at once
_KERNELS_KEPT = "64"  # all of one micro-batch, which every layer shares
STOPPING = "stopping after this step; its checkpoint comes first (a second signal ends at once)"


class Children:
    """The child processes of one run."""

    def __init__(
        self, run: Run, run_folder: RunFolder, reaper: Reaper, plan: Plan, hosts: Hosts
    ) -> None:
        self._run, self._run_folder, self._reaper, self._plan = run, run_folder, reaper, plan
        self._hosts = hosts
        self._children: dict[str, Part] = {}
        sampler = build(run.sampler)()
        self._server: VLLMServer | ExternalServers = build(run.inference)()
        self._listening = Listening(run_folder)
        self._replicas = self._watched_replicas() if sampler.uses_vllm else None
        self._begun = False

    def start(self) -> None:
        """Start everything at once; the parts wait for each other."""
        folder = str(self._run_folder.path)
        if self._replicas:
            self._replicas.start()
        self._start("rollouts", [sys.executable, "-m", "rl.rollouts", folder], {})
        world, meeting = len(self._plan.ranks), self._meeting()
        for rank, place in enumerate(self._plan.ranks):
            where = {"RANK": str(rank), "WORLD_SIZE": str(world), **meeting, **place.environment()}
            command = [sys.executable, "-m", "rl.trainer", folder]
            env = {**where, **_accelerator(place)}
            self._start(f"trainer.rank{rank}", command, env, self._hosts.ranks[rank])

    def _meeting(self) -> dict[str, str]:
        """Where ranks meet that share no file: at the first one."""
        if not spans_hosts(self._run.cluster):
            return {}
        first = self._hosts.ranks[0]
        return {"MASTER_ADDR": first.address, "MASTER_PORT": str(first.free_port())}

    def _watched_replicas(self) -> Replicas:
        """Return the vLLMs of this run, not yet started."""
        server, run, folder = self._server, self._run, self._run_folder
        external = isinstance(server, ExternalServers)
        replicas = server.servers() if external else self._own_replicas(server)
        if external and (key := replicas[0].key):
            folder.private.keep_servers_key(key)
        return Replicas(
            replicas,
            self._run_folder,
            self._vllm,
            startup_timeout=self._server.startup_timeout,
            wait_timeout=self._run.trainer["wait_timeout"],
            num_steps=lambda: steps_done(read_metrics(folder)),
            unfit=lambda replica: (
                unfit(replica, folder.model(), run.max_seq_len) if external else None
            ),
        )

    def _own_replicas(self, server: VLLMServer) -> list[Replica]:
        """Return the vLLMs that are ours to start, and where each of them will listen."""
        cluster, hosts = self._run.cluster, self._hosts.replicas
        if not spans_hosts(cluster):
            return self._listening.replicas(server)
        names, key = names_of(self._run.inference), self._run_folder.private.read_key()
        if is_by_hand(cluster):
            return [Replica(name, NOWHERE_YET, key=key) for name in names]
        addresses = [Address(host=host.address, port=host.free_port()) for host in hosts]
        return [Replica(*it, key=key) for it in zip(names, addresses, strict=True)]

    def _vllm(self, replica: Replica) -> Part | None:
        """Start one vLLM, unless it is somebody else's, or somebody else is to start it."""
        if isinstance(self._server, ExternalServers):
            return None
        number = names_of(self._run.inference).index(replica.name)
        host, log = self._hosts.replicas[number], self._run_folder.log_of(replica.name)
        if is_by_hand(self._run.cluster):
            module = [sys.executable, "-m", "rl.inference", str(self._run_folder)]
            host.start(replica.name, [*module, "--replica", str(number)], env={}, log=log)
            return None
        place = self._plan.inference[number].environment()
        command, env = replica_process(self._run, self._run_folder, replica, place)
        return host.start(replica.name, command, env=env, log=log)

    def _start(
        self, name: str, command: list[str], env: dict[str, str], host: Host | None = None
    ) -> None:
        env = {**self._run_folder.private.environment(), **env}
        log = self._run_folder.log_of(name)
        host = host or self._hosts.here
        # Our own parts take a TERM for a scheduler's notice.
        self._children[name] = host.start(name, command, env=env, log=log, ends_on_term=False)

    def watch(self, tick: Callable[[], None], stop: StopRequest) -> None:
        """Return when every trainer rank has finished; raise RunFailed when anything else ends.

        Who asks for the end gets it after the present step; before the first step, at once.
        """
        try:
            self._watch(tick, stop)
        except HeadLost as lost:
            if self._has_begun():
                # By what they write: nobody hears any more whether they end.
                self._let_save(tick, lost.left_s, lambda: training_is_done(self._run_folder))
            raise

    def _watch(self, tick: Callable[[], None], stop: StopRequest) -> None:
        trainers = self._trainers()
        while True:
            tick()
            begun = self._has_begun()
            if stop.asked:  # first: the parts may have got the signal, too, and ended
                self._ask_to_stop()
            # By us, or by a part with a signal; it comes to nothing while there is nothing to save.
            asked = begun and self._run_folder.stop_request.exists()
            ended = {n: c.returncode for n, c in self._children.items() if c.returncode is not None}
            if all(trainer.returncode == 0 for trainer in trainers):
                self._raise_reported()  # what they saved may be all that could be saved
                return
            if self._replicas:  # before the others, which only notice that it is gone
                gone = self._replicas.look(may_restart=begun and not asked)
                if gone is not None:
                    if begun:
                        if self._all_is_saved(tick) and asked:
                            return  # a scheduler that signals every process ends vLLM, too
                        self._raise_reported("trainer")  # that it could not save is worse
                    self._explain(*gone)
            # Ranks end one after another when the run is over; whatever else ends, ended too early.
            if any(not (n.startswith("trainer") and status == 0) for n, status in ended.items()):
                self._fail(ended)
            self._reaper.ensure_alive()
            time.sleep(_TICK_S)

    def _trainers(self) -> list[Part]:
        return [child for name, child in self._children.items() if name.startswith("trainer")]

    def _ask_to_stop(self) -> None:
        """Let the trainer save what it has; before the first batch that is nothing."""
        if not self._has_begun():
            raise KeyboardInterrupt
        if not self._run_folder.stop_request.exists():
            self._run_folder.stop_request.touch()
            say(STOPPING)

    def _has_begun(self) -> bool:
        """True once the first weights are live, so that there may be something to save."""
        if not self._begun:  # once and for all: a status may say something else meanwhile
            rollouts = read_statuses(self._run_folder).get("rollouts")
            self._begun = rollouts is not None and rollouts.phase.startswith("batch")
        return self._begun

    def _raise_reported(self, of: str = "") -> None:
        failure = first_failure(self._run_folder, of)
        if failure:
            log = self._run_folder.log_of(failure["part"])
            raise RunFailed(f"{failure['part']}: {failure['message']}\n(details: {log})")

    def _all_is_saved(self, tick: Callable[[], None]) -> bool:
        """Let the ranks save: without vLLM no batch will come. Say whether nothing is lost."""
        ranks = self._trainers()
        seconds = self._run.trainer["wait_timeout"]
        self._let_save(tick, seconds, lambda: all(rank.returncode is not None for rank in ranks))
        saved, done = self._run_folder.num_saved_steps(), steps_done(read_metrics(self._run_folder))
        return saved == done and all(rank.returncode == 0 for rank in ranks)

    def _let_save(
        self, tick: Callable[[], None], seconds: float, have_saved: Callable[[], bool]
    ) -> None:
        """Have the ranks save, and wait for it."""
        self._run_folder.stop_request.touch()
        deadline = time.monotonic() + seconds
        while not have_saved() and time.monotonic() < deadline:
            tick()
            time.sleep(_TICK_S)

    def _fail(self, ended: Mapping[str, int | None]) -> NoReturn:
        self._raise_lost(_LOSS_SEEN_S if spans_hosts(self._run.cluster) else 2 * _TICK_S)
        self._raise_reported()
        name = next(
            n for n, status in ended.items() if not (n.startswith("trainer") and status == 0)
        )
        self._explain(name, ending(ended[name]))

    def _raise_lost(self, seconds: float) -> None:
        """Raise what became of a host of ranks; the first to fail may not be the first to end.

        The ranks elsewhere complain of a closed connection before anybody knows that it is lost.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for rank, host in enumerate(self._hosts.ranks):
                part = self._children.get(f"trainer.rank{rank}")
                if part and part.returncode is not None and host.lost:
                    raise host.lost
            time.sleep(_TICK_S)

    def _explain(self, name: str, what: str) -> NoReturn:
        log = self._run_folder.log_of(name)
        # Whoever met a full disk could neither report it nor write it into the log.
        if shutil.disk_usage(self._run_folder.path).free < _FULL_BYTES:
            what = f"{what}, and no space is left at {self._run_folder.path}: make room there first"
        if not log.exists():  # of somebody else's server
            raise RunFailed(f"{name} {what}")
        part = self._children.get(name)
        end = part.tail() if part else last_lines(log)  # a part also knows that its host is lost
        raise RunFailed(f"{name} {what}. The end of {log}:\n{end}")

    def close(self) -> None:
        """Give back the ports that were kept for the vLLMs."""
        self._listening.close()


def _accelerator(place: Place) -> dict[str, str]:
    """What a rank needs to know where it computes on a CPU.

    DeepSpeed must be told so. Threads that wait for each other by spinning make a step up to ten
    times slower as soon as anything else wants a core. oneDNN keeps a kernel for each shape that it
    has multiplied, 1,024 of them twice, and the number of completion tokens is another one in each
    micro-batch: more than a GiB that is hardly ever used again.
    """
    if place.devices:
        return {}
    caches = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")  # its own, and PyTorch's
    kept = {name: os.environ.get(name, _KERNELS_KEPT) for name in caches}
    return {"DS_ACCELERATOR": "cpu", "OMP_WAIT_POLICY": "PASSIVE", **kept}
