"""Faults at random moments of runs, which must end as if there had been none.

    python -m campaign.faults --processes 2 --kinds kill,stop --tries 10 --record faults.jsonl
    python -m campaign.faults --table faults.jsonl

A run of thirty steps on so many processes meets up to `--faults` faults of a kind at moments that
the seed draws: in its start, or in a phase of a step. If a fault ends it, it is started again, as a
scheduler does. It survives if its metrics, prompts, completions and last checkpoint are then bit
for bit those of a run without faults, and if each process that ended printed the one right line.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax

from campaign.faults.attempt import Host
from campaign.faults.disturbed import DisturbedRun, Try, Undisturbed, make_undisturbed
from campaign.faults.kinds import KINDS, Kind
from campaign.faults.machines import Link, Unavailable, check_disk, check_link
from campaign.faults.settings import LAYOUTS, write_inputs
from campaign.faults.table import table

EMPTY_RUNS = 5
"""Runs without a fault, one after the other, after which the command fails."""
CHECKS = {"disk": check_disk, "link": check_link}


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.link and options.processes != 2:
        parser.error(f"--link connects two processes, not {options.processes}: give --processes 2")
    try:
        if options.table is not None:
            print(table(_records(options.table)))
            return 0
        if options.link:
            check_link()
    except (OSError, Unavailable) as error:
        parser.error(str(error))
    jax.config.update("jax_platforms", "cpu")
    # Processes, disks and links of a run go with the command, however it is ended.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGTERM, before)
        folder = options.keep
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jrl-faults-")))
        return _campaign(options, folder.absolute(), stack)


def _campaign(options: argparse.Namespace, folder: Path, stack: ExitStack) -> int:
    processes, link = options.processes, None
    hosts = [Host()] * processes
    kinds = [kind for kind in options.kinds if _applies(kind, processes, options.link)]
    if not kinds:
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    if options.link:
        link = Link(folder)
        hosts = list(stack.enter_context(link.connected()))
    cache = Path(os.environ.get("JAX_COMPILATION_CACHE_DIR") or _default_cache())
    inputs = write_inputs(folder / "inputs")
    undisturbed: Undisturbed | None = None
    failed = 0
    for kind in kinds:
        done = _done(options, kind)
        run = max((each["run"] for each in done), default=-1) + 1
        number, empty = len(done), 0
        while number < options.tries:
            if undisturbed is None:
                where = folder / f"undisturbed-{os.getpid()}"
                undisturbed = make_undisturbed(hosts, inputs, where, cache)
            blank = Try(kind.name, processes, options.link, options.seed, run, "", 0)
            place = folder / f"{kind.name}-{os.getpid()}-{run}"
            begun, spent = time.monotonic(), _processor_seconds()
            disturbed = DisturbedRun(kind, hosts, link, inputs, undisturbed, place, cache)
            wanted = min(options.faults, kind.most, options.tries - number)
            tries = disturbed.meet(blank, wanted)
            _write(options.record, tries, folder)
            _print(kind, run, tries, time.monotonic() - begun, _processor_seconds() - spent)
            number, run = number + len(tries), run + 1
            # A run that is faster than the undisturbed one may end before its moments.
            empty = 0 if tries else empty + 1
            if empty == EMPTY_RUNS:
                raise RuntimeError(f"{kind.name}: no moment of {empty} runs was met")
            failed += sum(not each.survived for each in tries)
            if all(each.survived for each in tries):
                shutil.rmtree(place)
            else:
                print(f"  kept: {place}", flush=True)
    return int(failed > 0)


def _applies(kind: Kind, processes: int, link: bool) -> bool:
    """True if a run can meet the kind; says why where it cannot."""
    try:
        if processes not in kind.processes:
            raise Unavailable(f"is for {' or '.join(map(str, kind.processes))} processes")
        if kind.needs and (kind.needs == "link") != link:
            raise Unavailable("needs --link" if kind.needs == "link" else "is without --link")
        if kind.needs:
            CHECKS[kind.needs]()
    except Unavailable as reason:
        print(f"{kind.name}: skipped: {reason}")
        return False
    return True


def _done(options: argparse.Namespace, kind: Kind) -> list[dict[str, Any]]:
    """Tries of the record that this command would repeat."""
    same = {"kind": kind.name, "processes": options.processes}
    same |= {"link": options.link, "seed": options.seed}
    if options.record is None or not options.record.exists():
        return []
    return [each for each in _records(options.record) if same.items() <= each.items()]


def _records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _write(record: Path | None, tries: list[Try], folder: Path) -> None:
    """Appends tries to the record, with the paths that they name relative to the folder."""
    if record is not None:
        lines = [json.dumps(each.record()).replace(f"{folder}/", "") for each in tries]
        with record.open("a") as file:
            file.writelines(f"{line}\n" for line in lines)


def _print(kind: Kind, run: int, tries: list[Try], seconds: float, spent: float) -> None:
    survived = Counter(each.survived for each in tries)[True]
    print(
        f"{kind.name}, run {run}: {survived} of {len(tries)} survived in {seconds:.0f} s "
        f"({spent:.0f} s of the processor)",
        flush=True,
    )
    for each in tries:
        if not each.survived:
            print(f"  {each.moment}: {each.reason}", flush=True)


def _processor_seconds() -> float:
    times = os.times()
    return times.children_user + times.children_system


def _default_cache() -> str:
    return str(Path(tempfile.gettempdir()) / f"jrl-campaign-compilations-{jax.__version__}")


def _kinds(text: str) -> list[Kind]:
    if text == "all":
        return list(KINDS.values())
    unknown = [name for name in text.split(",") if name not in KINDS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no kind {', '.join(unknown)}: {', '.join(KINDS)}")
    return [KINDS[name] for name in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m campaign.faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--processes", type=int, choices=LAYOUTS, default=1, help="of each run")
    parser.add_argument(
        "--link", action="store_true", help="two processes in two network namespaces (root)"
    )
    parser.add_argument(
        "--kinds", type=_kinds, default="all", help=f"all, or some of {','.join(KINDS)}"
    )
    parser.add_argument("--tries", type=int, default=5, help="faults of each kind")
    parser.add_argument("--faults", type=int, default=5, help="most faults of one run")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    parser.add_argument(
        "--record", type=Path, help="file to append tries to; the command goes on where it ends"
    )
    parser.add_argument("--keep", type=Path, help="folder for runs; those that failed stay there")
    parser.add_argument("--table", type=Path, help="prints the table of a record")
    return parser


if __name__ == "__main__":
    sys.exit(main())
