"""report.html in a real browser."""

import os

import pytest
from chromium import Chromium, find_browser
from report_runs import HOSTILE, NUM_STEPS, report_run

from jrl.report.page import write_page

BROWSER = find_browser()
pytestmark = [
    pytest.mark.slow,
    # The gate installs one: there a missing browser is an error, and elsewhere a reason.
    pytest.mark.skipif(
        BROWSER is None and "JRL_GATE" not in os.environ,
        reason="no Chromium on this machine: install one to look at report.html in a browser",
    ),
]
DRAWN = """[...document.querySelectorAll("#curves canvas, #router canvas")].map((canvas) => {
  const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const colours = new Set();
  for (let i = 0; i < data.length; i += 4)
    if (data[i + 3] > 250) colours.add(data[i] + "," + data[i + 1] + "," + data[i + 2]);
  return [...colours];
})"""
BLUE, ORANGE = "37,99,235", "234,115,23"


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    runs = [report_run(folder / "first"), report_run(folder / "second", seed=1)]
    return {
        "one": write_page(runs[:1], folder / "one.html"),
        "two": write_page(runs, folder / "two.html"),
    }


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    assert BROWSER is not None, "the gate has no Chromium: apt-get install chromium"
    browser = Chromium(BROWSER, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(autouse=True)
def quiet(browser):
    """No page says anything on the console, or asks for anything but itself."""
    browser.complaints.clear()
    browser.requests.clear()
    yield
    assert browser.complaints == []
    assert all(url.startswith(("file:", "data:")) for url in browser.requests), browser.requests


def type_into(browser, identity, text):
    browser.evaluate(
        f"(() => {{ const field = document.getElementById({identity!r}); field.value = {text!r};"
        " field.dispatchEvent(new Event('input', {bubbles: true})); })()"
    )


def listed(browser):
    return browser.evaluate("document.querySelectorAll('#list .item').length")


def text(browser, selector):
    return browser.evaluate(f"document.querySelector({selector!r}).textContent")


def test_curves_are_drawn(browser, pages):
    browser.open(pages["one"], 1280, 900)
    titles = browser.evaluate(
        "[...document.querySelectorAll('.chart')].map((x) => x.dataset.title)"
    )
    assert {"Reward", "Held-out accuracy", "Entropy", "Gradient norm", "Router load"} <= set(titles)
    drawn = browser.evaluate(DRAWN)
    assert len(drawn) == 5 and all(BLUE in colours for colours in drawn)
    browser.evaluate("document.querySelector('#axis [data-key=tokens]').click()")
    assert text(browser, "#charts .u-legend th") == "tokens trained on"
    type_into(browser, "metric", "moe/max_load")
    assert text(browser, "#charts .chart:last-child h3") == "moe/max_load"
    browser.evaluate("document.querySelector('#axis [data-key=time]').click()")
    assert "66.7 %" in text(browser, "#phases") or "50.0 %" in text(browser, "#phases")


def test_runs_are_compared(browser, pages):
    browser.open(pages["two"], 1280, 900)
    drawn = browser.evaluate(DRAWN)
    assert {BLUE, ORANGE} <= set(drawn[0])  # of the score, which differs
    assert text(browser, "#legend") == "firstsecond"
    browser.evaluate("document.getElementById('differing').click()")
    names = (
        "[...document.querySelectorAll('#settings-table td:first-child')].map((x) => x.textContent)"
    )
    assert browser.evaluate(names) == ["seed"]


def test_a_network_without_experts_has_no_router(browser, pages, tmp_path):
    """Nor a link to its part of the page; and the smallest numbers have room beside the curve."""
    shown = "[...document.querySelectorAll('nav a')].filter((x) => !x.hidden).map((x) => x.hash)"
    parts = "[...document.querySelectorAll('main section')].filter((x) => !x.hidden)"
    browser.open(pages["one"], 1280, 900)
    assert "#router" in browser.evaluate(shown)
    more = {"moe/max_load": None, "moe/min_load": None, "sampling/k3_kl": 3.25e-14}
    run = report_run(tmp_path / "dense", more=more)
    browser.open(write_page([run], tmp_path / "dense.html"), 1280, 900)
    links = browser.evaluate(shown)
    assert links == browser.evaluate(f"{parts}.map((x) => '#' + x.id)") and "#router" not in links
    left = """(() => {
      const chart = [...document.querySelectorAll(".chart")]
        .find((x) => x.dataset.title === "Sampler against trainer");
      return chart.querySelector(".u-over").offsetLeft;
    })()"""
    assert browser.evaluate(left) >= 7 * len("3.25e-14")


def test_samples_are_searched_and_filtered(browser, pages):
    browser.open(pages["one"], 1280, 900)
    assert listed(browser) == 2 * NUM_STEPS
    type_into(browser, "search", "Completion 17")
    assert listed(browser) == 2 and text(browser, "#completion mark") == "completion 17"
    type_into(browser, "score-from", "0.5")
    assert listed(browser) == 1 and text(browser, "#found") == f"1 of {2 * NUM_STEPS} samples."
    browser.evaluate("document.querySelector('#filters [type=reset]').click()")
    browser.evaluate("new Promise((done) => setTimeout(done, 20))")
    type_into(browser, "step-to", "4")
    type_into(browser, "length-from", "4")
    assert listed(browser) == 3  # of steps 3 and 4, lengths 4, 4 and 5


def test_texts_are_shown_as_texts(browser, pages):
    browser.open(pages["one"], 1280, 900)
    type_into(browser, "search", "onerror")
    assert text(browser, "#completion") == HOSTILE
    assert browser.evaluate("document.title") == "first"
    assert browser.evaluate("document.querySelectorAll('img, main b:not(.tile b)').length") == 0


def test_tokens_are_coloured(browser, pages):
    browser.open(pages["one"], 1280, 900)
    type_into(browser, "score-from", "1")
    colours = "[...document.querySelectorAll('.tokens span')].map((x) => x.style.backgroundColor)"
    press = "document.querySelector('#colouring [data-key={}]').click()"
    assert browser.evaluate(colours) == ["", "", ""]
    for key, tinted in (("advantage", [True, True, False]), ("entropy", [True] * 3)):
        browser.evaluate(press.format(key))
        result = browser.evaluate(colours)
        assert [colour != "transparent" for colour in result] == tinted
        assert len(set(result)) == 3
    browser.evaluate(press.format("gap"))
    result = browser.evaluate(colours)
    assert result[0].startswith("rgba(30, 120, 235") and result[2] == "transparent"
    assert text(browser, ".tokens") == "a<b>\u2028c"
    assert "3 of 5" in text(browser, "#sample")


@pytest.mark.parametrize("dark", [False, True])
def test_a_narrow_screen_does_not_scroll_sideways(browser, pages, dark):
    for name in pages:
        browser.open(pages[name], 360, 740, dark=dark)
        assert browser.evaluate("document.documentElement.scrollWidth") == 360
        ends = "[...document.querySelectorAll('.card')].map((x) => x.getBoundingClientRect().right)"
        assert max(browser.evaluate(ends)) <= 360
        back = browser.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (back == "rgb(16, 21, 27)") == dark
