"""Prompts as tokens, by a chat template if there is one, and sampled tokens as text."""

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jrl.tasks import Example
from jrl.tasks.answers.extraction import UNREADABLE
from jrl.tasks.answers.reasoning import REASONING_TOKENS, opens_reasoning, opens_turn
from jrl.tasks.data.conversations import Conversation, Turn, content_of
from jrl.tasks.data.fields import short
from jrl.tasks.tools.call_format import ToolFormat
from jrl.tasks.tools.calls import Arguments, Call, ToolParameters, parameters_by_tool
from jrl.tasks.tools.detection import FORMATS
from jrl.text.chat import ChatTemplate, TemplateRejection, today, with_turn_end
from jrl.text.tokenizer import Tokenizer
from jrl.text.tool_calls import attach_calls, shows_tools, tool_format_of

CHECKPOINT_TEMPLATE, NO_TEMPLATE = "checkpoint", "none"
"""Values of `PromptSettings.chat_template` other than a file and those of `NAMED_TEMPLATES`."""
NAMED_TEMPLATES = {
    path.stem: path for path in sorted(Path(__file__).with_name("templates").glob("*.jinja"))
}
"""Files of the templates that come with the library, by name, for example "hermes"."""
TEMPLATE_FILES = ("chat_template.jinja", "tokenizer_config.json", "chat_template.json")
TAIL = 16
"""Number of tokens at the end of a prompt that are searched for a mark of open reasoning."""
NO_TOOLS = "has tools, and the model no chat template to write them with: give --chat-template FILE"
CALLS = ("tool_calls", "function_call")
"""Fields of an assistant's message with calls."""
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Fields of an assistant's message with its reasoning."""
REASONING_ITEMS = ("reasoning_details", "thinking_blocks")
"""Fields with the reasoning as a list of items, mostly beside the text."""
PROBE, PROBE_VALUE = "probe_of_a_field", "probe_of_a_value"
"""Words that replace the text, or the name and an argument of a call."""
ASKED, ANSWERED = {"role": "user", "content": "?"}, {"role": "assistant", "content": "yes"}


class WrittenFields:
    """Fields of messages that a chat template writes: calls, reasoning, and messages of each role.

    A template passes over a field that it does not support. Each kind of field is rendered once
    with a probe, a word that must occur in the text.
    """

    def __init__(self, template: ChatTemplate):
        self._template = template
        self._written: dict[tuple[Any, ...], bool] = {}

    def check(self, conversation: Conversation, trained: Collection[int]) -> None:
        """Rejects a conversation with calls, messages of a role, or reasoning in the messages that
        are trained on, by index, which the template does not write.

        Raises:
          ValueError: naming the field, with the remedy.
        """
        for index, turn in enumerate(conversation.turns):
            role = turn["role"]
            if role not in ("user", "assistant") and turn["content"]:
                begins = index == 0
                if not self._is_written(_role_probe(role, begins), conversation, role, begins):
                    raise ValueError(
                        f"the chat template does not write messages of role {role!r}, so that the "
                        "policy would never see them: give --chat-template a file that does, or "
                        "leave them out"
                    )
            for name in CALLS:
                if turn.get(name):
                    self._check_calls(turn, name, conversation, is_trained=index in trained)
            if index in trained:
                self._check_reasoning(turn, conversation)

    def _check_reasoning(self, turn: Turn, conversation: Conversation) -> None:
        """Some data sets have the same reasoning in two fields, of which one is enough."""
        texts = reasoning_of(turn)
        for text in set(texts.values()):
            names = [name for name in texts if texts[name] == text]
            if not any(self._writes_field({**ANSWERED, n: PROBE}, n, conversation) for n in names):
                raise _unwritten(names[0])

    def _check_calls(
        self, turn: Turn, name: str, conversation: Conversation, *, is_trained: bool
    ) -> None:
        """Some templates write only the first of multiple calls, or no content beside calls."""
        calls = turn[name]
        probe = (
            [_call_probe(call) for call in calls] if isinstance(calls, list) else _call_probe(calls)
        )
        probes: list[tuple[str, Any, str | None]] = []
        if isinstance(probe, list):
            probes += [(name, probe[:1], None), (f"a second entry of {name}", probe[:2], None)]
        else:
            probes.append((name, probe, None))
        if is_trained and content_of(turn).strip():
            probes.append((f"a content beside {name}", probes[0][1], PROBE))
        for probed, value, content in probes:
            message = {**ANSWERED, "content": content, name: value}
            if not self._writes_field(message, name, conversation):
                raise _unwritten(probed)

    def _writes_field(self, message: Turn, name: str, conversation: Conversation) -> bool:
        return self._is_written((ASKED, message), conversation, name, json.dumps(message))

    def _is_written(
        self, messages: tuple[Turn, ...], conversation: Conversation, *key: Any
    ) -> bool:
        """True if the template writes the probes in these messages; a rejection shows nothing."""
        key = (*key, json.dumps(conversation.arguments, default=str), conversation.tools is None)
        if key not in self._written:
            probe = replace(conversation, turns=messages)
            try:
                text = self._template.write(probe)
            except TemplateRejection:
                self._written[key] = True
            else:
                asked, words = json.dumps(messages), (PROBE, PROBE_VALUE)
                self._written[key] = all(text.count(word) >= asked.count(word) for word in words)
        return self._written[key]


