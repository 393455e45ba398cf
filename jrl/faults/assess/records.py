"""Records of a benchmark, one JSON line each, from which an interrupted run is resumed."""

import json
from pathlib import Path
from typing import Any


def read_records(path: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Records that an interrupted run has completed; a new file begins with `settings`.

    Raises:
      ValueError: where the file begins with other settings.
    """
    content = path.read_text() if path.exists() else ""
    first, *rows = content.splitlines() or [json.dumps(settings)]
    if json.loads(first) != settings:
        raise ValueError(
            f"{path} belongs to other settings or thresholds: give another --out, or delete it."
        )
    complete = rows if content.endswith("\n") else rows[:-1]
    path.write_text("\n".join([first, *complete]) + "\n")  # without what a kill has torn
    return [json.loads(row) for row in complete]
