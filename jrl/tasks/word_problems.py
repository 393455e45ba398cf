"""Word problems in English with one step of arithmetic, for chat models: buying, sharing, losing,
ages, distances."""

from collections.abc import Callable, Sequence
from random import Random

from jrl.tasks.answers import extract
from jrl.tasks.answers.numbers import NOTHING, read_statement
from jrl.tasks.data.prompt_list import PromptList
from jrl.tasks.data.split import HeldOut, generator
from jrl.tasks.task import (
    CORRECT,
    UNPARSABLE,
    WRONG,
    Example,
    PromptSourceTask,
    Verdict,
    pair_completions,
)

NAME = "word-problems"
SYSTEM_PROMPT = "Answer with one equation."
SHOTS = (
    ("Ella has 7 pens and buys 4 more. How many pens now?", "7 + 4 = 11"),
    ("Tom had 15 nuts and ate 6. How many are left?", "15 - 6 = 9"),
    ("A cup costs 4 dollars. How many dollars do 5 cups cost?", "5 * 4 = 20"),
    ("24 nuts are put into 3 bags. How many are in each?", "24 / 3 = 8"),
)
"""Solved problems that precede each problem in the prompt of a chat model (few-shot prompt)."""
SHOT_MESSAGES = tuple(
    pair for problem, answer in SHOTS for pair in (("user", problem), ("assistant", answer))
)
UNEVALUATED = Verdict(0.0, "unevaluated")
NUM_PROBLEMS = 4096

NAMES = (
    *("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Iris", "Jack"),
    *("Karen", "Liam", "Maria", "Noah", "Olivia", "Peter", "Rosa", "Sam", "Tina", "Victor"),
)
THINGS = (
    *("apples", "books", "cards", "coins", "cookies", "eggs", "flowers", "marbles", "oranges"),
    *("pencils", "shells", "stamps", "stickers", "tickets", "toys"),
)

Operands = Callable[[Random], tuple[int, int, int]]
"""Draws the two numbers of a problem and its answer."""


def _sum(random: Random) -> tuple[int, int, int]:
    first, second = random.randint(5, 30), random.randint(2, 10)
    return first, second, first + second


def _difference(random: Random) -> tuple[int, int, int]:
    second, answer = random.randint(2, 10), random.randint(3, 20)
    return second + answer, second, answer


def _product(random: Random) -> tuple[int, int, int]:
    first, second = random.randint(2, 10), random.randint(2, 5)
    return first, second, first * second


def _quotient(random: Random) -> tuple[int, int, int]:
    second, answer = random.randint(2, 5), random.randint(2, 10)
    return second * answer, second, answer


KINDS: tuple[tuple[Operands, *tuple[str, ...]], ...] = (
    (
        _product,
        "{name} buys {first} {things} for {second} dollars each. How many dollars does {name} pay?",
        "A shop sells {things} at {second} dollars each. How many dollars do {first} of them cost?",
    ),
    (
        _quotient,
        "{name} shares {first} {things} equally among {second} friends. "
        "How many {things} does each friend get?",
        "{first} {things} are packed into {second} boxes, the same number into each. "
        "How many {things} are in one box?",
    ),
    (
        _difference,
        "{name} had {first} {things} and lost {second} of them. "
        "How many {things} does {name} have now?",
        "{name} has {first} {things} and gives {second} to {other}. How many {things} are left?",
    ),
    (
        _sum,
        "{name} has {first} {things} and finds {second} more. "
        "How many {things} does {name} have now?",
        "{name} has {first} {things} and {other} has {second}. "
        "How many {things} do they have together?",
    ),
    (
        _sum,
        "{name} is {first} years old. {other} is {second} years older. How old is {other}?",
        "{name} is {first} years old. How old will {name} be in {second} years?",
    ),
    (
        _difference,
        "{name} is {first} years old. {other} is {second} years younger. How old is {other}?",
        "{name} is {first} years old. How old was {name} {second} years ago?",
    ),
    (
        _product,
        "{name} walks {first} miles every day. How many miles does {name} walk in {second} days?",
        "A train travels {first} miles in an hour. How many miles does it travel in {second} "
        "hours?",
    ),
    (
        _difference,
        "The way to school is {first} yards long. {name} has walked {second} yards. "
        "How many yards are left?",
        "{name} lives {first} miles from the sea and {other} lives {second} miles closer. "
        "How many miles from the sea does {other} live?",
    ),
)
"""Kinds of problems: the numbers, and wordings, in which {first} and {second} are the numbers,
{name} and {other} people, and {things} the objects."""


class WordProblems(PromptSourceTask):
    """Solve a word problem of one step: ``Ben is 14 years old. Iris is 3 years older. How old is
    Iris?`` is answered by ``17``.

    An answer is scored by the number that it states, in final form: ``17``, ``14 + 3 = 17`` and
    ``She is 17.`` score, ``14 + 3`` does not. The answer is never a number of the prompt, so
    copying one scores nothing.

    Args:
      seed: selects the order of the training prompts; the problems are always the same.
      heldout: which problems are held out; None is one in ten.
    """

    def __init__(self, seed: int, heldout: HeldOut | None = None):
        super().__init__(PromptList(NAME, draw_examples(NUM_PROBLEMS), seed, heldout))

    def verify(self, examples: Sequence[Example], completions: Sequence[str]) -> list[Verdict]:
        """Scores one completion per example."""
        pairs = pair_completions(examples, completions)
        return [score_number(completion, int(example.answer)) for example, completion in pairs]

    def close(self) -> None:
        """Does nothing: there is no worker process."""


def draw_examples(count: int) -> list[Example]:
    """The first distinct problems of a fixed stream."""
    random, examples = generator(NAME, 0, "problems", 0), {}
    while len(examples) < count:
        example = draw_example(random)
        examples.setdefault(example.prompt, example)
    return list(examples.values())


def draw_example(random: Random) -> Example:
    """Draws a kind of problem, its numbers and a wording."""
    operands, *texts = random.choice(KINDS)
    while True:
        first, second, answer = operands(random)
        if answer not in (first, second):
            break
    name, other = random.sample(NAMES, 2)
    prompt = random.choice(texts).format(
        first=first, second=second, name=name, other=other, things=random.choice(THINGS)
    )
    messages = (("system", SYSTEM_PROMPT), *SHOT_MESSAGES, ("user", prompt))
    return Example(prompt, str(answer), messages)


def score_number(completion: str, answer: int) -> Verdict:
    """Compares the number that a completion states with the answer."""
    extracted = extract(completion)
    statement = None if extracted is None else read_statement(extracted.text)
    if statement is None or statement.kind == NOTHING:
        return UNPARSABLE
    if statement.value != answer:
        return WRONG
    return CORRECT if statement.is_final else UNEVALUATED
