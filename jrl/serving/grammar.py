"""Constraints of a choice: texts of a rule, tool calls in the checkpoint's format, least tokens.

The library of grammars is llguidance, which computes the set of allowed next tokens.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import numpy as np

from jrl.rollout.adjustments import WORD_BITS, Constraint
from jrl.serving.api.fields import ApiError, invalid_argument
from jrl.serving.api.structured import TextRule
from jrl.serving.api.tools import ANY_OBJECT, ToolUse
from jrl.serving.transcript import TokenStrings
from jrl.tasks.tools.call_format import ToolFormat, to_json
from jrl.tasks.tools.calls import Call
from jrl.text.located import special_pattern
from jrl.text.tokenizer import Tokenizer

ARGUMENTS = {"probe": 1}
"""Arguments of a sample call that shows the position of JSON in a format."""
NO_PARAMETERS: Mapping[str, Any] = {"properties": {}}
"""Schema of a tool that specifies none and takes no arguments."""
CLOSING: Mapping[str, Any] = {"additionalProperties": False}
ENUMERATING = frozenset(
    ("type", "properties", "required", "title", "description", "$defs", "definitions", "$schema")
)
"""Keywords of a schema that names all arguments of its tool."""
LAYOUT, ONE_LINE = r"(\n[ \t]{0,32}| )?", " ?"
"""Blanks between two tokens of JSON, indented or on one line; bounded, as small policies may
generate blanks without end."""
MAX_RULE, MAX_PROPERTIES = 2**16, 500
"""Limits of a rule: its characters, and the properties of an object of a schema."""
MAX_STATES, MAX_ITEMS = 200_000, 5000
"""Limits of the library's work: expressions of a regular expression (a million, its default, take
four seconds), and items of a parser's row, four for each optional property."""
ANYTHING = r"/(.|\n)*/"
"""Rule of arguments in formats without JSON."""


