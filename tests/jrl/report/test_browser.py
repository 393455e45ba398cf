"""report.html in a real browser."""

import os

import pytest
from chromium import Chromium, find_browser
from report_runs import HOSTILE, NUM_STEPS, report_run

from jrl.report.page import write_page
from jrl.runs.records import Appender

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
    assert len(drawn) == 6 and all(BLUE in colours for colours in drawn)
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
    more = {"moe/max_load": None, "moe/min_load": None, "actor/grad_norm": 3.25e-14}
    run = report_run(tmp_path / "dense", more=more)
    browser.open(write_page([run], tmp_path / "dense.html"), 1280, 900)
    links = browser.evaluate(shown)
    assert links == browser.evaluate(f"{parts}.map((x) => '#' + x.id)") and "#router" not in links
    left = """(() => {
      const chart = [...document.querySelectorAll(".chart")]
        .find((x) => x.dataset.title === "Gradient norm");
      return chart.querySelector(".u-over").offsetLeft;
    })()"""
    assert browser.evaluate(left) >= 7 * len("3.25e-14")


def test_differences_of_rounding_are_written_and_not_drawn(browser, tmp_path):
    titles = "[...document.querySelectorAll('.chart')].map((x) => x.dataset.title)"
    more = {"actor/ppo_kl": -3.2e-7, "sampling/k3_kl": 2e-14, "actor/entropy": 0.00002}
    run = report_run(tmp_path / "rounding", more=more)
    browser.open(write_page([run], tmp_path / "rounding.html"), 1280, 900)
    assert text(browser, "#rounding") == (
        "Differences of rounding alone: KL from the sampling policy (at most 3.20e-7 nats per "
        "token), Sampler against trainer (at most 2.00e-14 nats)."
    )
    drawn = browser.evaluate(titles)
    assert "Entropy" in drawn  # as small, and no difference
    assert not {"KL from the sampling policy", "Sampler against trainer"} & set(drawn)
    # The same in one step that moved.
    with Appender(run.metrics_path) as lines:
        lines.append(NUM_STEPS + 1, {"actor/ppo_kl": 0.02})
    browser.open(write_page([run], tmp_path / "moved.html"), 1280, 900)
    assert "KL from the sampling policy" in browser.evaluate(titles)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_short_runs_have_whole_steps_on_their_axis(browser, tmp_path, steps):
    run = report_run(tmp_path / "short", steps=steps)
    browser.open(write_page([run], tmp_path / "short.html"), 1280, 900)
    ticks = browser.evaluate(
        "[...document.querySelectorAll('#charts .chart > div')].map((x) => x.plot.axes[0])"
        ".filter((x) => x.label === 'step').map((x) => [x._splits, x._values])"
    )
    assert ticks
    for splits, words in ticks:
        assert splits and all(float(x).is_integer() for x in splits) and len(splits) <= steps + 3
        assert words == [str(x) for x in splits]


def test_run_without_a_step_has_a_page(browser, tmp_path):
    run = report_run(tmp_path / "new", steps=0)
    run.metrics_path.unlink()
    run.samples_path.unlink()
    browser.open(write_page([run], tmp_path / "new.html", running=True), 1280, 900)
    assert "running, drawn 20" in text(browser, "#subtitle")
    assert text(browser, "#summary") == "0steps"
    assert text(browser, "#list") == "No samples yet."
    # Neither filters of nothing nor axes of nothing.
    shown = "[...document.querySelectorAll('main .bar')].filter((x) => x.offsetHeight).length"
    assert browser.evaluate(shown) == 1  # the search of the settings
    assert text(browser, "#waiting").startswith("The first evaluation")


def test_accuracy_is_drawn_over_minutes_and_memory_over_steps(browser, tmp_path):
    more = {"perf/run_minutes": 4.5, "perf/process_memory_gb": 2.25}
    run = report_run(tmp_path / "timed", more=more)
    browser.open(write_page([run], tmp_path / "timed.html"), 1280, 900)
    legend = "[...document.querySelectorAll('.chart')].find((x) => x.dataset.title === {!r})"
    legend += ".querySelector('.u-legend th').textContent"
    for title, axis in [
        ("Held-out accuracy", "step"),
        ("Held-out accuracy over minutes", "minutes of the run"),
        ("Memory", "step"),
    ]:
        assert browser.evaluate(legend.format(title)) == axis


def test_samples_come_before_curves_and_conversations_by_turns(browser, tmp_path):
    run = report_run(tmp_path / "turns", steps=1)
    sample = {
        **{"kind": "training", "prompt": "guess", "answer": "7", "score": 0.5, "reason": "partial"},
        "completion": "3\n[user] higher\n7",
        "messages": [
            {"role": "assistant", "content": "3"},
            {"role": "user", "content": "higher"},
            {"role": "assistant", "content": "7", "truncated": True},
        ],
        "turn_rewards": [0.25],
        "conversation": "<|user|>guess<|assistant|>3<|user|>higher<|assistant|>7",
    }
    with Appender(run.samples_path) as lines:
        lines.append(2, sample)
    browser.open(write_page([run], tmp_path / "turns.html"), 1280, 900)
    order = "[...document.querySelectorAll('main section')].map((x) => x.id)"
    assert browser.evaluate(order)[:2] == ["samples", "curves"]
    about = "[...document.querySelectorAll('#completion .about')].map((x) => x.textContent)"
    assert browser.evaluate(about) == ["turn 1 · reward 0.25", "user", "turn 2 · cut"]
    shown = browser.evaluate("document.getElementById('sample').innerText")
    # Once: the text with special tokens is closed.
    assert shown.count("higher") == 1 and "<|user|>" not in shown


def test_part_of_a_reward_that_was_always_0_is_named(browser, tmp_path):
    run = report_run(tmp_path / "zero", more={"reward/format": 0.0, "reward/answer": 0.5})
    browser.open(write_page([run], tmp_path / "zero.html"), 1280, 900)
    said = "A part of the reward was 0 in every completion: format."
    assert text(browser, "#suspicion") == said


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
