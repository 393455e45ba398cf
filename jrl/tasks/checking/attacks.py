"""Adversarial completions that no verifier may reward, made from a task's prompts and reference
answers."""

from collections.abc import Callable, Sequence

from jrl.tasks.answers.numbers import NUMBER, read_statement
from jrl.tasks.checking.table import Case
from jrl.tasks.task import Example

MOST_OTHERS = 5
Attack = Callable[[str, str, Sequence[str]], str]
"""Makes a completion from a prompt's text, its reference answer and those of other prompts."""

ATTACKS: dict[str, Attack] = {
    "nothing": lambda prompt, gold, others: "",
    "a blank": lambda prompt, gold, others: " ",
    "no answer": lambda prompt, gold, others: "I do not know.",
    "the prompt again": lambda prompt, gold, others: prompt,
    "another answer": lambda prompt, gold, others: others[0],
    "two answers": lambda prompt, gold, others: f"{gold} or {others[0]}",
    "two answers, turned round": lambda prompt, gold, others: f"{others[0]} or {gold}",
    "a list of guesses": lambda prompt, gold, others: ", ".join([*others, gold]),
    "two boxes": lambda prompt, gold, others: rf"\boxed{{{gold}}} or \boxed{{{others[0]}}}",
    "reasoning that is not ended": lambda prompt, gold, others: f"<think>It is {gold}.",
    "another answer after reasoning": lambda prompt, gold, others: (
        f"<think>{gold}</think>{others[0]}"
    ),
    "digits by the thousand": lambda prompt, gold, others: "9" * 5_000,
    "all small numbers": lambda prompt, gold, others: " ".join(map(str, range(1_000))),
    "garbage": lambda prompt, gold, others: "?!((([[{{",
}
OF_NUMBERS: dict[str, Attack] = {
    "still to be worked out": lambda prompt, gold, others: f"{gold} + 0",
    "a bound": lambda prompt, gold, others: f"more than {gold}",
    "a denial": lambda prompt, gold, others: f"not {gold}",
    "an interval": lambda prompt, gold, others: f"[{gold}, {gold}9]",
}
"""Attacks for reference answers that are numbers."""


def attacks_on(examples: Sequence[Example]) -> list[tuple[Example, Case]]:
    """Attacks on each of the examples whose reference answer differs from those of some others."""
    found = []
    for example in examples:
        gold = example.answer
        answers = dict.fromkeys(each.answer for each in examples if each.answer not in ("", gold))
        others = list(answers)[:MOST_OTHERS]
        if not gold or not others:
            continue
        number = read_statement(gold, marked=True)
        is_number = number.kind == NUMBER and number.is_only_number and number.digits == gold
        for kind, attack in {**ATTACKS, **(OF_NUMBERS if is_number else {})}.items():
            case = Case(kind, gold, attack(example.prompt, gold, others), "wrong")
            found.append((example, case))
        found.append((example, Case("the gold answer", gold, gold, "right")))
    return found
