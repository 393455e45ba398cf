"""Names of run folders that the user did not name: runs/RECIPE-TASK-NUMBER."""

import re
from pathlib import Path

RUNS_PATH = Path("runs")
"""Default folder of runs, below the working directory."""


def next_run_path(recipe: str, task: str) -> Path:
    """Folder of the next run of a recipe on a task, numbered one above the highest that exists."""
    task_kind, _, task_file = task.partition(":")
    words = [recipe, Path(task_kind).stem, *([Path(task_file).stem] if task_file else [])]
    name = re.sub(r"[^a-z0-9]+", "-", "-".join(words).lower())
    matches = [re.fullmatch(rf"{name}-(\d+)", path.name) for path in RUNS_PATH.glob(f"{name}-*")]
    run_id = 1 + max((int(match[1]) for match in matches if match), default=0)
    return RUNS_PATH / f"{name}-{run_id}"
