"""Compares our objectives with the code of verl, TRL and OpenRLHF: values and gradients.

    python -m benchmarks.agreement --peers verl trl openrlhf

Every function of theirs and ours is given the same drawn batches, in float32 and in float64. It
ends with an error if a difference is beyond its tolerance. How to install them is in the README of
the benchmarks.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import rich.box
import rich.console
import rich.table

if TYPE_CHECKING:
    from benchmarks.agreement.batch import Comparison

PEERS = ("verl", "trl", "openrlhf")
FLOAT32_TOLERANCE = 1e-4


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Compares the objectives with the code of other libraries"
    )
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=PEERS)
    parser.add_argument("--batches", type=int, default=5, help="random batches per function")
    parser.add_argument("--json", type=Path, help="file for the table")
    arguments = parser.parse_args()
    if arguments.batches < 1:
        parser.error(f"--batches {arguments.batches}: must be at least 1.")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_x64", True)

    rows = []
    for peer in arguments.peers:
        of_peer = [compared(case, arguments.batches) for case in comparisons_with(peer)]
        show(of_peer, f"{peer} {version(peer)}")
        rows += [{"peer": peer, "version": version(peer), **row} for row in of_peer]
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    apart = [f"{row['peer']} {row['theirs']}" for row in rows if not row["agrees"]]
    print(f"{len(rows) - len(apart)} of {len(rows)} agree")
    if apart:
        sys.exit("outside the tolerance: " + "; ".join(apart))


def comparisons_with(peer: str) -> "Iterator[Comparison]":
    """All of one library, which alone need be installed."""
    if peer == "verl":
        from benchmarks.agreement import verl_cases as cases
    elif peer == "trl":
        from benchmarks.agreement import trl_cases as cases
    else:
        from benchmarks.agreement import openrlhf_cases as cases
    return cases.comparisons()


def compared(case: "Comparison", batches: int) -> dict[str, Any]:
    """One line of the table; a gradient of None is that of a function that has none."""
    value32, gradient32 = case.differences(np.float32, batches)
    value64, gradient64 = case.differences(np.float64, batches)
    agrees = max(value32, gradient32 or 0) <= FLOAT32_TOLERANCE
    return {
        "function": case.function,
        "theirs": case.theirs_name,
        "float32": value32,
        "float32 gradient": gradient32,
        "float64": value64,
        "float64 gradient": gradient64,
        "tolerance": case.tolerance,
        "agrees": agrees and max(value64, gradient64 or 0) <= case.tolerance,
    }


def show(rows: list[dict[str, Any]], title: str) -> None:
    table = rich.table.Table(title=title, box=rich.box.SIMPLE)
    for name in rows[0]:
        text = name in ("function", "theirs")
        table.add_column(name, justify="left" if text else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(_cell, row.values()), style=None if row["agrees"] else "bold red")
    rich.console.Console(width=None if sys.stdout.isatty() else 170).print(table)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return "-" if value is None else value if isinstance(value, str) else f"{value:.1e}"


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"{error.name} is not installed: benchmarks/README.md says how to install the peers"
        ) from None
