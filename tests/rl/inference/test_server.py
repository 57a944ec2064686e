"""Start and end of vLLM, and requests to it; a scripted server replaces vLLM (tests/support)."""

import json
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from rl.config.schema import Run
from rl.config.transport import VLLM_RANKS
from rl.inference import server as module
from rl.inference.routes import VLLMRoutes, is_healthy, wait_until_healthy
from rl.inference.server import (
    ServedPolicy,
    VLLMServer,
    adapter_limits,
    only_replica,
    replica_command,
    run_vllm,
    vllm_command,
)
from rl.runtime.failure import RunFailed
from rl.runtime.folder import RunFolder
from rl.sampling.renderer_chat import render
from tests.support.composing import composed
from tests.support.replicas import replica_at
from tests.support.scripted import tiny_model, tiny_renderer
from tests.support.scripted_vllm import ScriptedVLLM

ONE = {"replicas": 1, "listen": "unix", "startup_timeout": 1.0, "devices": None}
ONE |= {"tensor_parallel_size": 1, "cpu_kv_cache_gib": 1}
POLICY = ServedPolicy(dtype="float32", max_seq_len=256, seed=0)


def server(folder: Path, *faults: dict) -> ScriptedVLLM:
    (folder / "faults.json").write_text(json.dumps(faults))
    args = {"faults": str(folder / "faults.json")}
    return ScriptedVLLM(**{**ONE, "startup_timeout": 30.0, "args": args})


def served(folder: Path, *faults: dict, model: Path | None = None):
    run_folder = RunFolder(folder / "run")
    run_folder.path.mkdir()
    run_folder.set_model(model or tiny_model(folder))
    return run_vllm(server(folder, *faults), run_folder, POLICY)


def test_vllm_serves_while_the_block_runs_and_leaves_no_socket(tmp_path):
    vllm_here = only_replica(RunFolder(tmp_path / "run"))
    with served(tmp_path) as vllm:
        assert is_healthy(vllm_here)
        vllm.set_version(3)
        prompt = render(tiny_renderer(), [{"role": "user", "content": "hi"}])
        scores = vllm.score("policy", prompt)
        vllm.pause()
        vllm.resume()
    assert len(scores) == len(prompt) - 1
    assert not is_healthy(vllm_here)
    assert not (tmp_path / "run" / "sockets").exists()


def test_the_end_of_vllm_is_reported_and_not_the_error_of_the_block(tmp_path):
    fault = {"fault": "Exit", "path": "/update_weight_version", "status": 3}
    ended = r"vLLM ended with status 3\. The end of .*inference\.log"
    with pytest.raises(RunFailed, match=ended), served(tmp_path, fault) as vllm:
        vllm.set_version(3)


def test_the_end_of_vllm_is_reported_even_if_the_block_succeeds(tmp_path):
    fault = {"fault": "Exit", "path": "/resume", "status": 3}
    with ExitStack() as stack:
        vllm = stack.enter_context(served(tmp_path, fault))
        with suppress(RunFailed):  # a failed request costs its rollout only
            vllm.resume()
        time.sleep(0.2)
        with pytest.raises(RunFailed, match="vLLM ended with status 3"):
            stack.close()


def test_an_error_of_the_block_passes_while_vllm_runs(tmp_path):
    with pytest.raises(KeyError, match="mine"), served(tmp_path):
        raise KeyError("mine")


def test_a_failed_start_quotes_the_log(tmp_path):
    began = time.monotonic()
    failed = pytest.raises(RunFailed, match=r"ended with status 1\. (?s:.*)No such file")
    with failed, served(tmp_path, model=tmp_path / "nowhere"):
        pass
    assert time.monotonic() - began < 25  # before the deadline


def test_waiting_for_vllm_ends_at_the_deadline(tmp_path):
    late = r"did not start within inference\.startup_timeout=0\.1 s: .* in logs/inference\.log"
    with pytest.raises(RunFailed, match=late):
        wait_until_healthy(replica_at(tmp_path / "vllm.sock"), 0.1)


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ({"fault": "Status", "status": 500}, r"vLLM refused `resume`: .*scripted.*; see logs/"),
        ({"fault": "Hang", "seconds": 9}, r"`resume` within my\.knob=0\.2 s: raise my\.knob"),
        (
            {"fault": "CutShort"},
            r"cannot be reached for `resume` \(RemoteProtocolError: .* in logs/",
        ),
    ],
)
def test_a_failed_route_is_reported_with_phase_deadline_and_log(fault, sentence, tmp_path):
    with served(tmp_path, {**fault, "path": "/resume"}):
        replica = only_replica(RunFolder(tmp_path / "run"))
        with VLLMRoutes(replica, timeout=0.2, limit="my.knob") as vllm:
            with pytest.raises(RunFailed, match=sentence):
                vllm.resume()
            vllm.resume()


