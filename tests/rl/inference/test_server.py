"""Start and end of vLLM and of external servers, and what they are told, with a scripted server."""

import asyncio
import json
import re
import time
from base64 import b64encode
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from rl.cluster.host import Demand
from rl.cluster.local import LocalCluster
from rl.config.schema import Run
from rl.inference.client import VLLMClient
from rl.inference.external import ExternalServers, why_unusable
from rl.inference.key_guard import GUARD, KEY_FILE, KeyGuard
from rl.inference.replica import Replica, started_replicas
from rl.inference.request_body import _PIECE_BYTES, JSONBody
from rl.inference.router import Router
from rl.inference.routes import VLLMRoutes, is_healthy, prefix_cache_counts, wait_until_healthy
from rl.inference.serve_external import required_key, server_command
from rl.inference.server import (
    AdapterLimits,
    ServedPolicy,
    VLLMServer,
    only_replica,
    replica_command,
    run_vllm,
    vllm_command,
)
from rl.placement.placement import placement
from rl.runtime.child import Reaper
from rl.runtime.devices import Host
from rl.runtime.endpoint import Endpoint
from rl.runtime.failure import RunFailed
from rl.runtime.folder import RunFolder
from rl.runtime.network import Address
from rl.supervisor.children import Children
from tests.rl.weights.test_pusher import OnePolicy, Scorer, pusher, two_rows
from tests.support import golden as stored
from tests.support import receiving
from tests.support.composing import composed
from tests.support.listening import PostHandler, listening
from tests.support.replicas import replica_at
from tests.support.scripted import tiny_model
from tests.support.scripted_vllm import Engine, ScriptedVLLM, asking_for
from tests.support.served_engine import serving

ONE = {"replicas": 1, "listen": "unix", "startup_timeout": 1.0, "devices": None}
ONE |= {"tensor_parallel_size": 1, "cpu_kv_cache_gib": 1}
POLICY = ServedPolicy(dtype="float32", max_seq_len=256, seed=0)


def served(folder: Path, *faults: dict, model: Path | None = None):
    (folder / "faults.json").write_text(json.dumps(faults))
    args = {"faults": str(folder / "faults.json")}
    server = ScriptedVLLM(**{**ONE, "startup_timeout": 30.0, "args": args})
    run_folder = RunFolder(folder / "run")
    run_folder.path.mkdir()
    run_folder.set_model(model or tiny_model(folder))
    return run_vllm(server, run_folder, POLICY)


def test_vllm_serves_while_the_block_runs_and_failed_requests_are_reported(tmp_path):
    faults = ({"fault": "Status", "status": 500}, {"fault": "Hang", "seconds": 9})
    faults = (*faults, {"fault": "CutShort"})
    numbered = ({**fault, "path": "/resume", "at": at} for at, fault in enumerate(faults))
    replica = only_replica(RunFolder(tmp_path / "run"))
    own_error = pytest.raises(KeyError, match="mine")
    with own_error, served(tmp_path, *numbered):
        assert is_healthy(replica)
        with VLLMRoutes(replica, timeout=0.2, limit="my.knob") as vllm:
            for said in (
                r"vLLM refused `resume`: .*scripted.*; see logs/",
                r"`resume` within my\.knob=0\.2 s: raise my\.knob",
                r"cannot be reached for `resume` \(RemoteProtocolError: .* in logs/",
            ):
                with pytest.raises(RunFailed, match=said):
                    vllm.resume()
            vllm.resume()
        raise KeyError("mine")
    assert not is_healthy(replica)
    assert not (tmp_path / "run" / "sockets").exists()


@pytest.mark.parametrize("is_caught", [False, True])  # a failed request costs its rollout only
def test_the_end_of_vllm_is_reported_and_not_the_error_of_the_block(is_caught, tmp_path):
    fault = {"fault": "Exit", "path": "/update_weight_version"}
    ended = pytest.raises(RunFailed, match=r"ended with status 3\. The end of .*inference\.log")
    with ended, served(tmp_path, fault) as vllm:
        with suppress(*[RunFailed] * is_caught):
            vllm.set_version(3)
        time.sleep(0.2)


def test_a_start_that_fails_or_takes_too_long_is_reported_with_its_log(tmp_path):
    began = time.monotonic()
    failed = pytest.raises(RunFailed, match=r"ended with status 1\. (?s:.*)No such file")
    with failed, served(tmp_path, model=tmp_path / "nowhere"):
        pass
    assert time.monotonic() - began < 25  # before the deadline
    late = r"did not start within inference\.startup_timeout=0\.1 s: .* in logs/inference\.log"
    with pytest.raises(RunFailed, match=late):
        wait_until_healthy(replica_at(tmp_path / "vllm.sock"), 0.1)


