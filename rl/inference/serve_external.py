"""Start a vLLM for a run with inference=external. Arguments: run folder, URL, flags of vLLM.

The program reads the model, max_seq_len and the LoRA adapter from the config in the run folder, so
start train.py first: it writes the folder and waits for the server. On a TCP port, every request
needs the key in the environment variable that inference.api_key_variable names.

    MY_KEY=... python -m rl.inference.serve_external outputs/my-run http://10.0.0.7:8000
"""

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from zlib import crc32

from rl.config.schema import Run
from rl.inference.external import address_of
from rl.inference.key_guard import KEY_FILE
from rl.inference.replica import Replica
from rl.inference.server import VLLMServer, served_policy, vllm_command
from rl.runtime.folder import RunFolder
from rl.runtime.network import Address


def server_command(run_folder: RunFolder, address: Address) -> tuple[list[str], dict[str, str]]:
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
    # Include the host's name, because servers on several hosts may listen on 0.0.0.0.
    seed = crc32(f"{run.seed} {socket.gethostname()} {address}".encode())
    policy = served_policy(run, run_folder, seed)
    return vllm_command(server, run_folder, Replica("inference", address), policy)


def required_key(run_folder: RunFolder) -> str:
    """Return the user's key. Raise ValueError if none is set, because the port needs a key."""
    variable = Run.load(run_folder.config).inference.api_key_variable
    key = os.environ.get(variable) if variable else None
    if not key:
        raise ValueError(
            "vLLM needs a key on a TCP port: start train.py with inference.api_key_variable=MY_KEY "
            "and run `export MY_KEY=<40 random characters>` in this shell and in train.py's shell"
        )
    return key


if __name__ == "__main__":
    try:
        run_folder, address = RunFolder(Path(sys.argv[1])), address_of(sys.argv[2])
        command, env = server_command(run_folder, address)
        if not address.path:
            key_file = os.memfd_create("key", 0)  # a file in memory, so the key is on no disk
            os.write(key_file, required_key(run_folder).encode())
            env[KEY_FILE] = f"/proc/self/fd/{key_file}"
            family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
            socket.create_server((address.host, address.port), family=family).close()
    except (OSError, ValueError) as error:  # OSError: the port is in use, or of another host
        sys.exit(f"vLLM cannot be started: {error}")
    # Make a private folder for sockets. The run's TMPDIR exists only on the supervisor's host.
    env["TMPDIR"] = folder = tempfile.mkdtemp(prefix="offbyone-vllm-")
    # Below, this process becomes vLLM. When vLLM ends, the pipe closes, and the shell deletes the
    # folder. The shell ignores signals, because Ctrl-C reaches every process of the terminal.
    delete = ["sh", "-c", 'trap "" HUP INT TERM; read line; rm -rf "$0"', folder]
    end_to_read, end_to_keep = os.pipe()
    os.set_inheritable(end_to_keep, True)
    shell = subprocess.Popen(delete, stdin=end_to_read)
    os.execve(command[0], [*command, *sys.argv[3:]], {**os.environ, **env})
