"""The viewer's page in a real browser."""

import gzip
import json
import re
import shutil
import socket
import threading
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import uvicorn

from lab.viewer.command import main
from lab.viewer.index import RunIndex
from lab.viewer.server import application
from rl.runtime.folder import RunFolder
from rl.runtime.lock import locked
from tests.support.viewed_run import HOSTILE, add_step, add_update, copy_run

playwright = pytest.importorskip("playwright.sync_api", reason="the viewer's page needs playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or ""
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="needs Chromium: make browser")
expect = playwright.expect
CONTRAST = (Path(__file__).parents[2] / "support" / "contrast.js").read_text()
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


def opened(page) -> str:
    return re.search("open=([^&]+)", page.url)[1]


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


def test_filters_narrow_the_list_and_can_be_cleared(browser, address):
    with looking(browser, f"{address}#source=evaluation&step=2") as page:
        expect(questions(page)).to_have_count(4)
        expect(page.locator(".curve .ends > span").first).to_have_text("version 0")
        page.click(".clear-all")
        expect(questions(page)).to_have_count(8)
    with looking(browser, address) as page:
        expect(page.locator(".curve .levels span")).to_have_text(["0.67", "0"])
        expect(page.locator(".curve .key")).to_have_text(["training", "evaluations"])
        expect(page.locator(".choice", has_text="trained on")).to_contain_text("no4")
        count = page.locator(".find > .count")
        expect(count).to_have_text("9 questions")
        page.click("[data-choice='used=false']")
        expect(count).to_contain_text("1 question")
        expect(questions(page).locator(".dot.unused")).to_have_count(4)
        page.click(".clear-all")
        # Drag over a part of the histogram.
        box = page.locator("[data-name=reward] svg").bounding_box()
        page.mouse.move(box["x"] + box["width"] * 0.8, box["y"] + 10)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] - 1, box["y"] + 10, steps=3)
        page.mouse.up()
        assert "reward=1" in page.url
        assert questions(page).locator(".dot.faint").count() > 0
        page.dblclick("[data-name=reward] svg")
        expect(questions(page)).to_have_count(9)
        page.keyboard.press("]")
        expect(page.locator(".curve b")).to_contain_text("step 0 · ")
        page.keyboard.press("]")
        expect(questions(page)).to_have_count(3)
        box = page.locator(".curve svg").bounding_box()
        page.mouse.click(box["x"] + box["width"] - 4, box["y"] + 20)
        expect(page.locator(".curve b")).to_contain_text("step 2 · ")
        page.click(".curve .clear")
        page.fill("#search", "CAPITAL of nowhere")
        expect(page.locator(".find .empty")).to_have_text("No rollout passes this filter.")


def test_keys_open_rollouts_and_questions_and_an_address_opens_one_again(browser, address):
    with looking(browser, address) as page:
        # The first recorded question whose rewards differ
        expect(page.locator("#list .question.open .place")).to_contain_text("step 1")
    with looking(browser, f"{address}#open=training.0.0.0") as page:
        expect(page.locator(".question.open")).to_have_count(1)
        for key, expected in (("j", ".0.1"), ("j", ".0.2"), ("k", ".0.1"), ("J", ".1.0")):
            page.keyboard.press(key)
            assert opened(page) == f"training.0{expected}"
        page.keyboard.press("K")
        page.keyboard.press("?")
        expect(page.locator("#help")).to_contain_text("next, previous question")
        page.keyboard.press("Escape")
        page.keyboard.press("/")
        page.keyboard.type("jjj")
        assert page.input_value("#search") == "jjj"
        page.keyboard.press("Escape")
        page.go_back()
        page.wait_for_function("location.hash.includes('training.0.1.0')")
        address = page.url
    with looking(browser, address) as page:
        expect(page.locator(".score strong")).to_be_visible()
        assert opened(page) == "training.0.1.0"


def coloured(page) -> int:
    script = "all => all.filter(one => one.style.background || one.matches('.hatched')).length"
    return page.locator(".body .token").evaluate_all(script)


