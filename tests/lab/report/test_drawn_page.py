"""The page in a real browser: every chart is drawn, light and dark, and nothing is fetched."""

import re
import shutil
from pathlib import Path

import pytest

from lab.report.command import main
from tests.support.finished_runs import made_arm, made_run

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or ""
WIDTHS = "[...document.querySelectorAll('.wide')].map(e => [e.clientWidth, e.scrollWidth])"
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="needs Chromium: make browser")


def background(page) -> int:
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return sum(map(int, re.findall(r"\d+", colour)[:3]))


def test_all_charts_are_drawn_light_and_dark_and_a_point_names_its_rollouts(tmp_path: Path):
    for loss in ("grpo", "cispo", "dapo", "gspo", "sapo"):  # enough for a panel each
        made_arm(tmp_path / "runs", f"loss={loss}", seeds=3)
    run = tmp_path / "runs" / "loss-cispo-s0"
    (run / "page.html").write_text("exported")
    assert main([str(tmp_path / "runs")]) == 0
    problems, fetched = [], []
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(color_scheme="light")
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text))
        page.on("request", lambda request: fetched.append(request.url))
        page.goto((tmp_path / "runs" / "report.html").as_uri())
        for name in ("forest", "curves", "health", "times", "questions"):
            page.wait_for_selector(f"#{name} svg .mark-group path", state="attached")
        # The same rows by the other measures of how far a run is.
        page.check("input[value=tokens]")
        page.wait_for_function("document.querySelector('#curves').textContent.includes('2k')")
        light = background(page)
        page.emulate_media(color_scheme="dark")
        assert background(page) < 120 < 600 < light
        wide = page.evaluate(WIDTHS)
        page.set_viewport_size({"width": 420, "height": 900})
        page.wait_for_function(f"({WIDTHS})[0][1] < {wide[0][1]}")
        page.wait_for_function(f"({WIDTHS}).every(([room, needed]) => needed <= room)")
        # A table has no line of heads there: each number stands behind its own.
        number = "getComputedStyle(document.querySelector('td + td'), '::before').content"
        assert page.evaluate(number) == '"seeds"'
        assert (problems, len(fetched)) == ([], 1)
        page.set_viewport_size({"width": 1280, "height": 900})
        page.wait_for_function(f"({WIDTHS})[0][1] == {wide[0][1]}")
        # A dot leads to the page that view.py exported into the run's folder, where there is one.
        dot = "#forest path[aria-roledescription=circle][aria-label*='loss-cispo-s{}']"
        page.locator(dot.format(1)).first.dispatch_event("click")
        page.locator(dot.format(0)).first.dispatch_event("click")
        page.wait_for_url("**/runs/loss-cispo-s0/page.html")
        browser.close()


def test_without_intervals_the_page_has_none_and_no_chart_complains(tmp_path: Path):
    for seed in range(2):
        for loss, reward in (("grpo", 0.5), ("cispo", 0.512)):
            name = f"{loss}-s{seed}"
            made_run(tmp_path / name, f"loss={loss}", seed=seed, steps=6, reward=reward + seed / 99)
    assert main([str(tmp_path)]) == 0
    problems = []
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.on("console", lambda message: problems.append(message.text))
        page.goto((tmp_path / "report.html").as_uri())
        page.wait_for_selector("#forest svg .mark-group path", state="attached")
        page.wait_for_selector("#curves svg .mark-group path", state="attached")
        text = page.text_content("body")
        browser.close()
    assert problems == []
    assert not re.search("95 %|10,000 draws|grey band|P\\(better\\)", re.sub("<.*?>", "", text))
