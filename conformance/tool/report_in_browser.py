"""The report's page in a browser: `python -m tox -e browser`.

The name of this file is none that pytest collects: these tests need Playwright, and a Chromium or Chrome on the PATH.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from kvtwin.conformance.harness.report import write_report
from kvtwin.conformance.lab.report_sample import HOSTILE, LONG, failed, other, passed, sample

pytest_plugins = ["pytester"]

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDTHS = (1280, 400)
SCHEMES = ("light", "dark")

#: The contrast of each text with the background below it, and the texts whose contrast is too low.
CONTRAST = """() => {
  const canvas = Object.assign(document.createElement('canvas'), {width: 1, height: 1});
  const context = canvas.getContext('2d', {willReadFrequently: true});
  const parse = colour => {
    context.clearRect(0, 0, 1, 1); context.fillStyle = colour; context.fillRect(0, 0, 1, 1);
    const [red, green, blue, alpha] = context.getImageData(0, 0, 1, 1).data;
    return [red, green, blue, alpha / 255];
  };
  const linear = part => (part /= 255) <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  const luminance = ([red, green, blue]) => 0.2126 * linear(red) + 0.7152 * linear(green) + 0.0722 * linear(blue);
  const behind = element => {
    for (; element; element = element.parentElement) {
      const colour = parse(getComputedStyle(element).backgroundColor);
      if (colour[3] === 1) return colour;
    }
    return [255, 255, 255, 1];
  };
  const found = {seen: 0, least: 99, low: []};
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement, text = walker.currentNode.data.trim();
    if (!text || element.closest('style, title, svg:not(.plot)') || !element.getClientRects().length) continue;
    const style = getComputedStyle(element);
    const front = parse(element.closest('svg') ? style.fill : style.color);
    const [light, dark] = [luminance(front), luminance(behind(element))].sort((one, other) => other - one);
    const contrast = (light + 0.05) / (dark + 0.05);
    found.seen += 1; found.least = Math.min(found.least, contrast);
    if (contrast < 4.5 || front[3] < 1) found.low.push(`${contrast.toFixed(2)} ${text.slice(0, 60)}`);
  }
  return found;
}"""
#: Parts of the page that stick out of it, but for those in a box that scrolls by itself.
STICKING_OUT = """() => [...document.body.querySelectorAll('*')]
  .filter(one => !one.closest('.scroll > *') && one.getBoundingClientRect().right > innerWidth + 1)
  .map(one => one.outerHTML.slice(0, 100))"""
UNFOLD = "() => document.querySelectorAll('details').forEach(one => { one.open = true })"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = next(filter(None, map(shutil.which, NAMES)), None)
    assert path is not None, f"needs a browser on the PATH: {', '.join(NAMES)}"
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=arguments)
        yield started
        started.close()


@pytest.fixture
def opened(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Open a page; at the end of the test there must be no error, no message on the console and no further request."""
    trouble: list[str] = []
    requests: list[str] = []
    contexts = []
    asked: list[str] = []

    def open_page(path: Path, width: int = 1280, scheme: str = "light") -> Page:
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme))
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: trouble.append(f"error: {error}"))
        page.on("console", lambda message: trouble.append(f"console: {message.text}"))
        page.on("request", lambda request: requests.append(request.url))
        asked.append(path.as_uri())
        page.goto(path.as_uri(), wait_until="load")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert trouble == []
    assert requests == asked


