"""vLLM's life and what is posted to it; the scripted server plays vLLM (tests/support)."""

import json
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from rl.inference.routes import VLLMRoutes, healthy, wait_until_healthy
from rl.inference.server import VLLMServer, has_gpu, only_replica, serving, vllm_process
from rl.model.shape import shape_of
from rl.run.address import Address
from rl.run.failure import RunFailed
from rl.run.folder import RunFolder
from rl.sampling.renderer_chat import render
from tests.support.replicas import replica_at
from tests.support.scripted import tiny_model, tiny_renderer
from tests.support.scripted_vllm import ScriptedVLLM

ONE = {
    "replicas": 1,
    "listen": "unix",
    "startup_timeout": 1.0,
    "devices": None,
    "tensor_parallel_size": 1,
    "cpu_kv_cache_gib": 1,
}


def server(folder: Path, *faults: dict, startup_timeout: float = 30.0) -> ScriptedVLLM:
    (folder / "faults.json").write_text(json.dumps(faults))
    args = {"faults": str(folder / "faults.json")}
    return ScriptedVLLM(**{**ONE, "startup_timeout": startup_timeout, "args": args})


def served(folder: Path, *faults: dict, startup_timeout: float = 30.0):
    run_folder = RunFolder(folder / "run")
    run_folder.path.mkdir()
    run_folder.set_model(tiny_model(folder))
    vllm = server(folder, *faults, startup_timeout=startup_timeout)
    return serving(vllm, run_folder, dtype="float32", max_seq_len=256, seed=0, adapter=None)


def test_it_serves_as_long_as_the_block_lasts_and_leaves_no_socket(tmp_path):
    vllm_here = only_replica(RunFolder(tmp_path / "run"))
    with served(tmp_path) as vllm:
        assert healthy(vllm_here)
        vllm.set_version(3)
        prompt = render(tiny_renderer(), [{"role": "user", "content": "hi"}])
        scores = vllm.score("policy", prompt)
        vllm.pause()
        vllm.resume()
    assert len(scores) == len(prompt) - 1
    assert not healthy(vllm_here)
    assert not (tmp_path / "run" / "sockets").exists()


def test_one_that_ends_in_mid_block_is_the_reason_whatever_the_block_raised(tmp_path):
    fault = {"fault": "Exit", "path": "/update_weight_version", "status": 3}
    ended = r"vLLM ended with status 3\. The end of .*inference\.log"
    with pytest.raises(RunFailed, match=ended), served(tmp_path, fault) as vllm:
        vllm.set_version(3)


def test_one_that_ended_is_reported_even_where_the_block_noticed_nothing(tmp_path):
    fault = {"fault": "Exit", "path": "/resume", "status": 3}
    with ExitStack() as stack:
        vllm = stack.enter_context(served(tmp_path, fault))
        with suppress(RunFailed):  # as rollouts do: each costs itself alone
            vllm.resume()
        time.sleep(0.2)
        with pytest.raises(RunFailed, match="vLLM ended with status 3"):
            stack.close()


def test_an_error_of_the_block_is_its_own_where_vllm_lives(tmp_path):
    with pytest.raises(KeyError, match="mine"), served(tmp_path):
        raise KeyError("mine")


def test_one_that_cannot_start_is_quoted(tmp_path):
    run_folder = RunFolder(tmp_path / "run")
    run_folder.path.mkdir()
    run_folder.set_model(tmp_path / "nowhere")
    began = time.monotonic()
    with (
        pytest.raises(RunFailed, match=r"ended with status 1\. (?s:.*)No such file"),
        serving(
            server(tmp_path), run_folder, dtype="float32", max_seq_len=256, seed=0, adapter=None
        ),
    ):
        pass
    assert time.monotonic() - began < 25  # not the whole deadline


