"""Start a vLLM by hand for inference=external; further arguments are flags of vLLM.

vLLM starts as in a run, with the model, the lengths and the adapter of the configuration in the run
folder. train.py first writes this folder and then waits for the server. On a TCP port, every route
requires the key in the environment variable that inference.api_key_variable names.

    MY_KEY=... python -m rl.inference.serve_external outputs/my-run http://10.0.0.7:8000
"""

import os
import sys
from pathlib import Path

from rl.config.schema import Run
from rl.inference.external import address_of
from rl.inference.key_guard import KEY_FILE
from rl.inference.replica import Replica
from rl.inference.server import VLLMServer, served_policy, vllm_process
from rl.runtime.folder import RunFolder
from rl.runtime.network import Address


def server_process(run_folder: RunFolder, address: Address) -> tuple[list[str], dict[str, str]]:
    """Return command line and environment variables of a vLLM usable with inference=external."""
    run = Run.load(run_folder.config)
    server = VLLMServer(
        replicas=1,
        listen="unix" if address.path else "tcp",
        startup_timeout=1.0,
        devices=None,
        tensor_parallel_size=1,
        cpu_kv_cache_gib=None,
        args={},
    )
    policy = served_policy(run, run_folder, run.seed)
    return vllm_process(server, run_folder, Replica("inference", address), policy)


def required_key(run_folder: RunFolder) -> str:
    """Return the key that vLLM requires; raise ValueError if the user has set none.

    Without a key, any process that reaches the port could load weights.
    """
    variable = Run.load(run_folder.config).inference.api_key_variable
    key = os.environ.get(variable) if variable else None
    if not key:
        raise ValueError(
            "vLLM needs a key on a TCP port: start train.py with inference.api_key_variable=MY_KEY"
            ", and export MY_KEY, some 40 random characters, in both shells"
        )
    return key


if __name__ == "__main__":
    run_folder, address = RunFolder(Path(sys.argv[1])), address_of(sys.argv[2])
    command, env = server_process(run_folder, address)
    del env["TMPDIR"]  # TMPDIR is a folder on the supervisor's host, which another host lacks
    if not address.path:
        key_file = os.memfd_create("key", 0)  # an anonymous file in memory keeps the key off disks
        os.write(key_file, required_key(run_folder).encode())
        env[KEY_FILE] = f"/proc/self/fd/{key_file}"
    os.execve(command[0], [*command, *sys.argv[3:]], {**os.environ, **env})
