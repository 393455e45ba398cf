"""Address of the repository in the notebooks and on their page.

    python notebooks/address.py

writes `SOURCE` of the first cells and the links to Colab, after a change of `REPOSITORY`.
"""

import json
import re
from pathlib import Path

REPOSITORY = ""
"""OWNER/NAME on GitHub. Empty: readers set SOURCE themselves, and there are no links."""
BRANCH = "main"
ROOT = Path(__file__).parents[1]
BADGE = "https://colab.research.google.com/assets/colab-badge.svg"
SOURCE = re.compile(r'(?m)^SOURCE = ".*"$')
NOTEBOOK_BADGE = re.compile(r"\n\n\[!\[Open in Colab\].*")
PAGE_LINK = re.compile(
    r"(\[`notebooks/(\w+\.ipynb)`\]\(notebooks/\w+\.ipynb\))( \[Colab\]\([^)]*\))?"
)


def colab(repository: str, name: str) -> str:
    """Address that opens a notebook in Colab."""
    return f"https://colab.research.google.com/github/{repository}/blob/{BRANCH}/notebooks/{name}"


def with_address(text: str, name: str, repository: str) -> str:
    """JSON text of a notebook with the address in its first cells."""
    notebook = json.loads(text)
    title, first = notebook["cells"][:2]
    source = f"git+https://github.com/{repository}" if repository else ""
    badge = f"\n\n[![Open in Colab]({BADGE})]({colab(repository, name)})" if repository else ""
    code, count = SOURCE.subn(f'SOURCE = "{source}"', "".join(first["source"]))
    if count != 1:
        raise ValueError(f"{name}: the first cell with code has {count} lines SOURCE, not one")
    first["source"] = code.splitlines(keepends=True)
    heading, *rest = NOTEBOOK_BADGE.sub("", "".join(title["source"])).split("\n\n")
    title["source"] = "\n\n".join([heading + badge, *rest]).splitlines(keepends=True)
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def page_with_links(text: str, repository: str) -> str:
    """The page of the notebooks with a link to Colab behind each."""

    def linked(found: re.Match[str]) -> str:
        return found[1] + (f" [Colab]({colab(repository, found[2])})" if repository else "")

    return PAGE_LINK.sub(linked, text)


def main() -> None:
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        path.write_text(with_address(path.read_text(), path.name, REPOSITORY))
    page = ROOT / "docs" / "notebook.md"
    page.write_text(page_with_links(page.read_text(), REPOSITORY))


if __name__ == "__main__":
    main()