def test_each_replica_and_each_restart_of_it_samples_with_its_own_seed(tmp_path):
    folder = RunFolder(tmp_path / "r")
    folder.path.mkdir()
    folder.set_model(tiny_model(tmp_path))
    run = Run.of(composed(f"output_dir={tmp_path}", "run_name=r", "inference.replicas=2", "seed=3"))
    first = [replica_at(tmp_path / name, name) for name in ("inference0", "inference1")]
    restarted = [replace(one, incarnation=1) for one in first]
    commands = [replica_command(run, folder, one)[0] for one in (*first, *restarted)]
    assert [c[c.index("--seed") + 1] for c in commands] == ["3", "4", "1003", "1004"]


def test_the_counters_of_all_engines_of_a_vllm_are_added_and_unknown_if_it_is_gone(tmp_path):
    class Counters(PostHandler):
        def answer(self, body):
            counts = ("queries_total{0} 8", "queries_total{1} 4", "hits_total{0} 6")
            lines = (f"vllm:prefix_cache_{count}\n" for count in (*counts, "hits_total{1} 1"))
            return "".join(lines).encode()

    with listening(tmp_path / "s", Counters):
        assert prefix_cache_counts(replica_at(tmp_path / "s")) == (12.0, 7.0)
    assert prefix_cache_counts(replica_at(tmp_path / "s")) is None


def test_an_adapter_that_an_earlier_trainer_has_loaded_is_unloaded(tmp_path):
    with receiving.replica(tmp_path / "s") as vllm:
        vllm.server.faults["/v1/load_lora_adapter"] = receiving.refuse
        with pytest.raises(RunFailed, match="it refuses"):
            vllm.receiver.load_adapter("mine", Path("/a"))
    verbs = ("load", "unload", "load")
    assert vllm.server.routes == [f"/v1/{verb}_lora_adapter" for verb in verbs]


