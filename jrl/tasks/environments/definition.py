"""Definition of a multi-turn task: prompts, and an environment for each of them.

A record is as in `jrl.tasks.definition`; its prompt may be left to the environment's `reset`. A
reference conversation to imitate is its field "turns": messages after the opening, the policy's
first and last, as "assistant". Every other field but the prompt is passed to `environment` by its
name.
"""

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from jrl.tasks.definition import Record

Messages = Sequence[Mapping[str, str] | str] | Mapping[str, str] | str | None
"""Messages with "role" ("user", "tool" or "system") and "content"; a text alone is the user's."""
Stepped = tuple[Messages, float, bool]
"""Messages of an environment, reward of the turn before, and whether the conversation is over."""


@runtime_checkable
class Environment(Protocol):
    """The other side of one conversation.

    Its output may depend on its record and on the messages so far alone: it may be created again,
    and the conversation replayed. Methods may be ``async``.

    A method `close`, if there is one, is called once for each environment that was created, however
    its conversation ends: over, dropped, by an error or with the run. If a process is killed, for a
    call that took too long or from outside, everything that its environments have started is killed
    with it instead.
    """

    def reset(self) -> Messages | Awaitable[Messages]:
        """Begins; what it says stands before the policy's first turn, after the record's prompt."""
        ...

    def step(self, message: Mapping[str, Any]) -> Stepped | Awaitable[Stepped]:
        """Answers a message of the policy, ``{"role": "assistant", "content": ...}``.

        Where the task has `tools` and the policy a chat template, it has "tool_calls" too: OpenAI's
        fields, with arguments that are a mapping, and an "error" in one that cannot be read. One
        that the limit of a turn cut (``--turn-length``) has "truncated", which is true.

        Returns:
          Messages, the reward of the policy's turn, and whether the conversation is over. The
          rewards of all turns add up to the score.
        """
        ...


@runtime_checkable
class Conversing(Protocol):
    """A multi-turn task, whose prompts are a list or generated, as of `jrl.tasks.definition`.

    It may also have `full_marks`, the score from which on a conversation counts as correct (1);
    `tools` that the policy may call, which a chat template tells it of: each a
    `jrl.tasks.tools.tool.Tool` or a schema; and, of generated prompts, `distinct_prompts`:
    whether what is held out is chosen by the prompt alone. By default it is by the prompt and what
    the record hides.
    """

    @property
    def prompts(self) -> Any:
        """Records, or a method that generates one."""
        ...

    def environment(self, **record: Any) -> Environment:
        """The environment of a record, of the fields that it names."""
        ...


def is_conversing(task: Any) -> bool:
    """True if a task has environments in place of a reward."""
    return callable(getattr(task, "environment", None))


def fields_of(record: Record) -> dict[str, Any]:
    """Fields of a record that its environment is created from."""
    return {name: x for name, x in record.items() if name not in ("prompt", "messages", "turns")}