def test_one_that_does_not_listen_is_waited_for_no_longer_than_the_deadline(tmp_path):
    late = r"did not answer within inference\.startup_timeout=0\.1 s; see logs/inference\.log"
    with pytest.raises(RunFailed, match=late):
        wait_until_healthy(replica_at(tmp_path / "vllm.sock"), 0.1)


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ({"fault": "Status", "status": 500}, r"vLLM refused `resume`: .*scripted.*; see logs/"),
        ({"fault": "Hang", "seconds": 9}, r"did not answer `resume` within my\.knob=0\.2 s; see"),
        ({"fault": "CutShort"}, r"out of reach for `resume` \(RemoteProtocolError: .*; see logs/"),
    ],
)
def test_what_vllm_does_wrong_is_a_sentence_with_phase_deadline_and_log(fault, sentence, tmp_path):
    with served(tmp_path, {**fault, "path": "/resume"}):
        replica = only_replica(RunFolder(tmp_path / "run"))
        with VLLMRoutes(replica, timeout=0.2, limit="my.knob") as vllm:
            with pytest.raises(RunFailed, match=sentence):
                vllm.resume()
            vllm.resume()


def test_vllm_is_told_the_seed_of_the_run(tmp_path):
    vllm = VLLMServer(**ONE, args={"max_num_seqs": 4})
    for seed in (0, 3):
        command = vllm.command(
            tmp_path,
            Address(path=tmp_path / "s"),
            dtype="float32",
            max_seq_len=256,
            seed=seed,
            adapter=None,
        )
        assert command[command.index("--seed") + 1] == str(seed)
        assert command[-2:] == ["--max-num-seqs", "4"]


def test_vllm_is_told_the_dtype_of_the_output_head_where_it_is_another(tmp_path):
    vllm = VLLMServer(**ONE, args={})
    common = {"dtype": "bfloat16", "max_seq_len": 256, "seed": 0, "adapter": None}
    plain = vllm.command(tmp_path, Address(path=tmp_path / "s"), **common)
    other = vllm.command(tmp_path, Address(path=tmp_path / "s"), **common, head_dtype="float32")
    assert "--hf-overrides" not in plain
    assert other[other.index("--hf-overrides") + 1] == '{"head_dtype": "float32"}'


@pytest.mark.parametrize(
    ("device", "visible", "expected"),
    [("nvidia0", None, True), ("nvidiactl", None, False), ("dxg", None, True), ("", None, False),
     ("nvidia3", "", False), ("nvidia0", "0", True)],
)  # fmt: skip
def test_a_gpu_is_what_the_driver_shows_not_a_tool_on_the_path(
    device, visible, expected, tmp_path, monkeypatch
):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexit 9\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    if device:
        (tmp_path / device).touch()
    assert has_gpu(tmp_path) is expected


def environment(folder: Path, place=None, *, max_seq_len=256, **knobs):
    run_folder = RunFolder(folder)
    run_folder.set_model(tiny_model(folder))
    server = VLLMServer(**{**ONE, "args": {}, **knobs})
    common = {"dtype": "float32", "max_seq_len": max_seq_len, "seed": 0, "adapter": None}
    return vllm_process(server, run_folder, only_replica(run_folder), place=place, **common)[1]


def test_threads_follow_the_place_and_not_the_machine_that_starts_it(tmp_path, monkeypatch):
    """Which may have no GPU where the other has one."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert "OMP_NUM_THREADS" not in environment(tmp_path, {"CUDA_VISIBLE_DEVICES": "0"})
    assert environment(tmp_path, {"OMP_NUM_THREADS": "3"})["OMP_NUM_THREADS"] == "3"
    assert int(environment(tmp_path)["OMP_NUM_THREADS"]) >= 1  # all of this one


def test_the_cache_on_a_cpu_holds_a_row_unless_somebody_says_its_size(tmp_path):
    size = {"cpu_kv_cache_gib": None}
    assert environment(tmp_path, **size)["VLLM_CPU_KVCACHE_SPACE"] == "1"
    sizes = shape_of(tiny_model(tmp_path))
    rows_of_a_gib = (1 << 30) // sizes.row_bytes(1, "float32")
    longer = environment(tmp_path, max_seq_len=2 * rows_of_a_gib + 1, **size)
    assert longer["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert environment(tmp_path, cpu_kv_cache_gib=7)["VLLM_CPU_KVCACHE_SPACE"] == "7"
