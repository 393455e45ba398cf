"""Number-guessing task with feedback on each guess.

``023579:`` asks for one of these digits. The environment answers the guess ``7`` with ``lower.``,
``3`` with ``higher.``, and so on. The number itself scores full marks within `MAX_GUESSES` guesses;
bisection always finds it in time.
"""

from collections.abc import Mapping
from random import Random

from jrl.tasks.answers import extract
from jrl.tasks.definition import Record

MIN_CANDIDATES, MAX_CANDIDATES = 6, 9
"""Numbers that are possible at first."""
MAX_GUESSES = 4
HIGHER, LOWER = "higher.", "lower."


class Guess:
    """Six to nine of the ten digits, with one of them to be found.

    Reference conversations guess at random among what is still possible, and get there in time.
    """

    max_prompt_length = MAX_CANDIDATES + 1
    # A digit and an end for each guess, and an answer to all but the last; the last end is none.
    max_response_length = MAX_GUESSES * 2 + (MAX_GUESSES - 1) * len(HIGHER) - 1
    characters = "".join(sorted(set("0123456789:" + HIGHER + LOWER)))
    # Held out by what is asked: a number never to be found in one prompt would be told by that.
    distinct_prompts = True

    def prompts(self, random: Random) -> Record:
        """Draws digits and one of them, and a conversation that finds it."""
        digits = sorted(
            random.sample(range(10), random.randrange(MIN_CANDIDATES, MAX_CANDIDATES + 1))
        )
        number = random.choice(digits)
        messages = _sample_conversation(random, digits, number)
        while len(messages) > 2 * MAX_GUESSES:
            messages = _sample_conversation(random, digits, number)
        prompt = "".join(map(str, digits)) + ":"
        return {"prompt": prompt, "number": number, "turns": messages}

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
        digits = [digit for digit in digits if (digit > guess) == (number > guess)]
        digits = [digit for digit in digits if digit != guess]