class GrammarConstraint:
    """Set of tokens that may continue a choice in a grammar, from a matcher at its start."""

    def __init__(self, matcher: Any, tokenizer: Tokenizer):
        self._matcher, self._num_words = matcher, -(-tokenizer.vocab_size // WORD_BITS)
        self._ends = np.zeros(self._num_words, np.uint32)
        for token in tokenizer.stop_ids:
            self._ends[token // WORD_BITS] |= np.uint32(1 << token % WORD_BITS)

    def allowed(self) -> np.ndarray:
        if self._matcher.is_stopped():  # also after an error, such as a limit of its resources
            return self._ends
        # A copy, padded to the number of ids of the network, which may exceed the vocabulary.
        words = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: self._num_words]
        words = np.pad(words, (0, self._num_words - len(words)))
        return words if words.any() else self._ends

    def accept(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._matcher.consume_token(token)

    @property
    def failure(self) -> str | None:
        return _reason(self._matcher.get_error()) if self._matcher.is_error() else None


class LeastTokens:
    """Constraint by which a choice does not end before a number of tokens.

    Args:
      least: tokens of the choice.
      ends: tokens that end it.
      inner: another constraint of the choice, which it may end earlier if nothing else is left.
    """

    def __init__(
        self, least: int, ends: Sequence[int], vocab_size: int, inner: Constraint | None = None
    ):
        self._least, self._count, self._inner = least, 0, inner
        self._all, self._ends = (np.zeros(-(-vocab_size // WORD_BITS), np.uint32) for _ in range(2))
        for words, tokens in ((self._all, range(vocab_size)), (self._ends, ends)):
            ids = np.asarray(tokens, np.int64)
            bits = np.uint32(1) << (ids % WORD_BITS).astype(np.uint32)
            np.bitwise_or.at(words, ids // WORD_BITS, bits)

    def allowed(self) -> np.ndarray:
        words = self._all if self._inner is None else self._inner.allowed()
        others = words & ~self._ends
        return others if self._count < self._least and others.any() else words

    def accept(self, tokens: Sequence[int]) -> None:
        self._count += len(tokens)
        if self._inner is not None:
            self._inner.accept(tokens)

    @property
    def failure(self) -> str | None:
        return None if self._inner is None else self._inner.failure


class Grammar:
    """A grammar, compiled for a tokenizer: a matcher of llguidance at its start."""

    def __init__(self, matcher: Any, tokenizer: Tokenizer):
        self._matcher, self._tokenizer = matcher, tokenizer

    def start(self) -> GrammarConstraint:
        """Constraint of a choice, at its start."""
        return GrammarConstraint(self._matcher.deep_copy(), self._tokenizer)


class GrammarCompiler:
    """Compiler of grammars for a tokenizer; its tables are built at the first call."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def compile(
        self, rule: TextRule | None, tools: ToolUse | None, format: ToolFormat | None
    ) -> Grammar:
        """Grammar of a choice.

        Args:
          rule: of the text; None if a tool must be called.
          tools: that may be called in place of the text, or must be; None without.
          format: of their calls.

        Raises:
          ApiError: if the library is not installed, and for a rule that is too large or that it
            rejects.
        """
        must_call = tools is not None and tools.choice == "required"
        calls = tools is not None and tools.choice != "none"
        param = "tool_choice" if must_call or rule is None else rule.param
        rules, grammar = list[str](), None
        if rule is not None and not must_call:
            check_size(rule.param, rule.value)
            if rule.kind == "grammar" and calls:
                raise invalid_argument(
                    param, f"{param} does not go with tools: leave them out, or tool_choice=none."
                )
            grammar = rule.value if rule.kind == "grammar" else None
            rules += [] if rule.kind == "grammar" else [text_rule_of(rule)]
        if tools is not None and calls:
            assert format is not None
            for index, schema in enumerate(tools.schemas):
                check_size(f"tools[{index}]", schema)
            rules += [
                call_rule(format, self._tokenizer, name, parameters)
                for name, parameters in tools.parameters.items()
                if tools.name in (None, name)
            ]
        if find_spec("llguidance") is None:
            raise ApiError(
                400,
                f"{param} needs llguidance, which this server does not have: run pip install -e "
                '".[grammar]" in its clone.',
                param,
                "unsupported_parameter",
            )
        from llguidance import LLMatcher, LLParserLimits

        source = f"start: {' | '.join(rules)}" if grammar is None else grammar
        compiled = LLMatcher.grammar_from_lark(source)
        where = "tools" if must_call else param
        limits = LLParserLimits(initial_lexer_fuel=MAX_STATES, max_items_in_row=MAX_ITEMS)
        if error := LLMatcher.validate_grammar(compiled, self._tables, limits=limits):
            raise _rejected(where, error)
        matcher = LLMatcher(self._tables, compiled, log_level=0, limits=limits)
        # A regular expression is built here, for what it allows first, and in no row's step.
        matcher.compute_bitmask()
        if matcher.is_error():
            raise _rejected(where, matcher.get_error())
        return Grammar(matcher, self._tokenizer)

    @cached_property
    def _tables(self) -> Any:
        """The vocabulary in llguidance's form."""
        from llguidance import LLTokenizer, TokenizerWrapper

        vocabulary = TokenizerWrapper(_Vocabulary(self._tokenizer))
        return LLTokenizer(vocabulary, eos_token=list(self._tokenizer.stop_ids))


class _Vocabulary:
    """Vocabulary of a tokenizer, with the members that llguidance reads."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer, strings = tokenizer, TokenStrings(tokenizer)
        self.eos_token_id, self.bos_token_id = tokenizer.eos_id, tokenizer.bos_id
        # An unknown token may have an id outside of the vocabulary.
        self.special_token_ids = sorted(i for i in tokenizer.special_ids if i >= 0)
        names = {identity: name for name, identity in tokenizer.special_tokens.items()}
        self.tokens = [
            # Each id has distinct bytes, including ids without a token.
            names.get(token, f"<|token {token}|>").encode()
            if token in tokenizer.special_ids
            else strings.bytes_of(token)
            for token in range(tokenizer.vocab_size)
        ]

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)


def _rejected(param: str, error: str) -> ApiError:
    reason = _reason(error).rpartition("JSON schema: ")[2]
    what = "schema" if "JSON schema" in error or param == "tools" else "grammar"
    return invalid_argument(param, f"{param} has a {what} that is not supported: {reason}.")


def _reason(error: str) -> str:
    """The first line of an error of the library; the others show the grammar."""
    return error.strip().split("\n")[0][:200]


def check_size(param: str, value: Any) -> None:
    """Raises ApiError for a rule that would take long to compile, which is quadratic in the number
    of optional properties of an object."""
    size = len(value) if isinstance(value, str) else len(json.dumps(value, ensure_ascii=False))
    if size > MAX_RULE:
        raise invalid_argument(
            param, f"{param} has {size} characters: write it in {MAX_RULE} at most."
        )
    left = [value]
    while left:
        each = left.pop()
        properties = each.get("properties") if isinstance(each, Mapping) else None
        if isinstance(properties, Mapping) and len(properties) > MAX_PROPERTIES:
            raise invalid_argument(
                param,
                f"{param} has an object with {len(properties)} properties: give one at most "
                f"{MAX_PROPERTIES}, or nest them.",
            )
        if isinstance(each, Mapping):
            left += each.values()
        elif isinstance(each, list | tuple):
            left += each


def text_rule_of(rule: TextRule) -> str:
    """Rule of a grammar for a text that is no grammar itself."""
    if rule.kind == "json":
        return json_rule(rule.value)
    if rule.kind == "choice":
        return " | ".join(json.dumps(text, ensure_ascii=False) for text in rule.value)
    # A slash ends a regular expression of Lark, and so does the end of the line.
    pattern = re.sub(r"(?s)\\.|/", lambda m: "\\/" if m[0] == "/" else m[0], rule.value)
    return f"/{pattern}/".replace("\n", "\\n")


def json_rule(schema: Mapping[str, Any], blanks: str = LAYOUT) -> str:
    """Rule of a grammar: JSON of a schema."""
    return f"%json {json.dumps({'x-guidance': {'whitespace_pattern': blanks}, **schema})}"


def call_rule(
    format: ToolFormat, tokenizer: Tokenizer, name: str, parameters: Mapping[str, Any]
) -> str:
    """Rule of a grammar: one call of a tool, with arguments of its schema if the format writes
    JSON, and with any arguments otherwise."""
    text, arguments = format.render([Call(name, ARGUMENTS)]), to_json(ARGUMENTS)
    before, separator, after = text.partition(arguments)
    if separator:
        schema = json_rule(_arguments_schema(parameters or NO_PARAMETERS), ONE_LINE)
        return " ".join([*_literals(before, tokenizer), schema, *_literals(after, tokenizer)])
    before = text[: text.index(name) + len(name)]
    return " ".join([*_literals(before, tokenizer), ANYTHING])


def _arguments_schema(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Schema of an object of arguments. Additional arguments are allowed only if it says so, as
    tools take none, though JSON schemas allow them by default."""
    closes = "properties" in parameters and parameters.keys() <= ENUMERATING
    return {**ANY_OBJECT, **parameters, **(CLOSING if closes else {})}


def _literals(text: str, tokenizer: Tokenizer) -> list[str]:
    """A text as terms of a rule, with special tokens by their ids."""
    tokens = tokenizer.special_tokens
    return [
        f"<[{tokens[part]}]>" if part in tokens else json.dumps(part, ensure_ascii=False)
        for part in re.split(f"({special_pattern(tokens)})", text)
        if part
    ]
