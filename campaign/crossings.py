"""Crossings of settings beside one device with everything off.

    python -m campaign.crossings --seed 1 --cases 200
    python -m campaign.crossings --replay failures.jsonl
    python -m campaign.crossings --replay '{"layout": {"cp": 2, "pp": 2}}'

Each is drawn by the seed: what the network is, a layout on up to eight fake devices, how it is
computed, micro-batches, packing, recipe, optimizer and where completions are sampled. A run of
these settings takes an update, scores and decodes, and so does one on one device with everything
off; loss, gradient, weights, metrics, log-probabilities, values and tokens are compared. A failure
is shrunk to the smallest crossing that fails in the same way and written down, as a line of JSON
that `--replay` runs again.

Settings that cannot be had are to be refused in one line before anything is compiled. Any other
end (another exception, a refusal that comes later, an abort, a hang) is a failure.
"""

import argparse
import json
import re
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from campaign.drawing import Crossing, drawn
from campaign.shrinking import shrunk
from campaign.worker import Worker

FAILURES = ("wrong", "raised", "aborted", "hung")


def main(arguments: list[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    if given.replay is not None:
        crossings = _written(given.replay)
    else:
        numbers = range(given.first, given.first + given.cases)
        crossings = [(f"seed {given.seed} case {n}", drawn(given.seed, n)) for n in numbers]
    worker = Worker(given.limit)
    outcomes = list[dict[str, Any]]()
    try:
        for name, crossing in crossings:
            outcome = worker.run(crossing)
            outcomes.append(outcome)
            print(f"{name}: {said(outcome)}", flush=True)
            if outcome["kind"] not in FAILURES:
                continue
            print(f"  {json.dumps(crossing)}", flush=True)
            found = {"crossing": crossing, "outcome": outcome}
            if given.shrink:
                smallest, tried = shrunk(crossing, partial(_fails_alike, worker, outcome))
                found |= {"smallest": smallest}
                print(f"  smallest of {tried}: {json.dumps(smallest)}", flush=True)
            if given.failures is not None:
                with given.failures.open("a") as file:
                    file.write(json.dumps({"name": name, **found}) + "\n")
    finally:
        worker.close()
    print(table(outcomes))
    return int(any(outcome["kind"] in FAILURES for outcome in outcomes))


def _fails_alike(worker: Worker, outcome: dict[str, Any], crossing: Crossing) -> bool:
    return alike(worker.run(crossing), outcome)


def said(outcome: dict[str, Any]) -> str:
    """An outcome in a line."""
    far = ", ".join(f"{part} {far:.1e}" for part, far in outcome.get("distances", {}).items())
    words = [outcome["kind"], outcome["reason"], f"({far})" if far else ""]
    if "seconds" in outcome:
        words.append(f"[{outcome['seconds']:.1f} s]")
    return " ".join(filter(None, words))


def alike(outcome: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two failures are the same one: of a kind and, raised, of one exception in one
    place."""
    if outcome["kind"] != other["kind"]:
        return False
    if other["kind"] != "raised":
        return True
    return outcome["reason"].split(": ")[0] == other["reason"].split(": ")[0]


def table(outcomes: list[dict[str, Any]]) -> str:
    """How many were right, refused and why, and failed."""
    kinds = Counter(outcome["kind"] for outcome in outcomes)
    failed = sum(kinds[kind] for kind in FAILURES)
    seconds = sum(outcome.get("seconds", 0.0) for outcome in outcomes)
    lines = [
        "",
        f"{kinds['right']} right, {kinds['refused']} refused, {failed} failed, "
        f"in {seconds / 60:.1f} minutes of the processor",
    ]
    refused = Counter(reason_of(x["reason"]) for x in outcomes if x["kind"] == "refused")
    lines += [f"  {number:3d} refused: {reason}" for reason, number in refused.most_common()]
    lines += [f"  {x['kind']}: {x['reason']}" for x in outcomes if x["kind"] in FAILURES]
    return "\n".join(lines)


def reason_of(refusal: str) -> str:
    """A refusal without numbers and advice, so that those of a kind are counted together."""
    first = re.split(
        r"[:;,] (?=[a-z])", re.sub(r"layout '?(\w+ )+/( (ep|etp|edp)\d+)+'?", "layout L", refusal)
    )
    return re.sub(r"\b\d+(\.\d+)?\b|\([\d, ]+\)", "N", first[0])[:120]


def _written(text: str) -> list[tuple[str, Crossing]]:
    """Crossings of a file that this command wrote, the smallest of each, or of a line of JSON."""
    lines = [text] if text.lstrip().startswith("{") else Path(text).read_text().splitlines()
    found = [json.loads(line) for line in lines if line.strip()]
    crossings = [one.get("smallest", one.get("crossing", one)) for one in found]
    return [(one.get("name", "replayed"), c) for one, c in zip(found, crossings, strict=True)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m campaign.crossings",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=1, help="random seed")
    parser.add_argument("--cases", type=int, default=20, help="number of random crossings")
    parser.add_argument("--first", type=int, default=0, help="index of the first crossing")
    parser.add_argument("--replay", help="a file of failures, or a crossing as JSON")
    parser.add_argument("--failures", type=Path, help="file to append failures to")
    parser.add_argument(
        "--limit", type=float, default=300.0, help="timeout of a crossing, in seconds"
    )
    parser.add_argument(
        "--no-shrink", dest="shrink", action="store_false", help="do not shrink failures"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