def test_a_conversation_shows_its_turns_calls_thoughts_forks_and_special_tokens(browser, address):
    with looking(browser, f"{address}#open=training.0.1.1") as page:
        roles = ["system", "user", "turn 1", "tool", "turn 2"]
        expect(page.locator(".message .role")).to_have_text(roles)
        expect(page.locator(".thinking")).to_contain_text("I should look up")
        expect(page.locator("details.call summary")).to_contain_text("search(query=")
        page.keyboard.press("f")
        expect(page.locator("details[open]")).to_have_count(0)
        page.keyboard.press("f")
        expect(page.locator(".body details[open]")).to_have_count(3)
        expect(page.locator(".message.assistant .earned")).to_have_text(["found +1", "found 0"])
        page.keyboard.press("t")
        heads = ["row 0 · ", "a fork: the prompt did not extend"]
        expect(page.locator(".rawrow h4")).to_contain_text(heads)
        expect(page.locator(".token.special").first).to_have_text("<|im_start|>")
        page.locator(".token.given").first.hover()
        expect(page.locator("#card")).to_contain_text("given, not sampled: no gradient")


def test_a_key_shows_the_numbers_of_the_next_update_of_the_batch(browser, tmp_path):
    add_update(copy_run(tmp_path / "twice", steps=1))
    with (
        serving(tmp_path / "twice") as address,
        looking(browser, f"{address}#open=training.0.1.0&colour=2") as page,
    ):
        expect(page.locator(".update")).to_have_text("uupdate 1 of 2")
        token = page.locator(".token[style]").first
        before, tokens = token.get_attribute("style"), page.locator(".body .token").count()
        page.keyboard.press("u")
        expect(page.locator(".update")).to_have_text("uupdate 2 of 2")
        assert page.locator(".body .token").count() == tokens
        assert page.locator(".token[style]").first.get_attribute("style") != before
        page.keyboard.press("u")
        expect(page.locator(".update")).to_have_text("uupdate 1 of 2")


def test_every_colour_colours_tokens_and_names_its_meaning(browser, address):
    with looking(browser, f"{address}#open=training.1.4.1&step=1") as page:
        expect(page.locator(".message")).to_have_count(5)
        assert coloured(page) == 0
        for key, meaning in {
            "1": "better or worse than its group",
            "2": "how much more probable than before (pi / anchor)",
            "3": "how uncertain the policy was",
            "4": "how old the weights were",
            "5": "difference between the trainer's and the server's logprob",
            "6": "how training moved the token's probability",
        }.items():
            page.keyboard.press(key)
            expect(page.locator(".legend")).to_contain_text(meaning)
            assert coloured(page) > 30, key
        page.locator(".token.hatched").first.hover()
        card = page.locator("#card")
        expect(card).to_contain_text("No gradient: ratio")
        expect(card).to_contain_text("clipped (clip_fraction")
        page.locator(".token:not(.hatched)").first.hover()
        expect(card).to_contain_text(re.compile("Training made it (more|less) probable"))
        page.keyboard.press("0")
        expect(page.locator(".token")).to_have_count(0)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_enough_contrast(browser, address, scheme):
    with looking(browser, f"{address}#open=training.1.4.1", color_scheme=scheme) as page:
        expect(page.locator(".message")).to_have_count(5)
        for key in "0123456tvr?":
            page.keyboard.press(key)
            page.wait_for_load_state("networkidle")
            assert page.evaluate(CONTRAST) == {}, key
        # The strongest colours, which these tokens do not reach
        strongest = """async () => {
            const { COLOURS } = await import(`${location.pathname}static/colours.js`);
            const value = { advantage: 1, entropy: 9, version: 0, mismatch: 9, grad: 1 };
            const scales = { advantage: 1, grad: 1, step: 9 };
            const sample = document.createElement("div");
            for (const colour of COLOURS) for (const sign of [1, -1]) {
                if (!colour.paint) continue;
                const signed = { ...value, advantage: sign, grad: sign, ratio: 9 ** sign };
                const token = document.createElement("span");
                token.textContent = token.className = `token thinking ${colour.name}`;
                token.style.background = colour.paint(signed, scales);
                sample.append(token);
            }
            document.getElementById("help").close();
            document.querySelector("#middle .body").append(sample);
            return sample.children.length;
        }"""
        assert page.evaluate(strongest) == 12
        assert page.evaluate(CONTRAST) == {}


