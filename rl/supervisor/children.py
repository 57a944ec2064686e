"""Start the child processes of one run and watch them until the trainer has finished.

The supervisor starts the ranks without torchrun, which would be one more process that imports
torch. Each rank has its own log. With cluster=local, the ranks connect through a file, because
another program could take a chosen TCP port before rank 0 listens on it.
"""

import os
import shutil
import time
from collections.abc import Callable
from typing import NoReturn

from rl.cluster.host import Host, Hosts, Process, Start
from rl.config.build import build
from rl.config.schema import Run
from rl.inference.external import ExternalServers, why_unusable
from rl.inference.replica import Replica
from rl.inference.server import replica_command
from rl.placement.placement import Place, Plan
from rl.runtime.child import Reaper, describe_exit, last_lines, python_module
from rl.runtime.endpoint import WAIT_VARIABLE
from rl.runtime.failure import RunFailed, first_failure, with_remedies
from rl.runtime.files import write_private
from rl.runtime.folder import RunFolder
from rl.runtime.metrics import num_steps_done
from rl.runtime.network import LISTEN_VARIABLE, Address
from rl.runtime.status import read_statuses
from rl.runtime.stop_request import StopRequest
from rl.runtime.text import say
from rl.supervisor.replicas import Replicas

_TICK_S = 0.25
_HOST_TIMEOUT_S = 5.0  # after a process has failed, wait this long for a report of a lost host
_FULL_BYTES = 1 << 16  # a disk with fewer free bytes counts as full
_KERNELS_KEPT = "64"  # maximum number of oneDNN kernels in a cache, enough for a micro-batch
STOPPING = "stopping after this step and a checkpoint (a second signal ends the run immediately)"


