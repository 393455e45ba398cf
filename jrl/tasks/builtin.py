"""Built-in tasks, whose prompts are generated: five of one turn, and two conversations."""

from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import partial
from operator import add, floordiv, mul, sub
from random import Random
from typing import Any, NamedTuple

from jrl.tasks.answers import extract
from jrl.tasks.definition import ProceduralTask, Record
from jrl.tasks.task import CORRECT, UNPARSABLE, WRONG, Verdict
from jrl.tasks.tools.calculator import CALCULATOR, calculate, parse
from jrl.tasks.tools.tool import ToolEnvironment

NUM_DIGITS = 8


class Sort:
    """Sort eight digits: ``31415926=`` is answered by ``11234569``."""

    max_prompt_length = NUM_DIGITS + 1
    max_response_length = NUM_DIGITS
    characters = "0123456789="

    def prompts(self, random: Random) -> Record:
        digits = [str(random.randrange(10)) for _ in range(NUM_DIGITS)]
        return {"prompt": "".join(digits) + "=", "answer": "".join(sorted(digits))}

    def reward(self, prompt: str, completion: str, *, answer: str) -> Verdict:
        return score_exact(completion, answer, "0123456789")


class Addition:
    """Add two three-digit numbers, the sum written backwards: ``123+989=`` is answered by ``2111``.

    Backwards, so that each digit depends only on digits and a carry to its left.
    """

    max_prompt_length = len("999+999=")
    max_response_length = len("8991")
    characters = "+0123456789="

    def prompts(self, random: Random) -> Record:
        left, right = random.randrange(100, 1000), random.randrange(100, 1000)
        return {"prompt": f"{left}+{right}=", "answer": str(left + right)[::-1]}

    def reward(self, prompt: str, completion: str, *, answer: str) -> Verdict:
        return score_exact(completion, answer, "0123456789")


MARKER = "#"
MIN_DIGITS, MAX_DIGITS = 2, 5
MAX_OPERAND_DIGITS = 64
TAIL = 1.5
"""Exponent of the lengths of long operands: of those that have MIN digits or more a share
``(MIN / n) ** TAIL`` has n or more."""


class Scratchpad:
    """Add two numbers of two to five digits or more, with a chain of thought from the right.

    ``47+385=`` may be answered by ``7+5+0=12,4+8+1=13,0+3+1=04#432``: digit, digit and carry, their
    sum as carry and digit, and after the marker the result. The result alone is scored, so that
    whatever is written before the marker is the policy's own chain of thought; its length grows
    with the operands.

    Args:
      min_digits, max_digits: digits of the shortest and the longest operand.
      independent_lengths: whether operand lengths are independent and uniform; else both have one,
        with a heavy tail.
    """

    characters = "#+,0123456789="

    def __init__(
        self,
        min_digits: int = MIN_DIGITS,
        max_digits: int = MAX_DIGITS,
        independent_lengths: bool = True,
    ):
        self._min_digits, self._max_digits = min_digits, max_digits
        self._independent_lengths = independent_lengths
        steps = max_digits * len("9+9+1=19,") - 1
        self.max_prompt_length = 2 * max_digits + len("+=")
        self.max_response_length = steps + len(MARKER) + max_digits + 1

    def prompts(self, random: Random) -> Record:
        if self._independent_lengths:
            left, right = (
                _number(random, random.randrange(self._min_digits, self._max_digits + 1))
                for _ in range(2)
            )
        else:
            # A Pareto variable from the shortest on, rounded down.
            length = int(self._min_digits * (1 - random.random()) ** (-1 / TAIL))
            left, right = (_number(random, min(length, self._max_digits)) for _ in range(2))
        answer = f"{','.join(_steps(left, right))}{MARKER}{left + right}"
        return {"prompt": f"{left}+{right}=", "answer": answer}

    def reward(self, prompt: str, completion: str, *, answer: str) -> Verdict:
        """Compares the text after the last marker with the sum; a completion that has no marker
        gives no answer."""
        _, marker, result = completion.rpartition(MARKER)
        return score_exact(result if marker else "", answer.rpartition(MARKER)[2], "0123456789")


def scratchpad_of(min_digits: int, max_digits: int, seed: int) -> ProceduralTask:
    """The task with operands of one length, `min_digits` to `max_digits` with a heavy tail.

    Raises:
      ValueError: for operands shorter than two digits or longer than `MAX_OPERAND_DIGITS`.
    """
    shortest = "" if min_digits == MIN_DIGITS else f"{min_digits}-"
    name = f"scratchpad:{shortest}{max_digits}"
    if not MIN_DIGITS <= min_digits <= max_digits <= MAX_OPERAND_DIGITS:
        raise ValueError(
            f"task={name!r}: operands have {MIN_DIGITS} to {MAX_OPERAND_DIGITS} digits, "
            "the shortest no more than the longest."
        )
    return ProceduralTask(name, seed, Scratchpad(min_digits, max_digits, independent_lengths=False))


