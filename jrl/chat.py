"""``python -m jrl.chat RUN``: conversation with a run's policy or a published checkpoint in the
terminal.

Input may be a pipe: ``echo "How many pens?" | jrl chat MODEL``. The run may still be in progress;
nothing is written into its folder.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import tyro

from jrl.checks import check_seed
from jrl.command_line import exit_status, parse_flags, start_jax
from jrl.program import program
from jrl.serve import PolicyOptions, build_service, open_policy

if TYPE_CHECKING:
    from jrl.tasks.tools.tool import Tool

WINDOW = 4
"""Tokens between two outputs of an answer."""
TOOLS = ("calc", "python")


@dataclass(frozen=True)
class ChatOptions(PolicyOptions):
    """Arguments of ``jrl chat``."""

    system: str = ""
    """System message; empty is none."""
    tools: tuple[str, ...] = ()
    """Tools that the policy may call: calc (arithmetic), python (in a sandbox)."""
    temperature: float | None = None
    """Sampling temperature, 0 is greedy; None is the checkpoint's, or 1."""
    top_p: float | None = None
    """Probability mass of the tokens that are sampled from; None is the checkpoint's, or 1."""
    top_k: int | None = None
    """Number of tokens that are sampled from; None is the checkpoint's, or all."""
    seed: int | None = None
    """Random seed of sampling; None draws one for each answer."""
    show_reasoning: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print reasoning in full; without it the number of its words."""

    def check(self) -> None:
        super().check()
        if self.seed is not None:
            check_seed(self.seed)
        for name in self.tools:
            if name not in TOOLS:
                raise ValueError(f"tools={name!r} must be one of {', '.join(TOOLS)}.")

    @property
    def arguments(self) -> dict[str, float | int]:
        """Arguments of each request."""
        names = ("temperature", "top_p", "top_k", "seed")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    return exit_status(lambda: _main(sys.argv[1:] if arguments is None else list(arguments)))


def _main(arguments: list[str]) -> int:
    options = parse_flags(
        ChatOptions, program("chat"), arguments, "Converses with a policy in the terminal."
    )
    options.check()
    _chat(options)
    return 0


def _chat(options: ChatOptions) -> None:
    start_jax(options.devices)
    from jrl.serving.chat.conversation import Conversation
    from jrl.serving.chat.terminal import Terminal
    from jrl.serving.metrics import NoMetrics

    policy = open_policy(options)
    if policy.format.template is None:
        raise ValueError(
            f"{options.run} has no chat template to write messages with: give --chat-template FILE."
        )
    service, served = build_service(
        options,
        policy,
        NoMetrics(),
        seed=options.seed or 0,
        slots=policy.fewest_slots,
        queue=0,
        window=WINDOW,
    )
    conversation = Conversation(
        service, served, _tools(options.tools), options.arguments, options.system
    )
    service.start(warm_up=False)
    step = f" (step {service.version})" if policy.versions.checkpoint is None else ""
    print(f"{served.name}{step}: the first answer waits for compilation", file=sys.stderr)
    try:
        Terminal(conversation, sys.stdin, sys.stdout, shows_reasoning=options.show_reasoning).run()
    finally:
        service.close()
        service.join()


def _tools(names: Sequence[str]) -> "list[Tool]":
    """The tools of these names."""
    from jrl.tasks.tools.calculator import CALCULATOR
    from jrl.tasks.tools.python import python_tool

    makers = {"calc": lambda: CALCULATOR, "python": python_tool}
    return [makers[name]() for name in dict.fromkeys(names)]


if __name__ == "__main__":
    sys.exit(main())
