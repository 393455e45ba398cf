"""Writer of report.html: one template, its style and scripts, and the data in one file."""

import html
import json
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jrl.report.page.data import page_data
from jrl.runs.folder import RunFolder
from jrl.runs.records import replace

ASSETS = {
    "css": "page.css",
    "uplot_css": "uplot/uPlot.min.css",
    "uplot_js": "uplot/uPlot.iife.min.js",
    "js": "page.js",
}
"""Files that stand in the template, by its names for them."""


def write_page(folders: Sequence[RunFolder], path: Path | str) -> Path:
    """Write the page of one run, or of several side by side.

    Args:
      folders: the runs, which may still be written.
      path: the HTML file; its folder is made if missing. A reader sees the old or the new one.

    Returns:
      `path`.

    Raises:
      ValueError: for no run, one that is given twice or has no metrics, or a damaged line.
    """
    if not folders:
        raise ValueError("folders=[] holds no run: give at least one")
    data = page_data(folders)
    heading = " · ".join(run["name"] for run in data["runs"])
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace(path, render_page(data, heading).encode())
    return path


def render_page(data: dict[str, Any], title: str) -> str:
    """The page as text."""
    replacements = {name: read_asset(file) for name, file in ASSETS.items()}
    replacements |= {"title": html.escape(title), "data": escape_json(data)}
    # In one pass: what is put in is never looked at again.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: replacements[match[1]], read_asset("page.html"))


def escape_json(data: Any) -> str:
    """JSON that can stand in an HTML script element: nothing in it can end the element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


@cache
def read_asset(name: str) -> str:
    """A file that the page is made of."""
    return files("jrl.report.page").joinpath("assets", name).read_text(encoding="utf-8")
