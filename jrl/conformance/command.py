"""The command: a stranger's function, or the adapters of a library, beside cases and rules."""

import argparse
import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from .cases import document, quantities
from .check import Finding, Report, check
from .frameworks import Function
from .rules import RULES

LIBRARIES = ("jrl", "openrlhf", "trl", "verl")
"""Those with adapters in this package."""
FAILS = ("differs", "not expressed")


class Subject(NamedTuple):
    """A function to check: the library or file, the name of the function, the quantity."""

    library: str
    name: str
    quantity: str
    function: Function


def parser() -> argparse.ArgumentParser:
    built = argparse.ArgumentParser(
        prog="jrl conform",
        description="Checks losses and advantages of any library: published cases with values and "
        "gradients, and rules of arrays. Exit status 1: a function differs.",
    )
    built.add_argument(
        "subjects",
        nargs="+",
        metavar="SUBJECT",
        help=f"FILE.py:FUNCTION with --as, or libraries: {', '.join(LIBRARIES)}",
    )
    built.add_argument(
        "--as", dest="quantity", metavar="QUANTITY", help="what it computes, such as dapo_loss"
    )
    built.add_argument(
        "--framework", choices=("numpy", "jax", "torch"), help="default: what its file imports"
    )
    built.add_argument("--json", type=Path, metavar="FILE", help="write all findings")
    built.add_argument("--markdown", type=Path, metavar="FILE", help="write the table")
    return built


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    asked = parser().parse_args(arguments)
    try:
        subjects = [one for name in asked.subjects for one in _subjects(name, asked.quantity)]
    except (ValueError, ModuleNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    done = []
    for subject in subjects:
        report = check(subject.function, subject.quantity, asked.framework)
        done.append((subject, report))
        full = len(subjects) == 1 or report.verdict in FAILS
        print(describe(subject, report) if full else row(subject, report), flush=True)
    if asked.json:
        values = [{**_head(one), **report.json()} for one, report in done]
        asked.json.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    if asked.markdown:
        asked.markdown.write_text(table(done), encoding="utf-8")
    return int(any(report.verdict in FAILS for _, report in done))


def _subjects(name: str, quantity: str | None) -> Iterator[Subject]:
    if name in LIBRARIES:
        yield from (Subject(name, label, of, function) for of, label, function in _adapters(name))
        return
    file, colon, function = name.rpartition(":")
    if not colon:
        raise ValueError(f"{name!r} must be FILE.py:FUNCTION or one of {', '.join(LIBRARIES)}")
    if quantity is None:
        raise ValueError(f"{name} needs --as QUANTITY: one of {', '.join(quantities())}")
    document(quantity)
    module = _module(Path(file))
    if not callable(getattr(module, function, None)):
        raise ValueError(f"{file} has no function {function!r}")
    yield Subject(file, function, quantity, getattr(module, function))


def _adapters(library: str) -> Iterator[tuple[str, str, Function]]:
    """The functions of one library, which alone need be installed."""
    if library == "jrl":
        from .adapters import ours as adapters
    elif library == "openrlhf":
        from .adapters import of_openrlhf as adapters
    elif library == "trl":
        from .adapters import of_trl as adapters
    else:
        from .adapters import of_verl as adapters
    return adapters.functions()


def _module(path: Path) -> object:
    if not path.is_file():
        raise ValueError(f"{path} is no file: give FILE.py:FUNCTION")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is no file of Python: its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    return module


def describe(subject: Subject, report: Report) -> str:
    """All that is not as it should be, the smallest failing input and the right value."""
    content = document(subject.quantity)
    lines = [row(subject, report), f"  {content['formula']}", f"  source: {content['source']}"]
    for title, findings in (("cases", report.cases), ("rules", report.rules)):
        held = sum(finding.state in ("holds", "rounded") for finding in findings)
        lines.append(f"  {title}: {held} of {len(findings)} hold")
        for x in findings:
            if x.state not in ("holds", "rounded"):
                says = f", {RULES[x.name].says}" if title == "rules" else ""
                lines.append(_line(x, says))
    smallest = report.smallest
    if smallest and smallest.example:
        example = smallest.example
        lines.append(f"  smallest failing input: {smallest.name}")
        for name, value in {**example["inputs"], **example["settings"]}.items():
            lines.append(f"    {name} = {value}")
        if example["result"]:
            lines.append(f"    {example['result']} = {example['got']}")
            lines.append(f"    right: {example['right']}")
    return "\n".join(lines)


def _line(finding: Finding, says: str) -> str:
    off = f" (off by {finding.difference:.1e})" if finding.state == "misses" else ""
    return f"    {finding.state:<14} {finding.name}{says}: {finding.reason}{off}"


def row(subject: Subject, report: Report) -> str:
    """One line: quantity, function, verdict, largest difference, rules that do not hold."""
    notes = _notes(report)
    return (
        f"{subject.library:<10} {subject.quantity:<32}{subject.name:<32}{report.verdict:<20}"
        f"{report.difference:>9.1e}  {notes}".rstrip()
    )


def _notes(report: Report) -> str:
    conventions = sorted({f.reason for f in report.cases if f.state == "convention"})
    broken = [f.name for f in report.rules if f.fails]
    parts = [*conventions, *(["breaks: " + ", ".join(broken)] if broken else [])]
    return "; ".join(parts)


def table(done: Sequence[tuple[Subject, Report]]) -> str:
    """The table of libraries in Markdown."""
    lines = ["| library | quantity | function | verdict | largest difference | cases | notes |"]
    lines.append("|---|---|---|---|---|---|---|")
    for subject, report in done:
        head = _head(subject)
        asked = [f for f in report.cases if f.state != "not expressed"]
        right = sum(not f.fails for f in asked)
        lines.append(
            f"| {head['library']} {head['version']} | `{subject.quantity}` | {subject.name} | "
            f"{report.verdict} | {report.difference:.1e} | {right} of {len(asked)} | "
            f"{_notes(report)} |"
        )
    return "\n".join(lines) + "\n"


def _head(subject: Subject) -> dict[str, str]:
    distribution = {"jrl": "jrl-reasoning"}.get(subject.library, subject.library)
    try:
        number = version(distribution) if subject.library in LIBRARIES else ""
    except PackageNotFoundError:
        number = "from source"
    return {"library": subject.library, "version": number, "function": subject.name}
