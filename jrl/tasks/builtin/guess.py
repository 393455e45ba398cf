"""Guess a number from what is said of each guess.

``2-9:`` asks for a number from 2 to 9; to the guess ``7`` comes ``lower.``, to ``3`` ``higher.``,
and so on. The number itself scores full marks, if it comes within `MAX_GUESSES`; half of what is
possible each time always gets there.
"""

from collections.abc import Mapping
from random import Random

from jrl.tasks.definition import Record

FEWEST = 6
"""Numbers that are possible at first, at least."""
MAX_GUESSES = 4
HIGHER, LOWER = "higher.", "lower."


class Guess:
    """Ranges of six to ten digits, with one of them to be found.

    Gold conversations guess at random among what is still possible, and get there in time.
    """

    max_prompt_length = len("0-9:")
    # A digit and an end for each guess, and an answer to all but the last; the last end is none.
    max_response_length = MAX_GUESSES * 2 + (MAX_GUESSES - 1) * len(HIGHER) - 1
    characters = "".join(sorted(set("0123456789-:" + HIGHER + LOWER)))

    def prompts(self, random: Random) -> Record:
        """Draws a range and a number of it, and a conversation that finds it."""
        low = random.randrange(10 - FEWEST + 1)
        high = random.randrange(low + FEWEST - 1, 10)
        number = random.randrange(low, high + 1)
        turns = _found(random, low, high, number)
        while len(turns) > 2 * MAX_GUESSES:
            turns = _found(random, low, high, number)
        return {"prompt": f"{low}-{high}:", "number": number, "turns": turns}

    def environment(self, number: int) -> "Guessing":
        """Knows the number."""
        return Guessing(number)


class Guessing:
    """The one who has thought of a number."""

    def __init__(self, number: int):
        self._number, self._guesses = number, 0

    def reset(self) -> None:
        """The prompt has said it all."""

    def step(self, message: Mapping[str, str]) -> tuple[list[dict[str, str]], float, bool]:
        """Full marks for the number; what is no digit ends the conversation."""
        text = message["content"].strip()
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


def _found(random: Random, low: int, high: int, number: int) -> list[dict[str, str]]:
    """A conversation in which each guess is drawn from what is possible."""
    turns = []
    while True:
        guess = random.randrange(low, high + 1)
        turns.append({"role": "assistant", "content": str(guess)})
        if guess == number:
            return turns
        turns.append({"role": "user", "content": _hint(guess, number)})
        low, high = (guess + 1, high) if guess < number else (low, guess - 1)
