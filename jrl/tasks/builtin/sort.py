"""Sort eight digits: ``31415926=`` asks for ``11234569``."""

from random import Random

from jrl.tasks.definition import Record
from jrl.tasks.procedural import score_exact
from jrl.tasks.task import Verdict

NUM_DIGITS = 8


class Sort:
    """Prompts of eight random digits, answered by the same digits in ascending order."""

    max_prompt_length = NUM_DIGITS + 1
    max_response_length = NUM_DIGITS
    characters = "0123456789="

    def prompts(self, random: Random) -> Record:
        digits = [str(random.randrange(10)) for _ in range(NUM_DIGITS)]
        return {"prompt": "".join(digits) + "=", "answer": "".join(sorted(digits))}

    def reward(self, prompt: str, completion: str, *, answer: str) -> Verdict:
        return score_exact(completion, answer, "0123456789")
