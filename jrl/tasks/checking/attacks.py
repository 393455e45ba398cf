"""Adversarial completions that no verifier may reward, made from a task's prompts and reference
answers."""

from collections.abc import Callable, Sequence

from jrl.tasks.answers.numbers import NUMBER, read_statement
from jrl.tasks.checking.table import Case
from jrl.tasks.task import Example

MAX_OTHERS = 5
Attack = Callable[[str, str, Sequence[str]], str]
"""Makes a completion from a prompt's text, its reference answer and those of other prompts."""

ATTACKS: dict[str, Attack] = {
    "nothing": lambda prompt, reference, others: "",
    "a blank": lambda prompt, reference, others: " ",
    "no answer": lambda prompt, reference, others: "I do not know.",
    "the prompt again": lambda prompt, reference, others: prompt,
    "another answer": lambda prompt, reference, others: others[0],
    "two answers": lambda prompt, reference, others: f"{reference} or {others[0]}",
    "two answers, in reverse order": lambda prompt, reference, others: (
        f"{others[0]} or {reference}"
    ),
    "a list of guesses": lambda prompt, reference, others: ", ".join([*others, reference]),
    "two boxes": lambda prompt, reference, others: (
        rf"\boxed{{{reference}}} or \boxed{{{others[0]}}}"
    ),
    "reasoning that is not ended": lambda prompt, reference, others: f"<think>It is {reference}.",
    "another answer after reasoning": lambda prompt, reference, others: (
        f"<think>{reference}</think>{others[0]}"
    ),
    "digits by the thousand": lambda prompt, reference, others: "9" * 5_000,
    "all small numbers": lambda prompt, reference, others: " ".join(map(str, range(1_000))),
    "garbage": lambda prompt, reference, others: "?!((([[{{",
}
NUMBER_ATTACKS: dict[str, Attack] = {
    "still to be worked out": lambda prompt, reference, others: f"{reference} + 0",
    "a bound": lambda prompt, reference, others: f"more than {reference}",
    "a denial": lambda prompt, reference, others: f"not {reference}",
    "an interval": lambda prompt, reference, others: f"[{reference}, {reference}9]",
}
"""Attacks for reference answers that are numbers."""


def attacks_on(examples: Sequence[Example]) -> list[tuple[Example, Case]]:
    """Attacks on each of the examples whose reference answer differs from those of some others."""
    attacked = []
    for example in examples:
        reference = example.answer
        answers = dict.fromkeys(
            each.answer for each in examples if each.answer not in ("", reference)
        )
        others = list(answers)[:MAX_OTHERS]
        if not reference or not others:
            continue
        number = read_statement(reference, marked=True)
        is_number = number.kind == NUMBER and number.is_only_number and number.digits == reference
        for kind, attack in {**ATTACKS, **(NUMBER_ATTACKS if is_number else {})}.items():
            case = Case(kind, reference, attack(example.prompt, reference, others), "wrong")
            attacked.append((example, case))
        attacked.append((example, Case("the reference answer", reference, reference, "right")))
    return attacked
