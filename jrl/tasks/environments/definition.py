"""Multi-turn tasks: their prompts, and an environment for each of them.

A record is as in `jrl.tasks.definition`; its prompt may be left to the environment's `reset`. Its
field "turns" may have a reference conversation to imitate: messages after the opening, of which the
first and last are the policy's ("assistant"). Every other field but the prompt is passed to
`environment` by its name.
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
"""Messages with "role" ("user", "tool" or "system") and "content"; a plain text is the user's."""
Stepped = tuple[Messages, float, bool]
"""Messages of an environment, reward of the previous turn, and whether the conversation is over."""


@runtime_checkable
class Environment(Protocol):
    """Environment of one conversation.

    Its output may depend on its record and the previous messages only, as it may be created again
    and the conversation replayed. Methods may be ``async``.

    An optional method `close` is called once for each environment that was created, however its
    conversation ends: done, dropped, by an error or with the run. If a process is killed, at a time
    limit or from outside, everything that its environments have started is killed with it instead.
    """

    def reset(self) -> Messages | Awaitable[Messages]:
        """Returns the messages between the record's prompt and the policy's first turn."""
        ...

    def step(self, message: Mapping[str, Any]) -> Stepped | Awaitable[Stepped]:
        """Answers a message of the policy, ``{"role": "assistant", "content": ...}``.

        With the task's `tools` and a chat template, it has "tool_calls" too: OpenAI's fields, with
        arguments that are a mapping, and an "error" in a call that cannot be parsed. A message that
        was cut at the maximum length of a turn (``--turn-length``) has "truncated": true.

        Returns:
          Messages, the reward of the policy's turn, and whether the conversation is over. The
          rewards of all turns add up to the score.
        """
        ...


@runtime_checkable
class Conversing(Protocol):
    """A multi-turn task, whose prompts are a list or generated, as in `jrl.tasks.definition`.

    It may also have `full_marks`, the minimum score of a correct conversation (1 by default);
    `tools` that the policy may call, described to it by the chat template, each a
    `jrl.tasks.tools.tool.Tool` or a schema; and, for generated prompts, `distinct_prompts`: whether
    prompts are held out by the prompt alone. By default they are by the prompt and the hidden
    fields of the record.
    """

    @property
    def prompts(self) -> Any:
        """Records, or a method that generates one."""
        ...

    def environment(self, **record: Any) -> Environment:
        """The environment of a record, created from the fields that it names as parameters."""
        ...


def is_conversing(task: Any) -> bool:
    """True if a task has environments in place of a reward."""
    return callable(getattr(task, "environment", None))


class EnvironmentPrompts:
    """Generated prompts of a multi-turn task, each with the opening messages of its environment,
    from a host."""

    def __init__(self, name: str, definition: Any, host: Host):
        self._name, self._definition, self._host = name, definition, host
        self._tools = tools_of(definition)
        self._distinct = bool(getattr(definition, "distinct_prompts", False))
        self.max_prompt_length: int = definition.max_prompt_length
        self.max_response_length: int = definition.max_response_length
        self.characters: str = definition.characters

    def prompts(self, random: Random) -> Example:
        """Draws a record, and adds the opening messages of its environment."""
        record = self._definition.prompts(random)
        example = open_example(record, f"task={self._name}", self._host, self._tools)
        return replace(example, hidden="") if self._distinct else example

    def reward(self, prompt: str, completion: str, **record: Any) -> float:
        """Always fails: environments give the rewards of conversations.

        Raises:
          ValueError: always.
        """
        raise ValueError("a conversation is rewarded by its environment, turn by turn")


class Conversational(PromptSourceTask):
    """A task whose completions are conversations."""

    def __init__(self, prompts: Prompts, host: Host):
        """Joins prompts and the host of their environments; `close` closes the host."""
        super().__init__(prompts)
        self.environments = host

    def verify(self, examples: Sequence[Example], completions: Sequence[str]) -> list[Verdict]:
        """Returns no verdicts: conversations are scored by their environments, turn by turn.

        Raises:
          ValueError: if there is anything to score.
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
    """The example of a record, whose prompt is all messages before the policy's first turn.

    Args:
      location: of the record, for error messages.

    Raises:
      ValueError: if there are no messages, or a field has the wrong type.
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
    """Schemas of the tools of a task as JSON texts; its tools may be given as schemas."""
    schemas = (getattr(tool, "schema", tool) for tool in getattr(definition, "tools", ()))
    return tuple(json.dumps(schema, sort_keys=False) for schema in schemas)