class Children:
    def __init__(
        self, run: Run, run_folder: RunFolder, reaper: Reaper, plan: Plan, hosts: Hosts
    ) -> None:
        self._run, self._run_folder, self._reaper, self._plan = run, run_folder, reaper, plan
        self._hosts = hosts
        self._children: dict[str, Process] = {}
        self._replicas = self._build_replicas() if run.sampler.uses_vllm else None
        self._begun = False

    def start(self, complete: Callable[[], None] = lambda: None) -> None:
        """Start vLLM. Call `complete`, which completes config.yaml. Start the other processes."""
        folder = str(self._run_folder.path)
        if self._replicas:
            self._replicas.start()
        complete()
        world, listening, master = len(self._plan.ranks), {}, {}
        if self._run.cluster.spans_hosts:  # all ranks connect to a TCP port of rank 0
            listening, first = {LISTEN_VARIABLE: self._hosts.here.address}, self._hosts.ranks[0]
            master = {"MASTER_ADDR": first.address, "MASTER_PORT": str(first.free_port())}
        # Hide GPUs from the rollouts process, because JAX in a reward function would fill a GPU.
        env = {**listening, "CUDA_VISIBLE_DEVICES": ""}
        self._start("rollouts", python_module("rl.rollouts", folder), env)
        for rank, place in enumerate(self._plan.ranks):
            where = {"RANK": str(rank), "WORLD_SIZE": str(world), **master, **place.environment()}
            command = python_module("rl.trainer", folder)
            env = {**where, **_device_environment(place, shared=self._plan.is_shared(place))}
            self._start(f"trainer.rank{rank}", command, env, self._hosts.ranks[rank])

    def _build_replicas(self) -> Replicas:
        run, folder = self._run, self._run_folder
        if run.inference.is_external:
            servers: ExternalServers = build(run.inference)()
            replicas = servers.servers()
            if key := replicas[0].key:
                write_private(folder.private.external_key, key)
        else:
            replicas = self._replicas_to_start()
        return Replicas(
            replicas,
            folder,
            self._start_vllm,
            startup_timeout=run.inference.startup_timeout,
            wait_timeout=run.trainer.wait_timeout,
            num_steps=lambda: num_steps_done(folder),
            why_unusable=lambda replica: (
                why_unusable(replica, folder.initial_model(), run.max_seq_len)
                if run.inference.is_external
                else None
            ),
        )

    def _replicas_to_start(self) -> list[Replica]:
        inference, cluster = self._run.inference, self._run.cluster
        private, names = self._run_folder.private, inference.names
        if inference.listen == "unix" and not cluster.spans_hosts:
            return [Replica(name, Address(path=private.vllm_socket_of(name))) for name in names]
        if private.read_key() is None:
            private.make_key()
        key, hosts = private.read_key(), self._hosts.replicas
        addresses = [Address(host=host.address, port=host.free_port()) for host in hosts]
        return [Replica(*pair, key=key) for pair in zip(names, addresses, strict=True)]

    def _start_vllm(self, replica: Replica) -> Process | None:
        if self._run.inference.is_external:
            return None
        number = self._run.inference.names.index(replica.name)
        host, log = self._hosts.replicas[number], self._run_folder.log_of(replica.name)
        place = self._plan.inference[number].environment()
        command, env = replica_command(self._run, self._run_folder, replica, place)
        return host.start(Start(replica.name, command, log, env))

    def _start(
        self, name: str, command: list[str], env: dict[str, str], host: Host | None = None
    ) -> None:
        in_terminal = self._run.trainer.debug and name.startswith("trainer")
        hook = {} if in_terminal else {"PYTHONBREAKPOINT": "rl.runtime.failure.refuse_breakpoint"}
        env = {**hook, **self._run_folder.private.environment(), **env}
        # The argument False is `ends_on_term`, because TERM asks these processes for a checkpoint.
        start = Start(name, command, self._run_folder.log_of(name), env, False, in_terminal)
        self._children[name] = (host or self._hosts.here).start(start)

    def watch(self, tick: Callable[[], None], stop: StopRequest) -> None:
        """Block until all ranks have finished. Raise RunFailed if a process ends too early.

        A stop request ends the run after the current step. Before the first batch it ends the run
        at once.
        """
        trainers = self._trainers()
        while True:
            tick()
            begun = self._first_batch_has_begun()
            if stop.asked:  # check this first, because the signal may also end processes
                self._request_stop()
            asked = self._run_folder.stop_request.exists()
            ended = {n: c.returncode for n, c in self._children.items() if c.returncode is not None}
            if all(trainer.returncode == 0 for trainer in trainers):
                self._raise_reported_failure()  # ranks end with status 0 even if sampling failed
                return
            if self._replicas:  # check vLLM first, because ranks and rollouts fail if it ends
                fatal = self._replicas.check_and_restart(may_restart=begun and not asked)
                if fatal is not None:
                    if begun:
                        if self._stop_and_save(tick) and asked:
                            return  # no error, because the signal to stop also ended vLLM
                        self._raise_reported_failure("trainer")  # report a rank's error first
                    self._raise_failure_with_log(*fatal)
            # A rank may end with status 0 before the other ranks. Any other early end is an error.
            for name, status in ended.items():
                if status != 0 or not name.startswith("trainer"):
                    self._raise_if_host_lost()
                    self._raise_reported_failure()
                    self._raise_failure_with_log(name, describe_exit(status))
            self._reaper.ensure_alive()
            time.sleep(_TICK_S)

    def _trainers(self) -> list[Process]:
        return [child for name, child in self._children.items() if name.startswith("trainer")]

    def _request_stop(self) -> None:
        if not self._first_batch_has_begun():
            raise KeyboardInterrupt
        if not self._run_folder.stop_request.exists():
            self._run_folder.stop_request.touch()
            say(STOPPING)

    def _first_batch_has_begun(self) -> bool:
        if not self._begun:  # once True, always True, although the status changes
            rollouts = read_statuses(self._run_folder).get("rollouts")
            self._begun = rollouts is not None and rollouts.phase.startswith("batch")
        return self._begun

    def _raise_reported_failure(self, process: str = "") -> None:
        failure = first_failure(self._run_folder, process)
        if failure:
            log = self._run_folder.log_of(failure["part"])
            details = "" if self._run.trainer.debug else f"\n(details: {log})"
            raise RunFailed(f"{failure['part']}: {failure['message']}{details}")

    def _stop_and_save(self, tick: Callable[[], None]) -> bool:
        """Let the ranks save and end. Return whether all have status 0 and all steps are saved."""
        ranks = self._trainers()
        self._run_folder.stop_request.touch()
        deadline = time.monotonic() + self._run.trainer.wait_timeout
        while any(rank.returncode is None for rank in ranks) and time.monotonic() < deadline:
            tick()
            time.sleep(_TICK_S)
        saved, done = self._run_folder.num_saved_steps(), num_steps_done(self._run_folder)
        return saved == done and all(rank.returncode == 0 for rank in ranks)

    def _raise_if_host_lost(self) -> None:
        """Wait for reports of lost hosts. Raise HostLost if the host of an ended rank is lost."""
        seconds = _HOST_TIMEOUT_S if self._run.cluster.spans_hosts else 2 * _TICK_S
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for rank, host in enumerate(self._hosts.ranks):
                process = self._children.get(f"trainer.rank{rank}")
                if process and process.returncode is not None and host.lost:
                    raise host.lost
            time.sleep(_TICK_S)

    def _raise_failure_with_log(self, name: str, cause: str) -> NoReturn:
        log = self._run_folder.log_of(name)
        # Name a full disk as the cause, because the process could write no error report and no log.
        if shutil.disk_usage(self._run_folder.path).free < _FULL_BYTES:
            cause = f"{cause}, and no space is left at {self._run_folder.path}: free disk space"
        if not log.exists():  # the log of an external server is on its own machine
            raise RunFailed(f"{name} {cause}")
        process = self._children.get(name)
        end = process.tail() if process else last_lines(log)
        excerpt = f".\nThe end of {log}:\n{end}" if end else ""
        raise RunFailed(with_remedies(f"{name} {cause}{excerpt}"))


def _device_environment(place: Place, *, shared: bool) -> dict[str, str]:
    """Return the environment variables that suit the device of a rank.

    DS_ACCELERATOR names the planned device, because DeepSpeed does not detect CPUs, and because a
    rank that cannot use its GPU must not train on the CPU. On a GPU PyTorch's allocator may
    extend memory segments, because varying shapes would fragment segments of fixed size. If vLLM
    uses the same GPU (`shared`), the rank loads the model after vLLM has started.

    On a CPU OMP_WAIT_POLICY lets waiting threads sleep, because spinning can make a step ten times
    slower. The other variables limit two caches of oneDNN kernels, one kernel per matrix shape.
    Shapes vary with the number of completion tokens, so large caches would waste over a GiB.
    """
    if place.devices:
        older = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        segments = os.environ.get("PYTORCH_ALLOC_CONF", older)
        waits = {WAIT_VARIABLE: "1"} if shared else {}
        return {"DS_ACCELERATOR": "cuda", "PYTORCH_ALLOC_CONF": segments, **waits}
    caches = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
    kept = {name: os.environ.get(name, _KERNELS_KEPT) for name in caches}
    return {"DS_ACCELERATOR": "cpu", "OMP_WAIT_POLICY": "PASSIVE", **kept}