@pytest.mark.parametrize(("rank", "limit"), [(1, 1), (2, 8), (8, 8), (9, 16), (512, 512)])
def test_the_limits_of_an_adapter_are_the_smallest_that_fit(rank, limit, tmp_path):
    assert limit in VLLM_RANKS
    kept = adapter_limits(rank, ["model.q_proj", "v_proj"], tmp_path)
    assert (kept.rank, kept.layers) == (limit, ["q_proj", "v_proj"])


def environment(folder: Path, place=None, *, max_seq_len=256, dtype="float32", **knobs):
    RunFolder(folder).set_model(tiny_model(folder))
    server = VLLMServer(**{**ONE, "args": {}, **knobs})
    policy = replace(POLICY, max_seq_len=max_seq_len, dtype=dtype)
    replica = only_replica(RunFolder(folder))
    return vllm_command(server, RunFolder(folder), replica, policy, place)[1]


def test_threads_follow_the_place_and_not_the_machine_that_starts_it(tmp_path, monkeypatch):
    """The machine of the supervisor may have no GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert "OMP_NUM_THREADS" not in environment(tmp_path, {"CUDA_VISIBLE_DEVICES": "0"})
    assert environment(tmp_path, {"OMP_NUM_THREADS": "3"})["OMP_NUM_THREADS"] == "3"
    # On this machine, each core but one gets a thread.
    monkeypatch.setattr(module, "visible_cpus", lambda: {0, 1, 2, 3, 4, 5})
    for cpus_of_a_core, num_threads in ((1, "5"), (2, "2"), (6, "1")):
        monkeypatch.setattr(module, "core_of", lambda cpu, n=cpus_of_a_core: cpu // n)
        assert environment(tmp_path)["OMP_NUM_THREADS"] == num_threads
    monkeypatch.setattr(module, "visible_gpus", lambda: ["0"])
    assert "OMP_NUM_THREADS" not in environment(tmp_path)
    monkeypatch.undo()
    monkeypatch.setenv("OMP_NUM_THREADS", "7")  # vLLM inherits it
    monkeypatch.setenv("VLLM_PLUGINS", "offbyone,theirs")
    assert "OMP_NUM_THREADS" not in environment(tmp_path)
    assert environment(tmp_path)["VLLM_PLUGINS"] == "offbyone,theirs"


@pytest.mark.parametrize(("dtype", "num_bytes"), [("float32", 4), ("bfloat16", 2)])
def test_the_cache_on_a_cpu_holds_a_row_by_default(dtype, num_bytes, tmp_path):
    size = {"cpu_kv_cache_gib": None, "dtype": dtype}
    assert environment(tmp_path, **size)["VLLM_CPU_KVCACHE_SPACE"] == "1"
    # Key and value of one layer with one head of width 8.
    tokens_of_a_gib = (1 << 30) // (2 * 8 * num_bytes)
    for num_tokens, gib in ((2 * tokens_of_a_gib, "2"), (2 * tokens_of_a_gib + 1, "3")):
        longer = environment(tmp_path, max_seq_len=num_tokens, **size)
        assert longer["VLLM_CPU_KVCACHE_SPACE"] == gib
    assert environment(tmp_path, cpu_kv_cache_gib=7)["VLLM_CPU_KVCACHE_SPACE"] == "7"


def test_each_replica_and_each_restart_of_it_samples_with_its_own_seed(tmp_path):
    folder = RunFolder(tmp_path / "r")
    folder.path.mkdir()
    folder.set_model(tiny_model(tmp_path))
    run = Run.of(composed(f"output_dir={tmp_path}", "run_name=r", "inference.replicas=2", "seed=3"))
    first = [replica_at(tmp_path / name, name) for name in ("inference0", "inference1")]
    restarted = [replace(one, incarnation=1) for one in first]
    commands = [replica_command(run, folder, one)[0] for one in (*first, *restarted)]
    assert [c[c.index("--seed") + 1] for c in commands] == ["3", "4", "1003", "1004"]
