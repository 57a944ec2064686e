"""The page in a real browser: every chart is drawn, light and dark, and nothing is fetched."""

import re
import shutil
from pathlib import Path

import pytest

from rl.report.command import main
from tests.support.finished_runs import made_arm

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or ""
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
        assert (problems, len(fetched)) == ([], 1)
        # A dot leads to the page that view.py exported into the run's folder, where there is one.
        dot = "#forest path[aria-roledescription=circle][aria-label*='loss-cispo-s{}']"
        page.locator(dot.format(1)).first.dispatch_event("click")
        page.locator(dot.format(0)).first.dispatch_event("click")
        page.wait_for_url("**/runs/loss-cispo-s0/page.html")
        browser.close()
