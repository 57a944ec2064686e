"""One vLLM of a run, started by hand: python -m rl.inference <run folder> [--replica 0].

It reports its address into the run's folder, and ends when the run is over.
"""

import argparse
import signal
import sys
import time
from pathlib import Path

from rl.config.schema import Run
from rl.inference.process import replica_process
from rl.inference.replica import Replica
from rl.runtime.child import Child, Reaper
from rl.runtime.endpoint import Endpoint
from rl.runtime.folder import RunFolder
from rl.runtime.network import Address, free_port, listening_address
from rl.runtime.stop_request import require_prepared, stopped_by_signals

_TICK_S = 0.5


def serve(run_folder: RunFolder, number: int) -> int:
    """Serve until vLLM ends or the run is over; return the exit status."""
    run = Run.load(run_folder.config)
    name, host = run.inference.names[number], listening_address(run.cluster.interface)
    before = Endpoint.read(run_folder, name)
    incarnation = before.incarnation + 1 if before else 0
    replica = Replica(name, Address(host=host, port=free_port(host)), incarnation)
    command, env = replica_process(run, run_folder, replica)
    del env["TMPDIR"]  # the run's folder is on a shared file system, which supports no sockets
    log = run_folder.log_of(name)
    with (
        stopped_by_signals(),
        Reaper() as reaper,
        Child(name, command, log=log, reaper=reaper, env=env) as child,
    ):
        Endpoint(replica.address, incarnation, child.group or 0).write(run_folder, name)
        while child.returncode is None and not run_folder.over.exists():
            reaper.ensure_alive()
            time.sleep(_TICK_S)
        return 0 if run_folder.over.exists() else int(child.returncode or 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m rl.inference", description=__doc__)
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("--replica", type=int, default=0, help="which of inference.replicas")
    arguments = parser.parse_args()
    folder = RunFolder(arguments.run_folder)
    require_prepared(folder)
    # USR2 asks the run to save, and the run still needs vLLM for that.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        sys.exit(serve(folder, arguments.replica))
    except KeyboardInterrupt:
        sys.exit(130)
