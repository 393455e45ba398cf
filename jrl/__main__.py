"""``jrl COMMAND``, also ``python -m jrl COMMAND``: one name for the commands of the library.

Each is its module, imported when it is called: ``jrl train`` is ``python -m jrl.train``.
"""

import io
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from difflib import get_close_matches
from importlib import import_module
from typing import NamedTuple

from jrl.completion import SHELLS, completion_script


class Command(NamedTuple):
    """A module with a function `main`, words that come first, and a line for the help."""

    module: str
    purpose: str
    words: tuple[str, ...] = ()


COMMANDS = {
    "train": Command("jrl.train", "train a policy by reinforcement learning"),
    "sft": Command("jrl.train", "fine-tune a policy on conversations (train sft)", ("sft",)),
    "evaluate": Command("jrl.evaluate", "evaluate a run or a checkpoint on held-out prompts"),
    "serve": Command("jrl.serve", "serve a run or a checkpoint by OpenAI's protocol"),
    "chat": Command("jrl.chat", "converse with a run or a checkpoint in the terminal"),
    "export": Command("jrl.export", "write the policy of a run as a checkpoint of transformers"),
    "runs": Command("jrl.runs.__main__", "list, verify and prune the checkpoints of a run"),
    "report": Command("jrl.report.__main__", "write runs as one HTML page"),
    "tasks": Command("jrl.tasks.__main__", "test a verifier for reward hacking"),
    "plan": Command("moe.planner.__main__", "find the fastest layout of a model on a cluster"),
    "launch": Command("jrl.launch.__main__", "train on many machines"),
    "faults": Command("jrl.faults.__main__", "find the machine of a run that is failing"),
    "conform": Command("jrl.conform", "check losses of any library on published cases"),
}
COMPLETION = "completion"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    name, *words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help"):
        print(_help())
        return 0
    if name == COMPLETION:
        return _print_completion(words)
    if name not in COMMANDS:
        near = get_close_matches(name, [*COMMANDS, COMPLETION], 1)
        fix = f"did you mean {near[0]}?" if near else "see jrl --help."
        print(f"error: command {name!r} is unknown: {fix}", file=sys.stderr)
        return 2
    command = COMMANDS[name]
    return import_module(command.module).main([*command.words, *words])


def _help() -> str:
    lines = [f"  {name:<10} {command.purpose}" for name, command in COMMANDS.items()]
    return "\n".join(
        (
            "usage: jrl COMMAND [OPTIONS]\n",
            *lines,
            f"  {COMPLETION:<10} print the completion script of a shell: {', '.join(SHELLS)}",
            "\nEach has its own options: jrl train --help",
        )
    )


def _print_completion(words: list[str]) -> int:
    if len(words) != 1 or words[0] not in SHELLS:
        arguments_text = " ".join(words)
        print(
            f"error: completion {arguments_text!r} must be one shell of {', '.join(SHELLS)}: "
            'eval "$(jrl completion bash)"',
            file=sys.stderr,
        )
        return 2
    purposes = {name: command.purpose for name, command in COMMANDS.items()}
    helps = {name: _help_of(name) for name in COMMANDS}
    print(completion_script(words[0], purposes, helps))
    return 0


def _help_of(name: str) -> str:
    text = io.StringIO()
    with redirect_stdout(text), suppress(SystemExit):  # of the parser, after its help
        main([name, "--help"])
    return text.getvalue()


if __name__ == "__main__":
    sys.exit(main())
