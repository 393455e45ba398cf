"""What the site shows of files that are kept elsewhere, and how references are laid out."""

import re
from pathlib import Path

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
VECTORS = ROOT / "tests" / "vectors"
NOTEBOOKS = ROOT / "notebooks"


def on_files(files: Files, config) -> Files:
    for path in sorted(VECTORS.glob("*.json")):
        files.append(File.generated(config, f"vectors/{path.name}", abs_src_path=str(path)))
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_) -> str:
    if "<!-- list of vectors -->" not in markdown:
        return markdown
    listed = "\n".join(
        f"* [`{path.stem}`](vectors/{path.name})" for path in sorted(VECTORS.glob("*.json"))
    )
    columns = f'<div class="columns" markdown>\n\n{listed}\n\n</div>'
    return markdown.replace("<!-- list of vectors -->", columns)


def on_page_content(html: str, **_) -> str:
    """Each reference of a docstring ends with its address, and the next begins on its own line."""
    return re.sub(
        r'<details class="references".*?</details>',
        lambda found: found[0].replace("</a>\n", "</a><br>\n"),
        html,
        flags=re.DOTALL,
    )