REPORTS = {
    "right": lambda: sample([one for one in passed(440) if one.method == "tova"]),
    "wrong": lambda: sample([*passed(440), *failed("output", 40), *other("LongFlowState")]),
    "long": lambda: sample([*passed(44), *failed(LONG), *other(LONG)], text=LONG),
    "hostile": lambda: sample([*passed(44), *failed(HOSTILE), *other(HOSTILE)], text=HOSTILE),
    "ours": lambda: sample([*passed(8000), *failed("output"), *other("x")], implementation=None),
    "nothing": lambda: sample([]),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("reports")
    for name, make in REPORTS.items():
        write_report(make(), folder / f"{name}.html")
    return {name: folder / f"{name}.html" for name in REPORTS}


@pytest.mark.parametrize("name", REPORTS)
def test_the_page_opens_without_errors_and_loads_nothing(name, written, opened):
    page = opened(written[name])
    assert page.title().startswith("kvtwin: ")
    assert page.locator("h1").is_visible()
    assert page.locator("h1 + .headline .badge").first.is_visible()


@pytest.mark.parametrize("name", REPORTS)
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_does_not_scroll_sideways(name, width, written, opened):
    page = opened(written[name], width)
    for fold in ("folded", "unfolded"):
        if fold == "unfolded":
            page.evaluate(UNFOLD)
        wide, window = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        assert wide <= window, fold
        assert page.evaluate(STICKING_OUT) == [], fold


@pytest.mark.parametrize("name", ["wrong", "long", "hostile"])
def test_no_reason_is_outside_of_a_narrow_screen(name, written, opened):
    """Tables with long texts do not scroll; those that scroll show it by a shadow."""
    page = opened(written[name], 400)
    page.evaluate(UNFOLD)
    cells = page.locator("td.long").all()
    assert len(cells) > 20
    for cell in cells:
        box = cell.bounding_box()
        assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= 400, cell.inner_text()
    scrolls = "() => [...document.querySelectorAll('.scroll')].filter(one => one.scrollWidth > one.clientWidth)"
    assert page.evaluate(f"({scrolls})().filter(one => one.querySelector('td.long')).length") == 0
    assert page.evaluate(f"({scrolls})().every(one => getComputedStyle(one).backgroundImage.includes('gradient'))")


@pytest.mark.parametrize("width", WIDTHS)
def test_the_verdict_is_in_the_first_screen(width, written, opened):
    page = opened(written["wrong"], width)
    for part in (".headline", "h2:has-text('Verdict')", "table >> nth=0"):
        box = page.locator(part).bounding_box()
        assert box is not None
        assert box["y"] + min(box["height"], 300) < 900


def test_folds_open_by_mouse_and_by_keyboard(written, opened):
    page = opened(written["ours"])
    everything = page.locator("details", has=page.locator("summary", has_text="All 8,009 tests")).last
    files = everything.get_by_role("region", name="Passed tests by file")
    assert not files.is_visible()
    everything.locator("summary").first.click()
    assert files.is_visible()
    everything.locator("summary").first.press("Enter")
    assert not files.is_visible()


@pytest.mark.parametrize("name", ["wrong", "ours", "right"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_texts_have_contrast(name, scheme, written, opened):
    page = opened(written[name], scheme=scheme)
    page.evaluate(UNFOLD)
    found = page.evaluate(CONTRAST)
    assert found["seen"] > 50
    assert found["low"] == []
    assert found["least"] >= 4.5


def test_dark_and_light_differ(written, opened):
    backs = [
        opened(written["right"], scheme=scheme).evaluate("getComputedStyle(document.body).backgroundColor")
        for scheme in SCHEMES
    ]
    assert len(set(backs)) == 2


def test_hostile_texts_do_not_run(written, opened):
    page = opened(written["hostile"])
    page.evaluate(UNFOLD)
    for place in page.locator("summary").all()[:10]:
        place.hover()
    assert page.title().startswith("kvtwin: json")
    assert page.locator("script, img, b").count() == 0
    assert page.get_by_text(HOSTILE).count() > 0


def test_the_contrast_check_sees_a_bad_colour(written, opened):
    page = opened(written["right"])
    page.evaluate("document.querySelector('h1').style.color = '#999'")
    assert len(page.evaluate(CONTRAST)["low"]) == 1


def test_the_page_of_a_run_with_hostile_ids(pytester, opened):
    pytester.makepyfile(f"""
        import pytest
        pytestmark = pytest.mark.method("longflow")

        @pytest.mark.property("ties")
        @pytest.mark.parametrize("text", [{HOSTILE!r}], ids=[{HOSTILE!r}])
        @pytest.mark.parametrize("right", [True, False])
        def test_it(text, right, twins):
            assert right, text
    """)
    pytester.runpytest_subprocess("-p", "no:cacheprovider", "--kv-device=cpu", "--kv-report=out.html")
    for width in WIDTHS:
        page = opened(pytester.path / "out.html", width)
        assert page.locator(".headline").inner_text() == "longflow: ✗ wrong"
        assert page.locator("script, img").count() == 0