def _number(random: Random, num_digits: int) -> int:
    return random.randrange(10 ** (num_digits - 1), 10**num_digits)


def _steps(left: int, right: int) -> list[str]:
    steps, carry = [], 0
    while left or right:
        total = left % 10 + right % 10 + carry
        steps.append(f"{left % 10}+{right % 10}+{carry}={total:02d}")
        left, right, carry = left // 10, right // 10, total // 10
    return steps


MODULUS = 100
NUM_TERMS = 3


class Progression:
    """Continue an arithmetic progression modulo 100: ``93,96,99=`` is answered by ``02,05,08``."""

    max_prompt_length = len("00,00,00=")
    max_response_length = len("00,00,00")
    characters = ",0123456789="

    def prompts(self, random: Random) -> Record:
        start, step = random.randrange(MODULUS), random.randrange(1, MODULUS)
        terms = [f"{(start + step * index) % MODULUS:02d}" for index in range(2 * NUM_TERMS)]
        return {"prompt": ",".join(terms[:NUM_TERMS]) + "=", "answer": ",".join(terms[NUM_TERMS:])}

    def reward(self, prompt: str, completion: str, *, answer: str) -> Verdict:
        return score_exact(completion, answer, ",0123456789")


MAX_NUMBER = 12
MAX_TARGET = 99
_OPERATIONS = {"+": (add, 0), "-": (sub, 0), "*": (mul, 1), "/": (floordiv, 1)}
"""Operations and their precedence."""


class _Term(NamedTuple):
    """An expression, its value, and the precedence of its last operation."""

    text: str
    value: int
    rank: int = 2


class Countdown:
    """Reach a target with three numbers: ``3,7,11=40:`` may be answered by ``3*11+7``.

    Any expression scores that has the requested value and uses each given number exactly once: the
    numbers are from 1 to 12, in ascending order, and the target is from 1 to 99.
    """

    max_prompt_length = len("10,11,12=99:")
    max_response_length = len("12*(10+11)")
    characters = "()*+,-/0123456789:="

    def prompts(self, random: Random) -> Record:
        """Draws an expression and takes its value as the target, so that there is a solution."""
        while True:
            numbers = [random.randrange(1, MAX_NUMBER + 1) for _ in range(3)]
            left, right, third = (_Term(str(number), number) for number in numbers)
            first, second = random.choice("+-*/"), random.choice("+-*/")
            pair = _join(left, first, right)
            if pair is None:
                continue
            left, right = (pair, third) if random.randrange(2) else (third, pair)
            expression = _join(left, second, right)
            if expression is not None and 1 <= expression.value <= MAX_TARGET:
                operands = ",".join(map(str, sorted(numbers)))
                return {"prompt": f"{operands}={expression.value}:", "answer": expression.text}

    def reward(self, prompt: str, completion: str, **record: Any) -> Verdict:
        operands, _, target = prompt.removesuffix(":").partition("=")
        try:
            expression = parse(completion)
        except ValueError:
            return UNPARSABLE
        if sorted(expression.numbers) != sorted(map(int, operands.split(","))):
            return WRONG
        try:
            return CORRECT if expression.value() == Fraction(target) else WRONG
        except ZeroDivisionError:
            return WRONG


def _join(left: _Term, operation: str, right: _Term) -> _Term | None:
    """Two terms joined by an operation; None if a division leaves a remainder."""
    operate, rank = _OPERATIONS[operation]
    if operation == "/" and (right.value == 0 or left.value % right.value):
        return None
    left_text = left.text if left.rank >= rank else f"({left.text})"
    # On the right, equal precedence needs parentheses as well: a-(b+c), a/(b*c).
    right_text = right.text if right.rank > rank else f"({right.text})"
    value = operate(left.value, right.value)
    return _Term(f"{left_text}{operation}{right_text}", value, rank)


MIN_CANDIDATES, MAX_CANDIDATES = 6, 9
"""Minimum and maximum number of digits that the prompt lists."""
MAX_GUESSES = 4
HIGHER, LOWER = "higher.", "lower."


