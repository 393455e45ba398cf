"""Table of answers with the verdict of a careful person, by which verifiers are checked."""

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

VERDICTS = ("right", "wrong", "unparsable")
UNEVALUATED = "unevaluated"


@dataclass(frozen=True)
class Case:
    """An answer and a reference answer.

    Attributes:
      kind: what it is an example of.
      reference: the reference answer.
      completion: the answer.
      verdict: one of `VERDICTS`.
      unevaluated: whether it is wrong as it is still to be worked out, and has the right value.
      because: why, where people could differ; else "".
    """

    kind: str
    reference: str
    completion: str
    verdict: str
    unevaluated: bool = False
    because: str = ""


@cache
def load_cases() -> tuple[Case, ...]:
    """All of the table, in its order."""
    table = tomllib.loads(
        files("jrl.tasks.checking").joinpath("cases.toml").read_text(encoding="utf-8")
    )
    return tuple(
        Case(
            group["kind"],
            group["gold"],
            completion,
            "wrong" if verdict == UNEVALUATED else verdict,
            verdict == UNEVALUATED,
            group.get("because", {}).get(completion, ""),
        )
        for group in table["cases"]
        for verdict in (*VERDICTS, UNEVALUATED)
        for completion in group.get(verdict, ())
    )