@pytest.mark.parametrize("size", [0, 1, _PIECE_BYTES, 2 * _PIECE_BYTES + 1])
def test_bytes_become_base64_text_and_everything_else_is_json(size):
    value = bytes(range(251)) * (size // 251 + 1)
    content = {"a": [1, "ü"], "b": {"in": value[:size]}, "c": b"x", "d": None}
    body = JSONBody(content)
    joined = b"".join(body)
    assert len(joined) == body.num_bytes
    encoded = {"b": {"in": b64encode(value[:size]).decode()}, "c": b64encode(b"x").decode()}
    assert json.loads(joined) == content | encoded


OURS = "rl.inference.server.VLLMServer"
CONTROLLED = ("/init_weight_transfer_engine", "/inference/v1/generate")


def external(*urls: str, variable: str | None = None) -> ExternalServers:
    return ExternalServers(urls=list(urls), api_key_variable=variable, startup_timeout=5.0)


def test_each_url_is_a_replica_with_the_key_of_the_variable(monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    first, second = external("http://a:1", "unix:/s", variable="MY_KEY").servers()
    assert (first.name, first.address) == ("inference0", Address(host="a", port=1))
    assert (second.name, second.address) == ("inference1", Address(path=Path("/s")))
    assert (first.key, "secret" in repr(first)) == ("secret", False)
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(ValueError, match="=MY_KEY names a variable that is not set: export it"):
        external("http://a:1", variable="MY_KEY")
    for url in ("https://a:1", "unix:s", "http://a:1/v1"):
        with pytest.raises(ValueError, match="write http://host:port"):
            external(url)
    for urls in ([], ["http://a:1", "http://a:1/"]):
        with pytest.raises(ValueError, match="write at least one URL, and each once"):
            external(*urls)


def test_the_other_processes_know_the_servers_without_the_variable(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    overrides = ["inference=external", "inference.urls=[http://a:1,http://b:1]"]
    run = Run.of(composed(f"output_dir={tmp_path}", *overrides))
    run = run.with_values({"inference.api_key_variable": "MY_KEY"})
    monkeypatch.setenv("MY_KEY", "secret")
    folder.private.make()
    folder.private.make_key()  # of the run, which external servers must not learn
    plan = placement(run, [Host()])
    with Reaper() as reaper, LocalCluster().hosts(folder, reaper, Demand(0, 1, 1)) as hosts:
        Children(run, folder, reaper, plan, hosts)
    monkeypatch.delenv("MY_KEY")  # as on the hosts of a cluster
    assert folder.private.external_key.stat().st_mode & 0o77 == 0
    assert run.inference.names == ["inference0", "inference1"]
    Endpoint(Address(host="b", port=1), 2).write(folder, "inference1")
    (replica,) = started_replicas(folder, run.inference)
    assert (replica.name, replica.incarnation, replica.key) == ("inference1", 2, "secret")
    (ours,) = started_replicas(folder, run.inference.of({**run.inference, "_target_": OURS}))
    assert ours.key == folder.private.read_key() is not None


def text(content: str) -> Any:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=content, content_type="application/json")

    return answer


def models(**fields: object) -> dict[str, str]:
    return {"/v1/models": json.dumps({"data": [fields]})}


@pytest.mark.parametrize(
    ("changes", "key", "sentence"),
    [
        (models(id="policy", max_model_len=64), None, None),
        (models(id="llama"), None, "serves llama, but no model"),
        (models(id="policy", max_model_len=9), None, "9 tokens, fewer than max_seq_len=64"),
        ({"/v1/models": "[]"}, None, "cannot be used as a vLLM"),
        ({CONTROLLED[0]: None}, None, f"has no route {CONTROLLED[0]}"),
        ({"/tokenize": '{"tokens": [1, 2]}'}, None, "has another tokenizer than"),
        ({}, "theirs", "refuses the key: set inference.api_key_variable to the variable"),
    ],
)
async def test_the_answers_of_a_server_show_whether_it_can_be_used(
    changes, key, sentence, tmp_path
):
    model = tiny_model(tmp_path)
    engine = Engine(model, 256)
    routes = {"/health": text(""), "/v1/models": engine.models, "/tokenize": engine.tokenize}
    routes |= dict.fromkeys(CONTROLLED, engine.control)
    routes |= {path: content and text(content) for path, content in changes.items()}
    present = {path: answer for path, answer in routes.items() if answer}
    async with serving(present, tmp_path / "s", *([asking_for(key)] if key else [])):
        replica = replica_at(tmp_path / "s")
        problem = await asyncio.to_thread(why_unusable, replica, model, 64)
        assert await asyncio.to_thread(is_healthy, replica) is (key is None)
        assert await asyncio.to_thread(is_healthy, replica, or_unusable=True)
    assert (problem is None) if sentence is None else (sentence in str(problem))


@pytest.mark.parametrize(("status", "answers"), [(404, True), (503, False)])
async def test_a_proxy_in_front_of_a_server_that_starts_is_no_other_program(
    status, answers, tmp_path
):
    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=status)

    async with serving({"/{path:.*}": answer}, tmp_path / "s"):
        found = await asyncio.to_thread(is_healthy, replica_at(tmp_path / "s"), or_unusable=True)
    assert found is answers


def test_serve_external_starts_the_same_vllm_behind_the_guard(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path / "r")
    folder.path.mkdir()
    changes = ["inference=external", "inference.urls=[http://10.0.0.7:8000]", "seed=5"]
    changes += ["model.head_dtype=float32", "max_seq_len=96", "sampler.top_k=30"]
    changes += ["adapter=lora", "adapter.rank=9", "adapter.target_modules=[q_proj]"]
    run = Run.of(composed(f"output_dir={tmp_path}", "run_name=r", *changes))
    run.save(folder.config)
    model = tiny_model(tmp_path)
    (model / "model.safetensors").write_bytes(b"\2" + bytes(7) + b"{}")
    folder.set_model(model)
    command, _ = server_command(folder, Address(host="10.0.0.7", port=8000))
    flags = dict(pairwise(command))
    where = {"--host": "10.0.0.7", "--port": "8000", "--middleware": GUARD}
    plain = {"--served-model-name": "policy", "--max-model-len": "96"}
    plain |= {"--dtype": "bfloat16", "--hf-overrides": '{"head_dtype": "float32"}'}
    plain |= {"--max-logprobs": "60", "--max-lora-rank": "16", "--lora-target-modules": "q_proj"}
    assert flags == flags | where | plain
    assert "--load-format" not in flags  # because the folder has weights
    others = [Address(host="10.0.0.8", port=8000), *(Address(path=Path(p)) for p in ("/a", "/b"))]
    starts = [command, *(server_command(folder, address)[0] for address in others)]
    assert len({dict(pairwise(start))["--seed"] for start in starts}) == 4
    monkeypatch.setenv("MY_KEY", "secret")
    with pytest.raises(ValueError, match=r"with inference\.api_key_variable=MY_KEY"):
        required_key(folder)
    run.with_values({"inference.api_key_variable": "MY_KEY"}).save(folder.config)
    assert required_key(folder) == "secret"


RIGHT, WRONG = (b"authorization", b"Bearer right"), (b"authorization", b"Bearer wrong")


async def test_the_guard_passes_only_requests_with_the_key(tmp_path, monkeypatch):
    (tmp_path / "key").write_text("right")
    monkeypatch.setenv(KEY_FILE, str(tmp_path / "key"))

    async def app(scope, receive, send):
        await send({"status": 200})

    async def answer(kind: str, *headers: Any) -> int:
        sent = []

        async def send(message):
            sent.append(message)

        await KeyGuard(app)({"type": kind, "headers": headers}, None, send)
        return sent[0].get("status") or sent[0]["code"]

    for headers in ([], [WRONG], [RIGHT, RIGHT]):
        assert await answer("http", *headers) == 401
    assert await answer("http", (b"x", b"y"), RIGHT) == 200
    assert await answer("websocket") == 1008
    assert await answer("lifespan") == 200


def test_commands_and_environments(tmp_path, monkeypatch):
    """The cases of tests/golden/inference/cases.yaml: options of server, policy and place."""
    for name in ("OMP_NUM_THREADS", "VLLM_PLUGINS", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OFFBYONE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("rl.inference.server.visible_cpus", lambda: range(6))
    monkeypatch.setattr("rl.inference.server.core_of", lambda cpu: cpu // 2)
    folder, found = RunFolder(tmp_path), {}
    folder.set_model(tiny_model(tmp_path))
    cases = yaml.safe_load((stored.FOLDER / "inference" / "cases.yaml").read_text())
    for name, (options, policy, address, place) in cases.items():
        limits = AdapterLimits(**policy.pop("adapter")) if "adapter" in policy else None
        replica = Replica("inference", Address.parse(address), key="secret")
        server, served = VLLMServer(**options), ServedPolicy(**policy, adapter=limits)
        command, env = vllm_command(server, folder, replica, served, place)
        text = json.dumps([command[1:], env]).replace(str(tmp_path.resolve()), "<run>")
        found[name] = json.loads(text)
    stored.golden("inference/commands", found)


CHANGING = re.compile(
    r'(?<=port": )\d+|/[^" ]+/offbyone-adapter-\w+|/proc/\d+/fd/\d+|\b[0-9a-f]{16}\b|[0-9a-f]{8}-v'
)


class Noted(receiving.FakeVLLM):
    """Note each path and body, without what differs from run to run."""

    def answer(self, body):
        noted = json.loads(CHANGING.sub("0", json.dumps(body)))
        noted.get("init_info", {}).get("arguments", {}).pop("form", None)  # depends on peft
        self.server.noted.append([self.command, self.path, noted])
        if self.path == "/tokenize":
            return {"tokens": [1, 2]}
        logprobs = {"content": [{"logprob": -1.0}, {"logprob": -2.0}]}
        choice = {"token_ids": [5, 6], "logprobs": logprobs, "finish_reason": "length"}
        choice |= {"weight_versions": [{"start": 0, "end": 2, "version": "4"}], "stop_reason": "x"}
        made, n = super().answer(body), body.get("sampling_params", {}).get("n", 1)
        return made if isinstance(made, bytes) else made | {"choices": [choice] * n}


async def test_requests_of_a_push_and_of_sampling(tmp_path, monkeypatch):
    """Two pushes and a probe of three transports, then prompts, scores and a template."""
    monkeypatch.setattr(receiving, "FakeVLLM", Noted)
    policy, found = OnePolicy(tmp_path / "model"), {}
    for sync in ("shm", "gloo", "adapter"):
        with receiving.replica(tmp_path / f"{sync}.sock") as vllm:
            vllm.server.noted = noted = found[sync] = []
            push = pusher(sync, vllm)
            for version in (3, 4):
                push.push(policy, version, must_differ=version > 3)
                policy.step()
            found[f"{sync} probe"] = push.probe(Scorer(0.03125), two_rows(), 4)
            noted[-2:] = sorted(noted[-2:], key=str)  # two threads
            router = Router.with_replicas(vllm.receiver.replica)
            async with VLLMClient(router, model="policy", timeout=5.0) as client:
                with client.group() as group:
                    sampling = {"temperature": 0.5, "stop": ["x"], "max_tokens": 2}
                    made = await group.generate([1, 2], sampling, n=2, version=4)
                    scored = await group.score([1, 2, 3], 2, version=3)
                    tools, options = [{"name": "f"}], {"thinking": False}
                    ids = await group.tokenize([{"role": "user"}], tools, options)
            (route,) = router.routes
            counts = [route.num_completions, route.num_tokens, route.num_pending, route.num_groups]
        found[f"{sync} answers"] = [made, scored, ids, counts, len(noted)]
    stored.golden("inference/requests", found)
