"""Multi-turn tasks: their prompts, and an environment for each of them.

A record is as in `jrl.tasks.definition`; its prompt may be left to the environment's `reset`. A
reference conversation to imitate is its field "turns": messages after the opening, the policy's
first and last, as "assistant". Every other field but the prompt is passed to `environment` by its
name.
"""

import json
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any, Protocol, runtime_checkable

from jrl.tasks.data.records import example_of, to_json_value
from jrl.tasks.definition import Record
from jrl.tasks.environments.host import Host
from jrl.tasks.task import Example, Prompts, PromptSourceTask, Verdict

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


class EnvironmentPrompts:
    """A definition with generated prompts and sizes, whose prompts hold what the environments of a
    host begin with."""

    def __init__(self, name: str, definition: Any, host: Host):
        self._name, self._definition, self._host = name, definition, host
        self._tools = tools_of(definition)
        self._distinct = bool(getattr(definition, "distinct_prompts", False))
        self.max_prompt_length: int = definition.max_prompt_length
        self.max_response_length: int = definition.max_response_length
        self.characters: str = definition.characters

    def prompts(self, random: Random) -> Example:
        """Draws a record, and opens it."""
        record = self._definition.prompts(random)
        example = open_example(record, f"task={self._name}", self._host, self._tools)
        return replace(example, hidden="") if self._distinct else example

    def reward(self, prompt: str, completion: str, **record: Any) -> float:
        """There is none: environments reward.

        Raises:
          ValueError: always.
        """
        raise ValueError("a conversation is rewarded by its environment, turn by turn")


class Conversational(PromptSourceTask):
    """A task whose completions are conversations."""

    def __init__(self, prompts: Prompts, host: Host):
        """Puts prompts and the host of their environments together, which is closed with the
        task."""
        super().__init__(prompts)
        self.environments = host

    def verify(self, examples: Sequence[Example], completions: Sequence[str]) -> list[Verdict]:
        """Reference completions alone: what a policy writes is scored while it is written.

        Raises:
          ValueError: where there is anything to score.
        """
        if examples:
            raise ValueError(f"task={self.name} scores conversations only by its environment")
        return []

    def close(self) -> None:
        """Ends the worker processes; more than once does no harm."""
        self.environments.close()


def open_example(
    record: Record | str, location: str, host: Host, tools: Sequence[str] = ()
) -> Example:
    """The example of a record, with all messages before the policy's first turn as its prompt.

    Args:
      location: where the record is from, for messages.

    Raises:
      ValueError: where there are none, or a field cannot be what it is for.
    """
    fields: dict[str, Any] = {"prompt": record} if isinstance(record, str) else dict(record)
    turns = tuple((str(turn["role"]), str(turn["content"])) for turn in fields.pop("turns", ()))
    if turns and (turns[0][0] != "assistant" or turns[-1][0] != "assistant"):
        raise ValueError(
            f'{location}: field "turns" must begin and end with a message of the assistant, which '
            "is trained on"
        )
    messages = [dict(message) for message in fields.pop("messages", ())]
    if "prompt" in fields:
        messages = [{"role": "user", "content": fields.pop("prompt")}]
    messages += [{"role": role, "content": text} for role, text in host.opening_messages(fields)]
    if not messages:
        raise ValueError(
            f"{location}: {str(fields)[:60]} has no first message: give it a prompt, or let "
            "reset() return messages"
        )
    opening: dict[str, Any] = {"messages": messages}
    if len(messages) == 1 and messages[0]["role"] == "user":
        opening = {"prompt": messages[0]["content"]}
    if turns:
        opening["answer"] = "\n".join(text for _, text in turns)
    return replace(
        example_of(opening, location),
        record=fields,
        turns=turns,
        hidden=json.dumps(fields, sort_keys=True, default=to_json_value),
        tools=tuple(tools),
    )


def tools_of(definition: Any) -> tuple[str, ...]:
    """Schemas of what a policy may call, as JSON texts; of a task's tools, or of their schemas."""
    schemas = (getattr(tool, "schema", tool) for tool in getattr(definition, "tools", ()))
    return tuple(json.dumps(schema, sort_keys=False) for schema in schemas)
