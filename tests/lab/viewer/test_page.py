"""The viewer's page in a real browser."""

import json
import re
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import uvicorn

from lab.viewer.command import main
from lab.viewer.index import RunIndex
from lab.viewer.server import application
from rl.runtime.folder import RunFolder
from rl.runtime.lock import locked
from tests.support.viewed_run import HOSTILE, add_step, copy_run

playwright = pytest.importorskip("playwright.sync_api", reason="the viewer's page needs playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or ""
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="needs Chromium: make browser")
expect = playwright.expect
DEADLINE = 20_000  # milliseconds: the machine may have much else to do


@pytest.fixture(scope="module")
def browser() -> Iterator:
    expect.set_options(timeout=DEADLINE)
    with playwright.sync_playwright() as started:
        one = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield one
        one.close()


@contextmanager
def serving(*runs: Path) -> Iterator[str]:
    """Yield the address of a server of these runs."""
    indexes = [RunIndex(RunFolder(run)) for run in runs]
    for index in indexes:
        index.refresh()
    listener = socket.create_server(("127.0.0.1", 0))
    app = application(indexes, [run.name for run in runs], "key")
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/key/"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("viewed")
    return [copy_run(folder / name, record=name != "bare") for name in ("first", "second", "bare")]


@pytest.fixture(scope="module")
def address(runs: list[Path]) -> Iterator[str]:
    with serving(*runs) as address:
        yield address


@contextmanager
def looking(browser, address: str, **options) -> Iterator:
    """Yield the page at an address; it must report no error."""
    page = browser.new_page(viewport={"width": 1440, "height": 900}, **options)
    page.set_default_timeout(DEADLINE)
    errors: list[str] = []
    page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    try:
        page.goto(address)
        page.wait_for_selector("body.ready")
        yield page
        assert errors == []
    finally:
        page.close()


def questions(page):
    return page.locator("#list .question")


def test_a_number_is_rounded_to_its_digits_but_never_to_zero(browser, address):
    shown = {
        (100.4, 2): "100", (120.4, 3): "120", (1234.5, 3): "1,235", (10.0, 3): "10",
        (10.5, 3): "10.5", (0.25, 2): "0.25", (0.104, 2): "0.1", (99.996, 2): "100",
        (0.004, 2): "0.004", (-0.0046, 2): "-0.0046", (0.00021, 2): "2.1e-4",
    }  # fmt: skip
    with looking(browser, address) as page:
        script = """async (values) => {
            const { number } = await import(`${location.pathname}static/dom.js`);
            return values.map(([value, digits]) => number(value, digits));
        }"""
        texts = page.evaluate(script, list(shown))
    assert dict(zip(shown, texts, strict=True)) == shown


def test_a_conversation_shows_turns_calls_thoughts_forks_clips_and_no_markup(browser, address):
    with looking(browser, f"{address}#open=training.0.1.0") as page:
        expect(page.locator(".message.assistant .text").last).to_have_text(HOSTILE)
        assert page.evaluate("window.broken") is None
        assert page.locator("main img, main script").count() == 0
    with looking(browser, f"{address}#open=training.0.1.1") as page:
        roles = ["system", "user", "turn 1", "tool", "turn 2"]
        expect(page.locator(".message .role")).to_have_text(roles)
        expect(page.locator(".thinking")).to_contain_text("I should look up")
        expect(page.locator("details.call summary")).to_contain_text("search(query=")
        expect(page.locator(".message.assistant .earned")).to_have_text(["found +1", "found 0"])
        page.keyboard.press("t")
        heads = ["row 0 · ", "a fork: the prompt did not extend"]
        expect(page.locator(".rawrow h4")).to_contain_text(heads)
        page.locator(".token.given").first.hover()
        expect(page.locator("#card")).to_contain_text("given, not sampled: no gradient")
    with looking(browser, f"{address}#open=training.1.4.1&step=1") as page:
        page.keyboard.press("6")
        expect(page.locator(".legend")).to_contain_text("how training moved the token")
        page.locator(".token.hatched").first.hover()
        expect(page.locator("#card")).to_contain_text("clipped (clip_fraction")


def test_replayed_rollouts_are_not_in_the_curve_and_unscored_ones_have_a_mark(browser, tmp_path):
    run = copy_run(tmp_path / "replayed", steps=1)
    path = run / "rollouts" / "step_000000.jsonl"
    lines = list(map(json.loads, path.read_text().splitlines()))
    lines += [{**lines[-1], "id": "000000.9@0", "reward": 99.0}, {**lines[-1], "reward": None}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with serving(run) as at, looking(browser, at) as page:
        expect(page.locator(".curve .levels span").first).to_have_text(re.compile(r"^0\.\d"))
        expect(page.locator("#list .dot.unscored")).to_have_count(1)


def test_a_run_that_goes_on_grows(browser, tmp_path):
    run = tmp_path / "live"
    (run / "rollouts").mkdir(parents=True)
    with locked(RunFolder(run)), serving(run) as address, looking(browser, address) as page:
        expect(page.locator(".status")).to_have_text("training")
        copy_run(run, evaluated=False)
        for step in range(3, 10):
            add_step(run, step)
        expect(page.locator(".find > .count")).to_have_text("30 questions")
        (run / "rollouts" / "step_000010.jsonl").write_text('{"group": 77, "env": "wi')
        add_step(run, 11)
        expect(page.locator(".find > .count")).to_have_text("33 questions")
        add_step(run, 10, is_trained=False)  # the incomplete line is replaced
        expect(page.locator(".find > .count")).to_have_text("36 questions")


def test_an_export_opens_from_disk_and_a_key_exports_the_filtered(browser, address, runs, tmp_path):
    path = tmp_path / "page.html"
    assert main([str(runs[0]), str(runs[1]), f"export={path}", "env=wiki-search"]) == 0
    with looking(browser, f"file://{path}#open=training.1.4.1", color_scheme="dark") as page:
        expect(page.locator(".status")).to_have_text("env=wiki-search")
        expect(questions(page)).to_have_count(9)
    with looking(browser, f"{address}#step=1") as page, page.expect_download():
        page.keyboard.press("e")
        expect(page.locator(".toast")).to_have_text("12 rollouts are in first.html.")
