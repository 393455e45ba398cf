"""The pages: every public function has its place, links lead somewhere, examples are rendered.

.ci/run builds the site with warnings as errors; what is here needs no extra and says more.
"""

import ast
import dataclasses
import functools
import importlib.util
import json
import re
import typing
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import jrl
from jrl.config.run import RunConfig
from jrl.recipes.load import LIBRARY
from jrl.report.metrics import describe
from sharding.folding import Layout, fold_abstract
from sharding.folding.groups import axis_ranks

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = "\n".join(page.read_text() for page in DOCS)
# A place in the site: "::: jrl.losses.gae", a heading's mark may be before it.
PLACES = re.findall(r"(?m)^(?:#+ )?::: (jrl\.losses\.[\w.]+)$", PAGES)
SOURCES = sorted(
    path for folder in ("jrl", "moe", "sharding") for path in (ROOT / folder).rglob("*.py")
)
MARKDOWN = [
    *sorted(ROOT.glob("*.md")),
    *DOCS,
    *sorted(
        path for folder in ("benchmarks", "experiments") for path in (ROOT / folder).rglob("*.md")
    ),
]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# Looked up by hand; a link to another repository is looked up before it is added.
REPOSITORIES = {"open-thought/reasoning-gym", "starriver030515/HAPO", "verl-project/verl"}
REPOSITORIES |= {
    "NVIDIA/DCGM",
    "NVIDIA/dcgm-exporter",
    "google/cadvisor",
    "prometheus/node_exporter",
}
REPOSITORIES |= {"deepseek-ai/FlashMLA", "ggml-org/ggml", "meta-pytorch/OpenEnv"}
REPOSITORIES |= {"kubernetes-sigs/jobset", "marin-community/marin", "openxla/xla"}


def documented():
    """Public names but the sets of strings, which are explained beside their argument."""
    things = {name: getattr(jrl, name) for name in jrl.__all__}
    return [name for name, thing in things.items() if typing.get_origin(thing) is None]


@pytest.mark.parametrize("name", documented())
def test_every_public_name_has_its_place(name):
    assert len([place for place in PLACES if place.split(".")[-1] == name]) == 1


def test_every_diagnostic_has_its_place_in_their_order():
    places = [place for place in PLACES if place.startswith("jrl.losses.diagnostics.")]
    assert [place.split(".")[-1] for place in places] == jrl.diagnostics.__all__


def test_places_are_functions_and_not_the_files_of_those_names():
    """The site's reader of sources takes the file if both have one name."""
    files = {path.stem for path in (ROOT / "jrl" / "losses").rglob("*.py")}
    for place in PLACES:
        name = place.split(".")[-1]
        assert name not in files or place.endswith(f".{name}.{name}"), place


def test_every_call_on_the_pages_exists():
    for call in re.findall(r"\bjrl\.(\w+)\(", PAGES):
        assert call in jrl.__all__, call


def test_every_page_has_its_place_in_the_navigation():
    listed = re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1])
    pages = [page.relative_to(ROOT / "docs") for page in DOCS]
    pages += [page.relative_to(ROOT) for page in (ROOT / "experiments").rglob("*.md")]
    assert sorted(listed) == sorted(map(str, pages))


def test_what_is_said_of_metrics_is_of_metrics_that_there_are():
    page = (ROOT / "docs" / "reading.md").read_text()
    groups = r"actor|critic|data|moe|perf|response_length|reward|sampling|timing_s|training|val"
    names = set(re.findall(rf"`((?:{groups}|verifier|dynamic_sampling)/[\w/@*]+)`", page))
    assert len(names) > 30
    for name in names:
        assert describe(name.replace("*", "any").replace("NAME", "any")), name


@pytest.mark.slow
def test_errors_that_are_explained_are_errors_of_the_library():
    """A message in "it says" has a phrase of the sources in it, or is a part of one."""
    phrases = {
        phrase.strip()
        for path in SOURCES
        for node in nodes(path)
        for piece in (node.values if isinstance(node, ast.JoinedStr) else [node])
        if isinstance(piece, ast.Constant) and isinstance(piece.value, str)
        for phrase in (piece.value, *re.split(r"[:;,.(]", piece.value))
    }
    phrases = {text for text in phrases if len(text) >= 10 and " " in text}
    pages = ("docs/troubleshooting.md", "docs/several_machines.md")
    rows = "\n".join((ROOT / page).read_text() for page in pages).splitlines()
    cells = [row.split(" | ")[0] for row in rows if row.startswith("| `")]
    said = [part for cell in cells for part in cell.split("`") if " " in part.strip(", ")]
    said = [message for message in said if not message.startswith(", ")]
    assert len(said) > 40
    foreign = {"No module named jrl"}
    for message in said:
        known = any(text in message or message in text for text in phrases)
        assert known or message in foreign, message


