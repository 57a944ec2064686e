"""External servers: their addresses, and why one cannot be used."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from threading import Thread

import pytest
from aiohttp import web

from rl.cluster.host import Demand
from rl.cluster.local import LocalCluster
from rl.config.schema import Run
from rl.inference.external import ExternalServers, address_of, why_unusable
from rl.inference.key_guard import GUARD, KEY_FILE, KeyGuard
from rl.inference.replica import started_replicas
from rl.inference.serve_external import process
from rl.placement.placement import placement
from rl.runtime.child import Reaper
from rl.runtime.devices import Host
from rl.runtime.endpoint import Endpoint
from rl.runtime.folder import RunFolder
from rl.runtime.network import Address
from rl.runtime.status import read_statuses
from rl.supervisor import replicas
from rl.supervisor.children import Children
from tests.support.composing import composed
from tests.support.replicas import replica_at
from tests.support.scripted import tiny_model
from tests.support.scripted_vllm import Engine, asking_for


def external(*urls: str, variable: str | None = None) -> ExternalServers:
    return ExternalServers(urls=list(urls), api_key_variable=variable, startup_timeout=5.0)


def test_each_url_is_a_replica_with_the_key_of_the_variable(monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    first, second = external("http://a:1", "unix:/s", variable="MY_KEY").servers()
    assert (first.name, first.address, first.key) == (
        "inference0",
        Address(host="a", port=1),
        "secret",
    )
    assert (second.name, second.address) == ("inference1", Address(path=Path("/s")))
    assert external("http://a:1").servers()[0].name == "inference"
    assert "secret" not in repr(first)


def test_external_servers_do_not_get_the_key_of_the_run(tmp_path):
    folder = RunFolder(tmp_path)
    folder.private.make()
    folder.private.make_key()
    Endpoint(Address(host="a", port=1), 0, 0).write(folder, "inference")
    urls = "inference.urls=[http://a:1]"
    theirs = Run.of(composed("run_name=r", "inference=external", urls)).inference
    assert [replica.headers for replica in started_replicas(folder, theirs)] == [{}]
    ours = Run.of(composed("run_name=r")).inference
    assert started_replicas(folder, ours)[0].key == folder.private.read_key() is not None


@pytest.mark.parametrize("url", ["a:1", "https://a:1", "http://a", "http://a:1/v1", "unix:s", ""])
def test_a_wrong_url_of_a_server_is_refused(url):
    with pytest.raises(ValueError, match=r"inference\.urls: .*write http://host:port"):
        address_of(url)


@pytest.mark.parametrize("urls", [[], ["http://a:1", "http://a:1/"]])
def test_an_empty_or_repeated_list_of_servers_is_refused(urls):
    with pytest.raises(ValueError, match="one server or more, each of them once"):
        external(*urls)


def test_a_missing_key_is_refused_before_anything_starts(monkeypatch):
    monkeypatch.delenv("MY_KEY", raising=False)
    with pytest.raises(ValueError, match="api_key_variable=MY_KEY is not set: export it"):
        external("http://a:1", variable="MY_KEY")


def test_the_other_processes_know_the_servers_without_the_variable(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    overrides = ["inference=external", "inference.urls=[http://a:1,http://b:1]"]
    run = Run.of(composed(f"output_dir={tmp_path}", *overrides))
    run = run.changed({"inference.api_key_variable": "MY_KEY"})
    monkeypatch.setenv("MY_KEY", "secret")
    folder.private.make()
    plan = placement(run, [Host()])
    with Reaper() as reaper, LocalCluster().hosts(folder, reaper, Demand(0, 1, 1)) as hosts:
        Children(run, folder, reaper, plan, hosts)
    monkeypatch.delenv("MY_KEY")  # as on the hosts of a cluster
    assert folder.private.servers_key.stat().st_mode & 0o77 == 0
    assert run.inference.names == ["inference0", "inference1"]
    Endpoint(Address(host="b", port=1), 2).write(folder, "inference1")
    (replica,) = started_replicas(folder, run.inference)
    assert (replica.name, replica.incarnation, replica.key) == ("inference1", 2, "secret")


@contextmanager
def served(socket: Path, app: web.Application) -> Iterator[None]:
    """The application at a socket, in a thread."""
    loop, runner = asyncio.new_event_loop(), web.AppRunner(app)
    loop.run_until_complete(runner.setup())
    loop.run_until_complete(web.UnixSite(runner, str(socket)).start())
    thread = Thread(target=loop.run_forever)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.run_until_complete(runner.cleanup())
        loop.close()


def vllm(model: Path, **routes: str) -> web.Application:
    """What a server must have that a run can use; `routes` replace answers by texts."""
    engine, app = Engine(model, 256), web.Application()

    def text(content: str):
        async def answer(request: web.Request) -> web.Response:
            return web.Response(text=content, content_type="application/json")

        return answer

    app.router.add_get("/health", text(""))
    said = {name: text(content) for name, content in routes.items()}
    app.router.add_get("/v1/models", said.get("models", engine.models))
    app.router.add_post("/tokenize", said.get("tokenize", engine.tokenize))
    for path in ("/inference/v1/generate", "/init_weight_transfer_engine"):
        if path not in routes.get("without", ""):
            app.router.add_post(path, engine.control)
    return app


@pytest.mark.parametrize(
    ("routes", "sentence"),
    [
        ({}, None),
        ({"models": json.dumps({"data": [{"id": "llama"}]})}, "serves llama and nothing under"),
        ({"models": json.dumps({"data": [{"id": "policy", "max_model_len": 9}]})},
         "takes 9 tokens, fewer than max_seq_len=64"),
        ({"models": "[]"}, "is no vLLM that can be used"),
        ({"without": "/init_weight_transfer_engine"}, "has no route /init_weight_transfer_engine"),
        ({"tokenize": json.dumps({"tokens": [1, 2]})}, "has another tokenizer than"),
    ],
)  # fmt: skip
def test_the_answers_of_a_server_show_whether_it_can_be_used(routes, sentence, tmp_path):
    model = tiny_model(tmp_path)
    with served(tmp_path / "s", vllm(model, **routes)):
        problem = why_unusable(replica_at(tmp_path / "s"), model, 64)
    assert (problem is None) if sentence is None else (sentence in str(problem))


def test_a_refused_key_is_reported_with_its_option(tmp_path):
    model = tiny_model(tmp_path)
    app = vllm(model)
    app.middlewares.append(asking_for("theirs"))
    with served(tmp_path / "s", app):
        problem = why_unusable(replica_at(tmp_path / "s"), model, 64)
    assert problem == (
        "refuses the key: set inference.api_key_variable to the variable that holds its key"
    )


def test_a_server_started_by_hand_is_the_same_vllm_behind_the_guard(tmp_path):
    folder = RunFolder(tmp_path / "r")
    folder.path.mkdir()
    Run.of(composed(f"output_dir={tmp_path}", "run_name=r")).save(folder.config)
    folder.set_model(tiny_model(tmp_path))
    command, env = process(folder, Address(host="10.0.0.7", port=8000))
    flags = dict(pairwise(command))
    assert (flags["--host"], flags["--port"]) == ("10.0.0.7", "8000")
    assert flags["--middleware"] == GUARD
    assert flags["--served-model-name"] == "policy"
    assert env["VLLM_SERVER_DEV_MODE"] == "1"


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
        sent.append({"status": 200})

    async def send(message):
        sent.append(message)

    scope = {"type": kind} | ({} if headers is None else {"headers": headers})
    await KeyGuard(app)(scope, None, send)
    assert (sent[0].get("status") or sent[0]["code"]) == status
    assert len(sent) == (2 if status == 401 else 1)


def test_an_external_server_may_come_back_as_another_incarnation(tmp_path, monkeypatch):
    monkeypatch.setattr(replicas, "_HEALTH_EVERY_S", 0.0)
    folder, model = RunFolder(tmp_path / "r"), tiny_model(tmp_path)
    folder.path.mkdir()
    sockets = [tmp_path / "a", tmp_path / "b"]
    watched = replicas.Replicas(
        external(*(f"unix:{socket}" for socket in sockets)).servers(),
        folder,
        lambda replica: None,
        startup_timeout=60.0,
        wait_timeout=60.0,
        num_steps=lambda: 0,
        why_unusable=lambda replica: why_unusable(replica, model, 64),
    )
    watched.start()

    def seen() -> list[str]:
        assert watched.look(may_restart=True) is None
        statuses = read_statuses(folder)
        return [statuses[name].phase.partition(" ")[0] for name in ("inference0", "inference1")]

    with served(sockets[1], vllm(model)):
        for incarnation in range(4):  # however often: it is not ours to give up
            with served(sockets[0], vllm(model)):
                assert seen() == ["serving", "serving"]
            assert seen() == ["waiting", "serving"]
            assert Endpoint.read(folder, "inference0").incarnation == incarnation + 1
    said = (folder.warnings / "inference0.log").read_text().splitlines()
    assert set(said) == {
        "takes no connections any more; it may come back, and the other one goes on"
    }
