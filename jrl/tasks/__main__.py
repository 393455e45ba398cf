"""``python -m jrl.tasks check TASK`` tries answers on a verifier that it should not reward."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import tyro

from jrl.command_line import exit_status, parse_flags
from jrl.program import program
from jrl.tasks.check import check, format_report
from jrl.tasks.sandbox.sandbox import allow_unsafe


@dataclass(frozen=True)
class CheckArguments:
    """Arguments of ``python -m jrl.tasks``."""

    command: tyro.conf.Positional[Literal["check"]]
    """check: try wrong and right answers, and report which are misjudged. The exit status is 1 if a
    wrong one gets the full score."""
    target: tyro.conf.Positional[str]
    """A task as for --task of jrl.train, a file of prompts, or a custom reward as
    path/to/file.py:name."""
    answers: Literal["final", "evaluated"] = "final"
    """Required form of answers, as in jrl.train."""
    seed: int = 0
    """Random seed of the prompts of a task that are attacked."""
    reward_seconds: float = 5.0
    """Timeout of one call of a custom reward, in seconds."""
    unsafe_tools: bool = False
    """Run code unconfined if there is no sandbox, as in jrl.train."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    return exit_status(lambda: _main(sys.argv[1:] if arguments is None else list(arguments)))


def _main(arguments: list[str]) -> int:
    request = parse_flags(
        CheckArguments,
        program("tasks"),
        arguments,
        "Tests a verifier or a reward for reward hacking, with answers that it should reject.",
    )
    if request.unsafe_tools:
        allow_unsafe()
    findings = check(
        request.target,
        seed=request.seed,
        answers=request.answers,
        seconds=request.reward_seconds,
    )
    print(format_report(request.target, findings))
    return int(any(finding.gamed for finding in findings))


if __name__ == "__main__":
    sys.exit(main())