def test_replayed_rollouts_are_not_in_the_curve_and_unscored_ones_have_a_mark(browser, tmp_path):
    run = copy_run(tmp_path / "replayed", steps=1)
    path = run / "rollouts" / "step_000000.jsonl"
    lines = list(map(json.loads, path.read_text().splitlines()))
    lines += [{**lines[-1], "id": "000000.9@0", "reward": 99.0}, {**lines[-1], "reward": None}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with serving(run) as at, looking(browser, at) as page:
        expect(page.locator(".curve .levels span").first).to_have_text(re.compile(r"^0\.\d"))
        expect(page.locator("#list .dot.unscored")).to_have_count(1)


def test_a_phone_shows_the_head_of_the_conversation_without_scrolling(browser, address):
    with looking(browser, address) as page:
        page.set_viewport_size({"width": 500, "height": 900})
        head = page.locator("#middle .score").bounding_box()
        assert head["y"] + head["height"] < 900
        assert page.evaluate("document.documentElement.scrollWidth") <= 500
        page.locator("#list").evaluate("list => list.scrollTop = 300")
        expect(questions(page).last).to_be_visible()


def test_rollouts_without_tokens_are_labelled_and_keep_the_advantage(browser, address, tmp_path):
    sampled = copy_run(tmp_path / "sampled", steps=2)
    for path in (sampled / "tokens").iterdir():  # as record=sample: one group of each step
        table = pq.read_table(path)
        recorded = [identity[:6] in ("000001", "000004") for identity in table["id"].to_pylist()]
        pq.write_table(table.filter(recorded), path)
    with serving(sampled) as at, looking(browser, at) as page:
        places = [f"{mark}step {step}" for step in (0, 1) for mark in ("", "tokens · ", "")]
        expect(questions(page).locator(".place")).to_have_text(places)
        expect(page.locator("#list .question.open .place")).to_have_text("tokens · step 1")
        page.keyboard.press("3")
        page.keyboard.press("K")
        marked = "questions marked “tokens” on the left have a record"
        expect(page.locator(".legend")).to_contain_text(marked)
    with looking(browser, f"{address}#run=bare&open=training.1.3.0") as page:
        ends = ["step 0", "trainingevaluations", "2"]
        expect(page.locator(".curve .ends > span")).to_have_text(ends)
        legend = page.locator(".legend")
        page.keyboard.press("2")
        expect(legend).to_have_text(re.compile("^ratio needs tokens: this step has no token reco"))
        page.keyboard.press("1")
        expect(legend).to_contain_text("better or worse than its group")
        expect(page.locator("[data-name=push]")).to_contain_text("no data")


def test_a_rollout_is_compared_with_its_group_other_versions_and_other_runs(browser, address):
    with looking(browser, f"{address}#open=training.0.1.1") as page:
        right = page.locator("#right")
        assert right.locator(".answer .dot").count() == 4
        expect(right.locator(".answer").first).to_have_class("answer open")
        other = right.locator(".answer:not(.open)").first
        expect(other.locator(".shared")).to_be_attached()
        other.locator(".dot").first.click()
        page.wait_for_function("!location.hash.includes('training.0.1.1')")
        page.keyboard.press("v")
        page.click("[data-source=evaluation]")
        names = page.locator("#right h3 > span:first-child")
        expect(names).to_have_text(["version 0", "version 2"])
        page.keyboard.press("r")
        expect(names).to_have_text(["first · version 0", "second · version 0", "bare · version 0"])
        page.locator("#right section:nth-of-type(2) .answer").first.click()
        page.wait_for_function("location.hash.includes('run=second')")
        expect(names.first).to_have_text("second · version 0")


def test_markup_is_shown_as_text_and_a_rollout_that_cannot_be_read_is_reported(browser, address):
    with looking(browser, f"{address}#open=training.0.1.0") as page:
        expect(page.locator(".message.assistant .text").last).to_have_text(HOSTILE)
        page.keyboard.press("t")
        assert page.evaluate("window.broken") is None
        assert page.locator("main img, main script").count() == 0
    page = browser.new_page()
    page.set_default_timeout(DEADLINE)
    try:
        page.route("**/tokens?*", lambda route: route.fulfill(status=400, body="it is gone"))
        page.goto(address)
        expect(page.locator(".toast")).to_contain_text("it is gone")
        page.unroute("**/tokens?*")
        page.wait_for_selector("body.ready")
        page.keyboard.press("j")
        expect(page.locator("#middle .body")).to_contain_text("turn 1")
    finally:
        page.close()


def test_a_run_that_goes_on_grows_without_a_jump(browser, tmp_path):
    run = tmp_path / "live"
    (run / "rollouts").mkdir(parents=True)
    with locked(RunFolder(run)), serving(run) as address, looking(browser, address) as page:
        expect(page.locator(".status")).to_have_text("training")
        expect(page.locator(".find .empty")).to_contain_text("No rollouts yet")
        copy_run(run, evaluated=False)
        for step in range(3, 10):
            add_step(run, step)
        expect(page.locator(".find > .count")).to_have_text("30 questions")
        page.click("[data-source=evaluation]")
        expect(page.locator(".find .empty")).to_contain_text("This run was not evaluated")
        page.click("[data-source=training]")
        page.locator("#list").evaluate("list => list.scrollTop = 700")
        expect(questions(page).first.locator(".place")).not_to_contain_text("step 0")
        before = page.locator("#list").evaluate("list => list.scrollTop")
        seen = questions(page).nth(10).inner_text()
        (run / "rollouts" / "step_000010.jsonl").write_text('{"group": 77, "env": "wi')
        add_step(run, 11)
        expect(page.locator(".find > .count")).to_have_text("33 questions")
        assert page.locator("#list").evaluate("list => list.scrollTop") == before
        assert questions(page).nth(10).inner_text() == seen
        add_step(run, 10, is_trained=False)  # the incomplete line is replaced
        expect(page.locator(".find > .count")).to_have_text("36 questions")
        page.evaluate("location.hash = 'source=training&step=10&push=0..9'")
        expect(questions(page)).to_have_count(0)
        add_step(run, 10)
        expect(questions(page)).not_to_have_count(0)


def test_a_question_that_is_asked_again_later_can_be_opened(browser, runs, tmp_path):
    # A search for a prompt plays its examples again under every candidate.
    evaluated = (runs[0] / "evaluations" / "version_000000.jsonl").read_text()
    (tmp_path / "search").mkdir()
    (tmp_path / "search" / "rollouts.jsonl").write_text(evaluated * 2)
    with serving(tmp_path / "search") as address, looking(browser, address) as page:
        expect(questions(page)).to_have_count(8)
        questions(page).nth(7).locator("[data-row]").nth(3).click()
        expect(page.locator("#list .question.open .dot.open")).to_have_attribute("data-row", "31")
        expect(page.locator("#middle")).not_to_contain_text("no longer exists")


def test_an_export_opens_from_disk_and_a_key_exports_the_filtered(browser, address, runs, tmp_path):
    path = tmp_path / "page.html"
    assert main([str(runs[0]), str(runs[1]), f"export={path}", "env=wiki-search"]) == 0
    with looking(browser, f"file://{path}#open=training.1.4.1", color_scheme="dark") as page:
        expect(page.locator(".status")).to_have_text("env=wiki-search")
        expect(questions(page)).to_have_count(9)
        page.keyboard.press("6")
        assert coloured(page) > 30
        page.fill("#search", "no such words")
        expect(page.locator(".find .empty")).to_be_visible()
        page.fill("#search", "should LOOK up")
        expect(page.locator(".find .empty")).to_be_hidden()
        page.locator("#search").blur()
        page.click("[data-source=evaluation]")
        page.keyboard.press("r")
        names = ["first · version 0", "second · version 0"]
        expect(page.locator("#right h3 > span:first-child")).to_have_text(names)
    with looking(browser, f"{address}#step=1") as page:
        with page.expect_download() as download:
            page.keyboard.press("e")
        download.value.save_as(path)
        expect(page.locator(".toast")).to_have_text("12 rollouts are in first.html.")
    packed = re.search(r'id="embedded">([^<]+)<', path.read_text())[1]
    content = json.loads(gzip.decompress(b64decode(packed)))
    assert set(content["runs"][0]["table"]["columns"]["step"]) == {1}