def _unwritten(name: str) -> ValueError:
    return ValueError(
        f"the chat template does not write {name}, so that the policy would neither see nor learn "
        "it: give --chat-template a file that does, or leave the field out"
    )


def has_calls(turn: Turn) -> bool:
    """True if a message has calls."""
    return any(map(turn.get, CALLS))


def reasoning_of(turn: Turn) -> dict[str, str]:
    """The fields of a message that are its reasoning, by name.

    Raises:
      ValueError: for reasoning that is not a text.
    """
    stated = {name: turn[name] for name in REASONING if turn.get(name)}
    items = {name: turn[name] for name in REASONING_ITEMS if turn.get(name)}
    for name, value in (stated or items).items():
        if not isinstance(value, str):
            raise ValueError(
                f"{name} is {short(value)}, and is not read: write the reasoning as a text in "
                '"reasoning_content", or leave the field out'
            )
    return {name: text for name, text in stated.items() if text.strip()}


def _call_probe(call: Any) -> Any:
    """A call of this form, with probes as its name and its argument."""
    if not isinstance(call, Mapping):
        return PROBE
    if isinstance(function := call.get("function"), Mapping):
        return {**call, "function": _call_probe(function)}
    return {**call, "name": PROBE, "arguments": Arguments({"value": PROBE_VALUE})}


def _role_probe(role: str, begins: bool) -> tuple[Turn, ...]:
    """A conversation with a message of this role, at its beginning or later."""
    probe = {"role": role, "content": PROBE}
    if begins:
        return probe, ASKED
    if role in ("system", "developer"):
        return ASKED, ANSWERED, probe, ASKED
    identity = "call00000"
    function = {"name": "get", "arguments": Arguments({})}
    calling = {"id": identity, "type": "function", "function": function}
    call = {"role": "assistant", "content": None, "tool_calls": [calling]}
    return ASKED, call, {**probe, "name": "get", "tool_call_id": identity}


@runtime_checkable
class PromptSettings(Protocol):
    """Settings of a run that determine its prompts, as in `jrl.config.run.RunConfig`."""

    @property
    def chat_template(self) -> str: ...
    @property
    def system_prompt(self) -> str | None: ...
    @property
    def template_arguments(self) -> Mapping[str, Any]: ...
    @property
    def checkpoint(self) -> str | None: ...
    @property
    def tokenizer(self) -> str | None: ...