class Guess:
    """Guess one of six to nine digits, with feedback on each guess.

    ``023579:`` lists the digits, one of which is to be guessed. The environment answers the guess
    ``7`` with ``lower.``, ``3`` with ``higher.``, and so on. The number itself scores full marks
    within `MAX_GUESSES` guesses; bisection always finds it within them. Reference conversations
    guess at random among the digits that are still possible, and find it within them too.
    """

    max_prompt_length = MAX_CANDIDATES + 1
    # A digit and an end token for each guess, the last without end, and a hint between guesses.
    max_response_length = MAX_GUESSES * 2 + (MAX_GUESSES - 1) * len(HIGHER) - 1
    characters = "".join(sorted(set("0123456789:" + HIGHER + LOWER)))
    # Split by the prompt alone: else training shows that one digit of a prompt is never hidden.
    distinct_prompts = True

    def prompts(self, random: Random) -> Record:
        """Draws digits, one of them as the hidden number, and a conversation that finds it."""
        count = random.randrange(MIN_CANDIDATES, MAX_CANDIDATES + 1)
        digits = sorted(random.sample(range(10), count))
        number = random.choice(digits)
        messages = _sample_conversation(random, digits, number)
        while len(messages) > 2 * MAX_GUESSES:
            messages = _sample_conversation(random, digits, number)
        prompt = "".join(map(str, digits)) + ":"
        return {"prompt": prompt, "number": number, "turns": messages}

    def environment(self, number: int) -> "Guessing":
        """The environment with this hidden number."""
        return Guessing(number)


class Guessing:
    """Environment of the guessing game: compares guesses with the hidden number."""

    def __init__(self, number: int):
        self._number, self._guesses = number, 0

    def reset(self) -> None:
        """Adds no message to the prompt."""

    def step(self, message: Mapping[str, str]) -> tuple[list[dict[str, str]], float, bool]:
        """Gives full marks for the number; a message that is no digit ends the conversation."""
        answer = extract(message["content"], bare=True)
        text = "" if answer is None else answer.text
        if len(text) != 1 or text not in "0123456789":
            return [], 0.0, True
        self._guesses += 1
        guess = int(text)
        if guess == self._number:
            return [], 1.0, True
        over = self._guesses >= MAX_GUESSES
        return [{"role": "user", "content": _hint(guess, self._number)}], 0.0, over


def _hint(guess: int, number: int) -> str:
    return HIGHER if guess < number else LOWER


def _sample_conversation(random: Random, digits: list[int], number: int) -> list[dict[str, str]]:
    """A conversation in which each guess is sampled from the possible numbers."""
    messages = []
    while True:
        guess = random.choice(digits)
        messages.append({"role": "assistant", "content": str(guess)})
        if guess == number:
            return messages
        messages.append({"role": "user", "content": _hint(guess, number)})
        digits = [n for n in digits if n != guess and (n > guess) == (number > guess)]


MAX_CALLS = 2
ERROR = "error"
"""Output of a call that fails."""


class Calculator:
    """Compute a product of two numbers plus or minus a third, with a calculator tool.

    The policy answers ``47*83-6=`` with a call, ``@calc 47*83-6``. The calculator returns
    ``3895.``, and the second turn ``3895`` scores full marks. A policy may also answer directly.
    """

    max_prompt_length = len("99*99+99=")
    # The call, its answer and the result, with the ends of two turns.
    max_response_length = len("@calc 99*99+99") + 1 + len("9900.") + len("9900") + 1
    characters = "".join(sorted(set("0123456789*+-/=@calc ." + ERROR)))
    tools = (CALCULATOR.schema,)

    def prompts(self, random: Random) -> Record:
        """Draws the numbers, and a conversation that calls once."""
        first, second, third = (random.randrange(10, 100) for _ in range(3))
        text = f"{first}*{second}{random.choice('+-')}{third}"
        value = calculate(text)
        messages = [
            {"role": "assistant", "content": f"@{CALCULATOR.name} {text}"},
            {"role": "tool", "content": f"{value}."},
            {"role": "assistant", "content": value},
        ]
        return {"prompt": f"{text}=", "expression": text, "turns": messages}

    def environment(self, expression: str) -> ToolEnvironment:
        """The environment with the calculator, which compares the final answer exactly."""
        value = parse(expression).value()

        def score(text: str) -> float:
            return float(text.strip() == str(value))

        return ToolEnvironment([CALCULATOR], score, end=".", most=MAX_CALLS, error=ERROR)


def score_exact(completion: str, answer: str, alphabet: str) -> Verdict:
    """Scores a completion that must equal the answer, both written in the alphabet."""
    if completion == answer:
        return CORRECT
    if completion and set(completion) <= set(alphabet):
        return WRONG
    return UNPARSABLE


BUILT_IN: dict[str, Callable[[int], ProceduralTask]] = {
    name: partial(ProceduralTask, name, definition=definition)
    for name, definition in (
        ("sort", Sort()),
        ("addition", Addition()),
        ("scratchpad", Scratchpad()),
        ("countdown", Countdown()),
        ("progression", Progression()),
    )
}
"""Single-turn tasks, each made from the seed that selects its stream of prompts."""
CONVERSATIONS: dict[str, Callable[[], Any]] = {"guess": Guess, "calculator": Calculator}
"""Definitions of multi-turn tasks, whose environments answer the policy."""
