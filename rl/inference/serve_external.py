"""A vLLM for inference=external, by hand; vLLM's own flags may follow.

Becomes a vLLM as a run starts it, with what the configuration in the run's folder says of model,
lengths and adapter; train.py writes that folder first of all, then waits for the server. On a port
every route asks for the key that the environment variable inference.api_key_variable holds here.

    MY_KEY=... python -m rl.inference.serve_external outputs/my-run http://10.0.0.7:8000
"""

import os
import sys
from pathlib import Path

from rl.config.schema import Run
from rl.config.transport import transport
from rl.inference.external import address_of
from rl.inference.key_guard import KEY_FILE
from rl.inference.replica import Replica
from rl.inference.server import VLLMServer, adapter_room, vllm_process
from rl.run.address import Address
from rl.run.folder import RunFolder


def process(run_folder: RunFolder, address: Address) -> tuple[list[str], dict[str, str]]:
    """Return the command of a vLLM that a run takes for its own, and its environment."""
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
    return vllm_process(
        server,
        run_folder,
        Replica("inference", address),
        dtype=run.model["dtype"],
        max_seq_len=run.max_seq_len,
        seed=run.seed,
        adapter=adapter_room(transport(vars(run)), run.adapter, run_folder.model()),
        head_dtype=run.model["head_dtype"],
    )


def key_of(run_folder: RunFolder) -> str:
    """Return what the server is to ask for.

    Raises:
        ValueError: there is no key: whoever can reach the port could load weights.

    """
    variable = Run.load(run_folder.config).inference.get("api_key_variable")
    key = os.environ.get(variable) if variable else None
    if not key:
        raise ValueError(
            "on a port vLLM asks for a key: start train.py with inference.api_key_variable=MY_KEY, "
            "and export MY_KEY, some 40 random characters, there and here"
        )
    return key


if __name__ == "__main__":
    run_folder, address = RunFolder(Path(sys.argv[1])), address_of(sys.argv[2])
    command, env = process(run_folder, address)
    del env["TMPDIR"]  # it is the run's, on the supervisor's host
    if not address.path:
        key_file = os.memfd_create("key", 0)  # no file that would be left behind
        os.write(key_file, key_of(run_folder).encode())
        env[KEY_FILE] = f"/proc/self/fd/{key_file}"
    os.execve(command[0], [*command, *sys.argv[3:]], {**os.environ, **env})
