"""The page in a real browser: both charts are drawn, light and dark, and nothing is fetched."""

import re
import shutil
from pathlib import Path

import pytest

from lab.report.command import main
from tests.support.finished_runs import made_arm

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or ""
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="needs Chromium: make browser")


def background(page) -> int:
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return sum(map(int, re.findall(r"\d+", colour)[:3]))


def test_the_charts_are_drawn_light_and_dark_and_fit_a_narrow_window(tmp_path: Path):
    for loss in ("grpo", "cispo", "dapo", "gspo", "sapo"):  # more than fit beside each other
        made_arm(tmp_path, f"loss={loss}", seeds=3)
    assert main([str(tmp_path)]) == 0
    problems, fetched = [], []
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(color_scheme="light")
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text))
        page.on("request", lambda request: fetched.append(request.url))
        page.goto((tmp_path / "report.html").as_uri())
        for name in ("forest", "curves"):
            page.wait_for_selector(f"#{name} svg .mark-group path", state="attached")
        # The same rows by another measure of how far a run is.
        page.check("input[value=tokens]")
        page.wait_for_function("document.querySelector('#curves').textContent.includes('2k')")
        light = background(page)
        page.emulate_media(color_scheme="dark")
        assert background(page) < 120 < 600 < light
        page.set_viewport_size({"width": 420, "height": 900})
        page.wait_for_function("document.documentElement.scrollWidth <= 420")
        browser.close()
    assert (problems, len(fetched)) == ([], 1)