@functools.cache
def nodes(path):
    """Whatever is written in a module."""
    return [*ast.walk(ast.parse(path.read_text()))]


def docstring_lines(path):
    """Each line of a docstring with the section it is in and the line before it."""
    for node in nodes(path):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            section = before = ""
            for line in (ast.get_docstring(node) or "").splitlines():
                if line and not line.startswith(" "):
                    section = line if re.fullmatch(r"\w[\w ]*:", line) else ""
                yield line, section, before
                before = line


def test_examples_have_a_heading():
    """Without it the site takes the prompt for three block quotes, and some results for links."""
    lines = [(path, *line) for path in SOURCES for line in docstring_lines(path)]
    examples = [(path, line, section) for path, line, section, _ in lines if ">>> " in line]
    assert len(examples) > 200
    assert not [example for example in examples if example[-1] != "Examples:"]


def test_what_is_returned_is_not_taken_for_a_type():
    """The site takes what precedes a colon in the first line for one."""
    for path in (ROOT / "jrl" / "losses").rglob("*.py"):
        for line, _, before in docstring_lines(path):
            assert before != "Returns:" or ":" not in line, (path, line)


def test_the_site_has_what_its_pages_use():
    configured = (ROOT / "mkdocs.yml").read_text()
    for mark, extension in (
        (r'(?m)^=== "', "pymdownx.tabbed"),
        (r"(?m)^!!! ", "admonition"),
        (r"<div[^>]* markdown>", "md_in_html"),
        (r"\$\$|\\\(", "pymdownx.arithmatex"),
    ):
        if re.search(mark, PAGES + (ROOT / "docs" / "hooks.py").read_text()):
            assert re.search(rf"(?m)^  - {extension}\b", configured), extension
    assert "font: false" in configured  # nothing is fetched from elsewhere
    for style in re.findall(r"extra_css: \[(.*)\]", configured):
        assert (ROOT / "docs" / style).exists()


def prose(path):
    """The text without its code, where brackets mean something else."""
    if path.suffix == ".ipynb":
        cells = json.loads(path.read_text())["cells"]
        text = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    else:
        text = path.read_text()
    return re.sub(r"`[^`\n]*`", "", re.sub(r"(?ms)^ *```.*?^ *```", "", text))


def links(path):
    return re.findall(r"\]\(([^)\s]+)\)", prose(path))


def anchors(path):
    """Of the headings, and of what the site puts in their place."""
    text = re.sub(r"(?ms)^ *```.*?^ *```", "", path.read_text())
    for title in re.findall(r"(?m)^#+ (.*)$", text):
        yield re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")
    yield from re.findall(r"(?m)^(?:#+ )?::: ([\w.]+)$", text)