@dataclass(frozen=True)
class PromptFormat:
    """Format of prompts: tokenizer, chat template and system prompt.

    Attributes:
      tokenizer: maps between text and tokens.
      template: converts a conversation to tokens; None encodes prompts as they are.
      system_prompt: first message of every conversation that has no system message; None uses the
        example's own instruction.
      template_arguments: default variables of the template, for records that do not set them.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None = None
    system_prompt: str | None = None
    template_arguments: Mapping[str, Any] = field(default_factory=dict)

    def conversation(self, example: Example) -> Conversation:
        """Conversation that the policy continues: the example's messages, or its prompt as a user
        message."""
        pairs = example.messages or (("user", example.prompt),)
        messages = example.opening or Conversation.from_pairs(pairs).turns
        tools = [json.loads(tool) for tool in example.tools] or None
        conversation = Conversation(messages, tools, example.template_arguments)
        if example.instruction and self.system_prompt is None:
            conversation = self._add_instruction(conversation, example.instruction)
        return self.add_defaults(conversation)

    def add_defaults(self, conversation: Conversation) -> Conversation:
        """The conversation with the defaults of the run: the system prompt if it has none, and the
        template's arguments."""
        messages = conversation.turns
        if self.system_prompt is not None and messages[0]["role"] not in ("system", "developer"):
            messages = ({"role": "system", "content": self.system_prompt}, *messages)
        arguments = {**self.template_arguments, **conversation.arguments}
        return replace(conversation, turns=messages, arguments=arguments)

    def _add_instruction(self, conversation: Conversation, instruction: str) -> Conversation:
        """The conversation with the task's own instruction, if it has no system message."""
        first, *rest = conversation.turns
        if first["role"] in ("system", "developer"):
            return conversation
        if self._takes_system:
            return replace(
                conversation, turns=({"role": "system", "content": instruction}, first, *rest)
            )
        instructed = {**first, "content": f"{instruction}\n{first['content']}"}
        return replace(conversation, turns=(instructed, *rest))

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """Tool-call format of the checkpoint; None if there is no template or no supported
        format."""
        return None if self.template is None else tool_format_of(self.template, self.tokenizer)

    def check_tools(self, example: Example) -> None:
        """Rejects tools that the template does not write into the prompt, and those whose calls
        cannot be parsed.

        Raises:
          ValueError: with the remedy.
        """
        self.check_shown(example)
        if self.template is None or not example.tools:
            return
        format, tools = self.tool_format, example_tools(example)
        if format is None:
            raise ValueError(
                f"the chat template calls tools ({', '.join(tools)}) in an unknown format, so "
                "that calls could not be parsed; known formats are "
                f"{', '.join(x.name for x in FORMATS)}: give --chat-template a file that calls "
                "them in one of these."
            )
        # Some templates reject tool outputs, which would be noticed only at the first call.
        call_text = format.render([Call(name, {}) for name in list(tools)[:1]])
        messages = attach_calls(format, tools, (("assistant", call_text), ("tool", "7")))
        before = self.conversation(example)
        before = replace(before, turns=(*before.turns, *messages[:1]))
        self.template.answer(before, messages[1:])

    @cached_property
    def _shows_tools_cache(self) -> dict[tuple[str, ...], bool]:
        """Cache of checked tools: true if the template writes them into the prompt."""
        return {}

    def check_shown(self, example: Example) -> None:
        """Rejects tools that the template does not write into the prompt.

        Raises:
          ValueError: with the remedy.
        """
        tools, template = example.tools, self.template
        if not tools or template is None:
            return
        if tools not in self._shows_tools_cache:
            schemas = [json.loads(tool) for tool in tools]
            try:
                names = list(example_tools(example))
                self._shows_tools_cache[tools] = shows_tools(template, schemas, names)
            except ValueError:  # it rejects the sample question, which proves nothing
                self._shows_tools_cache[tools] = True
        if not self._shows_tools_cache[tools]:
            raise ValueError(
                f"the chat template does not write tools ({', '.join(example_tools(example))}), "
                "so that the policy would never see them: give --chat-template a file that does, "
                "or leave the tools out."
            )

    @cached_property
    def written_fields(self) -> WrittenFields:
        """Fields that the template writes; for formats with a template."""
        assert self.template is not None
        return WrittenFields(self.template)

    def _check_written(self, conversation: Conversation, location: str) -> None:
        try:
            self.written_fields.check(conversation, ())
        except ValueError as error:
            raise ValueError(f"{location}: {error}") from error

    @cached_property
    def _takes_system(self) -> bool:
        """True if the template writes a system message; some reject or ignore one."""
        if self.template is None:
            return False
        probe = "an instruction to look for"
        try:
            return probe in self.template.render(
                Conversation.from_pairs((("system", probe), ("user", "a question")))
            )
        except TemplateRejection:
            return False

    def encode(self, example: Example) -> list[int]:
        """The tokens of a prompt.

        Raises:
          ValueError: for a conversation if there is no template, tools that the template does not
            write, a prompt of no tokens, and for input that the template or tokenizer rejects.
        """
        if self.template is None:
            ids = self._encode_text(example)
        else:
            self.check_shown(example)
            conversation = self.conversation(example)
            if example.location:  # of a record: requests to the server are answered as they are
                self._check_written(conversation, example.location)
            ids = self.template.encode(conversation)
        if not ids:
            raise ValueError(
                f"the prompt {example.prompt[:60]!r} has no token, and the tokenizer puts none "
                "before it, so nothing could be predicted from it: give a prompt with content."
            )
        return ids

    def _encode_text(self, example: Example) -> list[int]:
        """The tokens of a prompt if there is no template: it must be a single text."""
        messages = example.messages
        if len(messages) > 1 or (messages and messages[0][0] != "user"):
            raise ValueError(
                f"the prompt {example.prompt[:60]!r} is a conversation, and the model has no chat "
                "template to write it with: give --chat-template FILE, or texts as prompts."
            )
        if example.tools and example.record.get("tools"):
            raise ValueError(f"the prompt {example.prompt[:60]!r} {NO_TOOLS}")
        return self.tokenizer.with_prefix(self.tokenizer.encode(example.prompt))


