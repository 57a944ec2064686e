"""External servers: their addresses, and why one cannot be used."""

import asyncio
import json
import os
import runpy
import socket
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rl.cluster.host import Demand
from rl.cluster.local import LocalCluster
from rl.config.schema import Run
from rl.inference.external import ExternalServers, why_unusable
from rl.inference.key_guard import GUARD, KEY_FILE, KeyGuard
from rl.inference.replica import started_replicas
from rl.inference.routes import is_healthy
from rl.inference.serve_external import required_key, server_command
from rl.placement.placement import placement
from rl.runtime.child import Reaper
from rl.runtime.devices import Host
from rl.runtime.endpoint import Endpoint
from rl.runtime.folder import RunFolder
from rl.runtime.network import Address
from rl.supervisor.children import Children
from tests.support.composing import composed
from tests.support.replicas import replica_at
from tests.support.scripted import tiny_model
from tests.support.scripted_vllm import Engine, asking_for
from tests.support.served_engine import serving

OURS = "rl.inference.server.VLLMServer"
CONTROLLED = ("/init_weight_transfer_engine", "/inference/v1/generate")


def external(*urls: str, variable: str | None = None) -> ExternalServers:
    return ExternalServers(urls=list(urls), api_key_variable=variable, startup_timeout=5.0)


def test_each_url_is_a_replica_with_the_key_of_the_variable(monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    first, second = external("http://a:1", "unix:/s", variable="MY_KEY").servers()
    assert (first.name, first.address) == ("inference0", Address(host="a", port=1))
    assert (second.name, second.address) == ("inference1", Address(path=Path("/s")))
    assert external("http://a:1").servers()[0].name == "inference"
    assert first.key == "secret"
    assert "secret" not in repr(first)


@pytest.mark.parametrize(
    ("urls", "said"),
    [
        *(([url], "write http://host:port") for url in ("a:1", "https://a:1", "http://a")),
        *(([url], "write http://host:port") for url in ("unix:s", "", "http://a:1/v1")),
        ([], "write at least one URL, and each once"),
        (["http://a:1", "http://a:1/"], "write at least one URL, and each once"),
    ],
)
def test_wrong_urls_and_a_missing_key_are_refused_before_anything_starts(urls, said, monkeypatch):
    with pytest.raises(ValueError, match=said):
        external(*urls)
    monkeypatch.delenv("MY_KEY", raising=False)
    with pytest.raises(ValueError, match="=MY_KEY names a variable that is not set: export it"):
        external("http://a:1", variable="MY_KEY")


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
        ({}, None, None),
        (models(id="policy", max_model_len=64), None, None),
        (models(id="llama"), None, "serves llama, but no model"),
        (models(id="policy", max_model_len=9), None, "9 tokens, fewer than max_seq_len=64"),
        ({"/v1/models": "[]"}, None, "cannot be used as a vLLM"),
        *(({route: None}, None, f"has no route {route}") for route in CONTROLLED),
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


@pytest.mark.parametrize(("status", "stays"), [(404, True), (302, True), (503, False)])
async def test_another_program_at_an_external_address_is_reported_at_once(status, stays, tmp_path):
    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=status)

    async with serving({"/{path:.*}": answer}, tmp_path / "s"):
        replica = replica_at(tmp_path / "s")
        assert not await asyncio.to_thread(is_healthy, replica)
        assert await asyncio.to_thread(is_healthy, replica, or_unusable=True) == stays
        problem = str(await asyncio.to_thread(why_unusable, replica, tmp_path, 64))
    remedy = "correct inference.urls if another program answers there, or start it with"
    assert f"{status} " in problem.split(remedy)[0]
    assert "\n" not in problem


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
    command, env = server_command(folder, Address(host="10.0.0.7", port=8000))
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
    assert env["VLLM_SERVER_DEV_MODE"] == "1"
    monkeypatch.setenv("MY_KEY", "secret")
    with pytest.raises(ValueError, match=r"with inference\.api_key_variable=MY_KEY"):
        required_key(folder)
    run.with_values({"inference.api_key_variable": "MY_KEY"}).save(folder.config)
    assert required_key(folder) == "secret"
    executed = []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def execute(*call: Any) -> None:
        caller = sys._getframe(1).f_globals
        assert os.get_inheritable(caller["end_to_keep"])  # vLLM keeps the pipe open
        executed.append((*call, Path(call[2]["TMPDIR"]).stat().st_mode & 0o777))
        os.close(caller["end_to_keep"])
        caller["shell"].wait()

    monkeypatch.setattr(os, "execve", execute)
    monkeypatch.setattr(sys, "argv", ["", str(folder.path), "http://10.0.0.7:8000", "--own", "4"])
    with monkeypatch.context() as here:  # this machine does not have the address
        here.setattr(socket, "create_server", lambda *_, **__: socket.socket())
        runpy.run_module("rl.inference.serve_external", run_name="__main__")
    ((program, arguments, env, mode),) = executed
    assert (program, arguments) == (command[0], [*command, "--own", "4"])
    assert Path(env[KEY_FILE]).read_text() == "secret"
    assert (mode, env["MY_KEY"]) == (0o700, "secret")
    assert not Path(env["TMPDIR"]).exists()
    with socket.create_server(("127.0.0.1", 0)) as used:
        url = f"http://127.0.0.1:{used.getsockname()[1]}"
        monkeypatch.setattr(sys, "argv", ["", str(folder.path), url])
        for key, said in (("", "vLLM needs a key on"), ("secret", "already in use")):
            monkeypatch.setenv("MY_KEY", key)
            with pytest.raises(SystemExit, match=said):
                runpy.run_module("rl.inference.serve_external", run_name="__main__")


RIGHT, WRONG = (b"authorization", b"Bearer right"), (b"authorization", b"Bearer wrong")


@pytest.mark.parametrize(
    ("kind", "headers", "status"),
    [
        ("http", [], 401),
        ("http", [WRONG], 401),
        ("http", [RIGHT, RIGHT], 401),
        ("http", [(b"authorization", b"right")], 401),
        ("http", [(b"x", b"y"), RIGHT], 200),
        ("websocket", [], 1008),
        ("websocket", [RIGHT], 200),
        ("lifespan", None, 200),
    ],
)
async def test_the_guard_passes_only_requests_with_the_key(
    kind, headers, status, tmp_path, monkeypatch
):
    (tmp_path / "key").write_text("right")
    monkeypatch.setenv(KEY_FILE, str(tmp_path / "key"))
    sent = []

    async def app(scope, receive, send):
        await send({"status": 200})

    async def send(message):
        sent.append(message)

    scope = {"type": kind} | ({} if headers is None else {"headers": headers})
    await KeyGuard(app)(scope, None, send)
    assert (sent[0].get("status") or sent[0]["code"]) == status
    assert len(sent) == (2 if status == 401 else 1)
