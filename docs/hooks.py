"""What the site shows of files that are kept elsewhere, how references are laid out, what its
search has, and formulas: TeX between dollars becomes MathML, which browsers draw without a script
or a font of ours."""

import html as entities
import json
import re
import runpy
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
VECTORS = ROOT / "jrl" / "conformance" / "vectors"
NOTEBOOKS = ROOT / "notebooks"
EXPERIMENTS = ROOT / "experiments"
FORMULA = re.compile(
    r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL
)  # what pymdownx.arithmatex makes of TeX
PLOT = re.compile(r'<img alt="[^"]*" src="([^"]+\.png)" ?/?>')
NUMBER = re.compile(r"(?<![\w-])[-+(]?\d[\d.,%]*[%)]?(?![\w-])")
FLAG = re.compile(r"<code>(--[\w-]{2,26}(?: [\w.]{1,8})?)</code>")


def on_files(files: Files, config) -> Files:
    for path in sorted(VECTORS.glob("*.json")):
        files.append(File.generated(config, f"vectors/{path.name}", abs_src_path=str(path)))
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{path.name}", abs_src_path=str(path)))
    for path in sorted([*EXPERIMENTS.rglob("*.md"), *EXPERIMENTS.rglob("*.png")]):
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_) -> str:
    if "<!-- settings -->" in markdown:
        tables = runpy.run_path(str(ROOT / "docs" / "tables.py"))
        markdown = markdown.replace("<!-- settings -->", tables["settings"]())
    if "<!-- list of vectors -->" not in markdown:
        return markdown
    listed = "\n".join(
        f"* [`{path.stem}`](vectors/{path.name})" for path in sorted(VECTORS.glob("*.json"))
    )
    columns = f'<div class="columns" markdown>\n\n{listed}\n\n</div>'
    return markdown.replace("<!-- list of vectors -->", columns)


def on_page_content(html: str, **_) -> str:
    """Formulas; plots, which lead to their files; flags, which stay in one piece; and of a
    docstring's references, each of which ends with its address, the next begins on its own line."""
    html = FORMULA.sub(mathml, html)
    html = PLOT.sub(r'<a class="plot" href="\1">\g<0></a>', html)
    html = FLAG.sub(r'<code class="flag">\1</code>', html)
    return re.sub(
        r'<details class="references".*?</details>',
        lambda found: found[0].replace("</a>\n", "</a><br>\n"),
        html,
        flags=re.DOTALL,
    )


def on_post_build(config, **_) -> None:
    """Takes bare numbers out of the search index.

    lunr, which searches, may take a digit of a term for the number of a state of its automaton: the
    search for another word, such as "call", then ends in an exception and finds nothing.
    """
    path = Path(config["site_dir"]) / "search" / "search_index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    for document in index["docs"]:
        document["text"] = NUMBER.sub("", document["text"])
    path.write_text(json.dumps(index), encoding="utf-8")


def mathml(found: re.Match[str]) -> str:
    """A formula as elements that the browser lays out; one on lines of its own may scroll."""
    display = "block" if found[1] == "div" else "inline"
    drawn = convert(entities.unescape(found[2]).strip(), display=display)
    return f'<div class="formula">{drawn}</div>' if display == "block" else drawn