def example_tools(example: Example) -> ToolParameters:
    """The tools of an example."""
    return parameters_by_tool([json.loads(tool) for tool in example.tools])


def prompt_format(run: PromptSettings, tokenizer: Tokenizer) -> PromptFormat:
    """The format of a run.

    Args:
      tokenizer: including the template, of the checkpoint or from `with_template`.

    Raises:
      ValueError: for a template that is not usable, and for a system prompt if there is no
        template.
    """
    template = None
    if run.chat_template != NO_TEMPLATE and tokenizer.usage.chat_template is not None:
        template = ChatTemplate(tokenizer, template_file(run))
    if run.system_prompt is not None and template is None:
        raise ValueError(
            f"system_prompt={run.system_prompt[:60]!r} needs a chat template to be written with, "
            "and there is none: give --chat-template FILE, or write it into the prompts."
        )
    if run.template_arguments and template is None:
        raise ValueError(
            f"chat_template_kwargs={json.dumps(run.template_arguments)} are for a chat template, "
            "and there is none: give --chat-template FILE, or leave them out."
        )
    return PromptFormat(tokenizer, template, run.system_prompt, run.template_arguments)


def with_template(run: PromptSettings, tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer of a new run, with the chat template of the name or file that the run has, if
    any.

    Raises:
      ValueError: for a file that cannot be read, and a named template whose end of a turn is no
        token of the tokenizer.
    """
    name = run.chat_template
    if name == NO_TEMPLATE:
        return with_turn_end(tokenizer)
    if name == CHECKPOINT_TEMPLATE:
        return with_turn_end(tokenizer, template_file(run))
    path = NAMED_TEMPLATES.get(name, Path(os.path.expanduser(name)))
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error.reason
        raise ValueError(
            f"chat_template={name!r} cannot be read ({reason}): give the path of a Jinja "
            f"template, {CHECKPOINT_TEMPLATE}, {NO_TEMPLATE}, or {' or '.join(NAMED_TEMPLATES)}."
        ) from error
    usage = replace(tokenizer.usage, chat_template=source, chat_date=today())
    ended = with_turn_end(tokenizer.with_usage(usage), name)
    if name in NAMED_TEMPLATES and ended.usage.turn_end is None and find_spec("jinja2"):
        raise ValueError(
            f"chat_template={name!r} ends a turn with a text that is no special token of this "
            f"tokenizer, whose ends are {_spelled_ends(tokenizer)}: choose another of "
            f"{', '.join(NAMED_TEMPLATES)}, or give the path of a Jinja template."
        )
    return ended


def _spelled_ends(tokenizer: Tokenizer) -> str:
    texts = {token: text for text, token in tokenizer.special_tokens.items()}
    return ", ".join(texts.get(token, str(token)) for token in tokenizer.stop_ids)


def template_file(run: PromptSettings) -> str | None:
    """The file of a run's chat template; None if unknown."""
    if run.chat_template not in (CHECKPOINT_TEMPLATE, NO_TEMPLATE):
        return run.chat_template
    folder = run.checkpoint
    if run.tokenizer is not None:
        folder = str(Path(os.path.expanduser(run.tokenizer)).parent)
    if folder is None:
        return None
    # In the order of `jrl.text.json_tokenizer.checkpoint_tokenizer`.
    for path in (Path(folder, name) for name in TEMPLATE_FILES):
        if path.exists() and (
            path.suffix == ".jinja" or '"chat_template"' in path.read_text(encoding="utf-8")
        ):
            return str(path)
    return folder


def encode_prompt(format: PromptFormat, example: Example, prompt_length: int) -> list[int]:
    """The ids of a prompt.

    Raises:
      ValueError: for a prompt longer than the prompt length, and as for `PromptFormat.encode`.
    """
    ids = format.encode(example)
    if len(ids) > prompt_length:
        raise ValueError(
            f"the prompt {example.prompt[:60]!r} has {len(ids)} tokens and "
            f"prompt_length={prompt_length}: raise --prompt-length."
        )
    return ids


def text_of(tokenizer: Tokenizer, ids: np.ndarray) -> str:
    """Text of sampled ids, without the token that ended the sequence and with a placeholder for
    other special tokens.

    Tokens that open or end reasoning are written out, as a verifier must locate its end.
    """
    return tokenizer.decode_special(_without_end(tokenizer, ids), UNREADABLE, REASONING_TOKENS)


def opened_reasoning(tokenizer: Tokenizer, prompt: Sequence[int]) -> str:
    """The mark with which a prompt leaves reasoning open, as some templates do, so that the
    policy's text starts inside of reasoning. Empty if there is none."""
    return opens_reasoning(tokenizer.decode_special(list(prompt)[-TAIL:], UNREADABLE))


def opened_turn(tokenizer: Tokenizer, prompt: Sequence[int]) -> str:
    """The end of a prompt that determines how the policy's turn begins; empty if there is none."""
    return opens_turn(tokenizer.decode_special(list(prompt)[-TAIL:], UNREADABLE))


def special_text_of(tokenizer: Tokenizer, ids: np.ndarray) -> str:
    """`text_of` with all special tokens written out."""
    return tokenizer.decode_special(_without_end(tokenizer, ids), UNREADABLE)


def _without_end(tokenizer: Tokenizer, ids: np.ndarray) -> list[int]:
    sampled = list(map(int, ids))
    return sampled[:-1] if sampled and sampled[-1] in tokenizer.stop_ids else sampled


def text_of_row(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """Text of a row that the network read and wrote, with special tokens written out."""
    return tokenizer.decode_special(list(tokens), UNREADABLE)


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The text of each token, with special tokens written out; their concatenation is the text.

    A token that ends within a character has an empty text; the token that completes the character
    has it.
    """
    texts: list[str] = []
    # Each token is decoded after the one before it: a tokenizer may drop a space at the start of a
    # text, which belongs to the token elsewhere.
    begin = end_of_last = 0
    for end in range(1, len(ids) + 1):
        before = tokenizer.decode_special(ids[begin:end_of_last])
        now = tokenizer.decode_special(ids[begin:end])
        if now.endswith("\ufffd") and end < len(ids):
            texts.append("")
            continue
        texts.append(now[len(before) :])
        begin, end_of_last = end_of_last, end
    return texts
