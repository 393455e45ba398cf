"""Custom reward function, called in worker processes with a time limit for each completion."""

import json
import tempfile
from collections.abc import Sequence

from jrl.tasks.data.records import to_json_value
from jrl.tasks.references import CodeReference
from jrl.tasks.rewards.completion import special_of
from jrl.tasks.task import FAILURES, Example
from jrl.tasks.workers.pool import Pool
from jrl.tasks.workers.process import Message
from jrl.tasks.workers.reward import SPECIAL


class CustomReward:
    """A function ``reward(prompt, completion, **record)``, or the reward of a task.

    Its file is read once: what is changed in it later makes no difference to workers that start
    again. Close it when it is no longer needed.
    """

    def __init__(
        self, reference: CodeReference, *, makes: bool, seconds: float, workers: int | None = None
    ):
        """Describes the workers; the first question starts one.

        Args:
          makes: whether the reference makes a task, whose reward it is.
          seconds: how long one answer may take.
          workers: processes that answer; None is one per processor core, up to 8.
        """
        self.text = reference.text
        self._folder = tempfile.TemporaryDirectory(prefix="jrl-reward-")
        make = reference.worker_maker("reward", self._folder.name, makes=makes, seconds=seconds)
        self._pool = Pool(make, workers, batched=True)

    def ask(self, pairs: Sequence[tuple[Example, str]]) -> list[Message]:
        """Calls the reward for each completion: ``{"value": ...}`` or ``{"parts": ...}``, or
        ``{"failure": ..., "message": ...}`` with one of `FAILURES`."""
        questions = [_question(*pair) for pair in pairs]
        return [_parse_reply(answer) for answer in self._pool.ask_all(questions)]

    def close(self) -> None:
        """Ends the worker processes; more than once does no harm."""
        self._pool.close()
        self._folder.cleanup()


def _question(example: Example, completion: str) -> Message:
    reserved = ("prompt", "completion", SPECIAL)
    fields = {name: value for name, value in example.record.items() if name not in reserved}
    if example.answer:
        fields.setdefault("answer", example.answer)
    # The worker sees what JSON holds of it, whatever a file's reader made of the fields.
    fields = json.loads(json.dumps(fields, default=to_json_value))
    question: Message = {"prompt": example.prompt, "completion": completion, "fields": fields}
    if (special := special_of(completion)) != completion:
        question["special"] = special
    return question


def _parse_reply(answer: Message | Exception) -> Message:
    if isinstance(answer, TimeoutError):
        return {"failure": "timeout", "message": str(answer)}
    if isinstance(answer, Exception):
        return {"failure": "error", "message": str(answer)}
    if "error" in answer:
        return {"failure": "error", "message": answer["error"]}
    assert "failure" not in answer or answer["failure"] in FAILURES
    return answer
