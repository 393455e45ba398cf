"""Table of a record of tries, as Markdown."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from campaign.faults.kinds import KINDS

HEAD = ["| fault | processes | tries | survived | seconds lost (median, most) |"]
HEAD += ["|---|---|---|---|---|"]


def table(records: Sequence[dict[str, Any]]) -> str:
    """Tries of each kind and number of processes: how many, survived, and the time that they cost.

    The seconds are those from the fault to the end of the step in progress, without an undisturbed
    step, of tries that met no other fault before.
    """
    rows = list(HEAD)
    for name, kind in KINDS.items():
        own = [record for record in records if record["kind"] == name]
        places = sorted({(record["processes"], record["link"]) for record in own})
        for processes, link in places:
            tries = [each for each in own if (each["processes"], each["link"]) == (processes, link)]
            survived = sum(each["survived"] for each in tries)
            lost = [x["seconds_lost"] for x in tries if x["seconds_lost"] is not None]
            seconds = f"{median(lost):.1f}, {max(lost):.1f}" if lost else ""
            where = f"{processes}, two network namespaces" if link else str(processes)
            rows.append(f"| {kind.title} | {where} | {len(tries)} | {survived} | {seconds} |")
    return "\n".join(rows)
