"""Add two three-digit numbers, the sum written backwards: ``123+989=`` asks for ``2111``.

Backwards, so that each digit depends only on digits and a carry to its left.
"""

from random import Random

from jrl.tasks.definition import Record
from jrl.tasks.procedural import score_exact
from jrl.tasks.task import Verdict


class Addition:
    """Prompts of two numbers from 100 to 999, answered by their sum, last digit first."""

    max_prompt_length = len("999+999=")
    max_response_length = len("8991")
    characters = "+0123456789="

    def prompts(self, random: Random) -> Record:
        left, right = random.randrange(100, 1000), random.randrange(100, 1000)
        return {"prompt": f"{left}+{right}=", "answer": str(left + right)[::-1]}

    def reward(self, prompt: str, completion: str, *, answer: str) -> Verdict:
        return score_exact(completion, answer, "0123456789")