@pytest.mark.parametrize("path", [*MARKDOWN, *NOTEBOOKS], ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    for link in links(path):
        if urlsplit(link).scheme:
            assert well_formed(link), link
            continue
        target, _, anchor = link.partition("#")
        reached = (path.parent / target).resolve() if target else path
        if not reached.exists() and path.parent == ROOT / "docs":
            reached = ROOT / target  # the site has the notebook under its own path
        assert reached.exists(), link
        assert reached.is_relative_to(ROOT), link
        if path.is_relative_to(ROOT / "docs"):
            assert reached.is_relative_to(reached_by_the_site(reached)), link
        if anchor:
            assert anchor in set(anchors(reached)), link


def reached_by_the_site(reached):
    """The folder of the site that may have a file: the pages, or one that docs/hooks.py adds."""
    folders = [ROOT / name for name in ("notebooks", "experiments", "jrl/conformance/vectors")]
    return next((folder for folder in folders if folder in reached.parents), ROOT / "docs")


def unseparated_bullets(text):
    """Numbers of the lines whose bullet the site shows inside of the paragraph above."""
    lines, in_list, fenced, before = list[int](), False, False, ""
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_list, fenced = False, not fenced
        elif not fenced and line.startswith("* "):
            if before and not in_list:
                lines.append(number)
            in_list = True
        elif line.strip() and not before:
            in_list = False
        before = line.strip()
    return lines


def test_unseparated_bullets_follow_a_paragraph_or_a_code_block():
    assert unseparated_bullets("* a\n  a\n* b\n\n    c\n\n* d\n\n  ```\n  e\n  ```\n\n* f") == []
    assert unseparated_bullets("a\n* b") == [2]
    assert unseparated_bullets("* a\n\n    b\n* c\n\n  ```\n  d\n  ```\n* e") == [4, 9]


@pytest.mark.parametrize("path", MARKDOWN, ids=lambda path: str(path.relative_to(ROOT)))
def test_bullets_follow_an_empty_line(path):
    assert unseparated_bullets(path.read_text()) == []


def test_addresses_in_the_sources_are_well_formed():
    pattern = r"https?://[^\s\"'`)>\],;]+\.[^\s\"'`)>\],;]+"
    addresses = {a for path in SOURCES for a in re.findall(pattern, path.read_text())}
    assert len(addresses) > 40
    for address in addresses:
        assert "{" in address or well_formed(address.rstrip(".")), address


def well_formed(address):
    parts = urlsplit(address)
    host, path = parts.netloc, parts.path
    if host == "arxiv.org":
        return parts.scheme == "https" and re.fullmatch(r"/abs/\d{4}\.\d{4,5}", path)
    if host in ("github.com", "colab.research.google.com"):
        return "/".join(path.removeprefix("/github/").strip("/").split("/")[:2]) in REPOSITORIES
    return parts.scheme in ("http", "https") and re.fullmatch(
        r"(127\.0\.0\.1|[\w-]+(\.[\w-]+)+)(:\d+)?", host
    )


@functools.cache
def script(name):
    """A script of the pages as a module."""
    spec = importlib.util.spec_from_file_location(Path(name).stem, ROOT / "docs" / name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "name",
    [
        *("README.md", "docs/recipes.md", "docs/checkpoints.md"),
        pytest.param("docs/unsupported.md", marks=pytest.mark.slow),
    ],
)
def test_tables_equal_the_code(name):
    """If this fails, run `python docs/tables.py`."""
    page = (ROOT / name).read_text(encoding="utf-8")
    assert "<!-- table: " in page
    assert script("tables.py").updated(page) == page


def test_every_table_is_on_a_page():
    tables = script("tables.py")
    pages = [(ROOT / name).read_text(encoding="utf-8") for name in tables.PAGES]
    assert {found[1] for page in pages for found in tables.TABLE.findall(page)} == set(
        tables.TABLES
    )


def test_settings_has_every_setting_once_with_a_meaning():
    tables = script("tables.py")
    sections = tables.settings().split("\n## ")
    rows = [row for each in sections for row in each.splitlines() if row.startswith("| `--")]
    runs = [tables.flag(item.name) for item in dataclasses.fields(RunConfig)]
    of_recipes = [
        tables.flag(item.name) for kind in LIBRARY.values() for item in dataclasses.fields(kind)
    ]
    flags = [row.split("`")[1] for row in rows]
    assert [name for name in runs if flags.count(name) != 1] == []
    assert set(of_recipes) <= set(flags)
    assert [row for row in rows if not row.split(" | ")[3].strip()] == []
    assert "| `--steps` | `60` | integer, 0 or more |" in "".join(sections)


IMAGES = ROOT / "docs" / "images"
# Pages of one idea each, which a diagram shows before the first section.
ILLUSTRATED = [
    *("answers", "checkpoints", "conversations", "disaggregated", "evaluation", "faults"),
    *("layouts", "objectives/index", "rewards", "serving", "several_machines", "sft", "training"),
]


@functools.cache
def diagrams():
    """Names and content of the diagrams, as their script draws them."""
    pictures = script("images/draw.py").PICTURES
    return {name: picture().svg().encode() for name, picture in pictures.items()}


def test_diagrams_are_those_of_their_script():
    """If this fails, run `python docs/images/draw.py`."""
    assert {path.name: path.read_bytes() for path in IMAGES.glob("*.svg")} == diagrams()


def test_diagrams_load_nothing_and_hold_no_date():
    for name, content in diagrams().items():
        text = content.decode().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|href|url\(|@import|<script|<image|20\d\d-", text), name


def test_every_diagram_is_on_a_page():
    shown = {Path(link).name for page in DOCS for link in links(page) if link.endswith(".svg")}
    assert shown == set(diagrams())


def test_every_image_has_a_text_in_its_place():
    for page in DOCS:
        for text in re.findall(r"!\[([^\]]*)\]\(", prose(page)):
            assert len(text) > 20, (page, text)


@pytest.mark.parametrize("name", ILLUSTRATED)
def test_concept_pages_begin_with_a_diagram(name):
    head = (ROOT / "docs" / f"{name}.md").read_text().split("\n## ")[0]
    assert re.search(r"(?m)^!\[.+\]\((\.\./)?images/\w+\.svg\)$", head)


def test_diagram_of_a_layout_has_the_ranks_of_the_library():
    mesh, drawn = fold_abstract(Layout.parse("tp2 dp4 / ep4")), diagrams()["layout.svg"].decode()
    for axis in ("tp", "dp", "ep", "edp"):
        ranks = [int(rank) for rank in re.findall(rf">{axis}(\d)<", drawn)]
        assert ranks == list(axis_ranks(mesh, axis)), axis
