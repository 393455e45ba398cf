"""The site as it is read: built once, each page opened wide and narrow in a real browser."""

import importlib.util
import json
import os
import subprocess
import sys
import threading
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import pytest
from chromium import Chromium, find_browser
from test_terms import REQUIRED

ROOT = Path(__file__).parents[1]
BROWSER = find_browser()
BUILDER = importlib.util.find_spec("mkdocs")
pytestmark = [
    pytest.mark.slow,
    # The gate has both: there it is an error if one is missing, and elsewhere a reason.
    pytest.mark.skipif(
        (BROWSER is None or BUILDER is None) and "JRL_GATE" not in os.environ,
        reason='needs a Chromium and pip install -e ".[docs]" to look at the site',
    ),
]
WIDE, NARROW = (1280, 900), (420, 800)
# What of a page can be wrong however wide it is.
STATE = """(() => {
  const root = document.documentElement;
  const article = document.querySelector("article").cloneNode(true);
  for (const part of article.querySelectorAll("pre, code")) part.remove();
  const size = (x) => x.getBoundingClientRect();
  return {
    overhang: root.scrollWidth - root.clientWidth,
    blank: [...document.images].filter((x) => x.complete && !x.naturalWidth).map((x) => x.src),
    raw: article.textContent.match(/\\\\[([a-z]{3,}|\\$\\$/g) || [],
    formulas: document.querySelectorAll("math").length,
    flat: [...document.querySelectorAll("math")].filter((x) => size(x).height < 8).length,
    fractions: [...document.querySelectorAll("mfrac")].map(
      (x) => size(x.children[0]).bottom <= size(x.children[1]).top + 1),
  };
})()"""
SEARCH = """new Promise((done, failed) => {
  const field = document.querySelector("input.md-search__input");
  const links = () => [...document.querySelectorAll(".md-search-result__link")].map((x) => x.href);
  const type = (words) => {
    field.focus();
    field.value = words;
    field.dispatchEvent(new Event("input", {bubbles: true}));
    field.dispatchEvent(new KeyboardEvent("keyup", {bubbles: true}));
  };
  const until = Date.now() + 8000;
  const wait = (ready, then) => {
    if (ready() || Date.now() > until) then();
    else setTimeout(() => wait(ready, then), 20);
  };
  // The results of the words before are gone first.
  type("");
  wait(() => !links().length, () => {
    type(WORDS);
    wait(() => links().length, () => done(links()));
  });
})"""


class Quiet(SimpleHTTPRequestHandler):
    """Serves files and says nothing. Each page reads the whole index again, which takes longer than
    the page: it is empty until `index` is true."""

    index = False

    def do_GET(self):
        if self.index or not self.path.endswith("/search_index.json"):
            return super().do_GET()
        content = json.loads(Path(self.translate_path(self.path)).read_text())
        empty = json.dumps(content | {"docs": []}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(empty)))
        self.end_headers()
        self.wfile.write(empty)

    def log_message(self, *_):
        pass


class Page(HTMLParser):
    """What a page leads to, and the anchors that it has."""

    def __init__(self, text):
        super().__init__()
        self.links, self.anchors = [], {"", "__top"}
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        self.links += [given[name] for name in ("href", "src") if given.get(name)]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    # The gate has built it, and each process of the tests would build it again.
    if (built := os.environ.get("JRL_SITE")) is not None:
        return Path(built)
    assert BUILDER is not None, 'the gate has no MkDocs: pip install -e ".[docs]"'
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site):
    return {
        path.relative_to(site).as_posix().removesuffix("index.html"): Page(path.read_text())
        for path in site.rglob("*.html")
        if path.name != "404.html"
    }


@pytest.fixture(scope="module")
def address(site):
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=site))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    assert BROWSER is not None, "the gate has no Chromium: apt-get install chromium"
    browser = Chromium(BROWSER, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


def test_links_and_anchors_resolve(site, pages):
    assert len(pages) > 30
    for name, page in pages.items():
        for link in page.links:
            parts = urlsplit(urljoin(f"http://site/{name}", link))
            if parts.netloc != "site" or parts.scheme != "http":
                continue
            reached = unquote(parts.path).lstrip("/")
            if reached in pages:
                assert unquote(parts.fragment) in pages[reached].anchors, (name, link)
            else:
                assert (site / reached).is_file(), (name, link)


def test_pages_fetch_nothing_and_refer_to_no_script_elsewhere(pages):
    """`href` of links lead elsewhere; what a page loads on its own is in the browser's list below,
    and these would be loaded only when something is clicked."""
    for name, page in pages.items():
        loaded = [link for link in page.links if link.endswith((".js", ".css", ".woff2"))]
        assert loaded and not [link for link in loaded if urlsplit(link).netloc], name


def test_every_page_wide_and_narrow(browser, pages, address):
    browser.complaints.clear()
    browser.requests.clear()
    states = {}
    for name in sorted(pages):
        browser.open(address + name, *WIDE)
        states[name, "wide"] = browser.evaluate(STATE)
        browser.resize(*NARROW)
        states[name, "narrow"] = browser.evaluate(STATE)
        assert browser.complaints == [], name
    for place, state in states.items():
        assert state["overhang"] == 0, place
        assert state["blank"] == [] and state["raw"] == [], (place, state)
        assert state["flat"] == 0 and all(state["fractions"]), place
    # TeX that became no formula would be `raw`; that there are some says that it is looked for.
    assert sum(state["formulas"] for state in states.values()) > 60
    assert sum(len(state["fractions"]) for state in states.values()) > 20
    elsewhere = [url for url in browser.requests if not url.startswith((address, "data:"))]
    assert elsewhere == []


def test_search_finds_every_term_on_the_page_of_its_subject(browser, address, monkeypatch):
    monkeypatch.setattr(Quiet, "index", True)
    browser.open(address, *WIDE)
    terms = [("decoupled_gae", "objectives/advantages/"), ("drift", "training/")]
    terms += [(term, page.replace(".md", "/")) for page in REQUIRED for term in REQUIRED[page]]
    lost = {}
    for words, page in terms:
        links = browser.evaluate(SEARCH.replace("WORDS", json.dumps(words)))
        found = {urlsplit(link).path.lstrip("/") for link in links}
        if page not in found:
            lost[words, page] = found
    assert not lost
