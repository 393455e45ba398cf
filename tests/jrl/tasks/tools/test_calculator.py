"""Calculator: expressions against random trees worked out with fractions, and the tool."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jrl.tasks.tools.calculator import CALCULATOR, MAX_DEPTH, MAX_LENGTH, calculate, parse

numbers = st.integers(0, 99)
trees = st.recursive(
    numbers,
    lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner) | st.tuples(st.just("-"), inner),
    max_leaves=8,
)
blanks = st.sampled_from(["", " ", "  "])


def written(tree, blank: str) -> str:
    """The tree with a parenthesis around each part, so that precedence does not matter."""
    if isinstance(tree, int):
        return str(tree)
    parts = [part if isinstance(part, str) else written(part, blank) for part in tree]
    return f"({blank}{blank.join(parts)}{blank})"


def value(tree) -> Fraction:
    if isinstance(tree, int):
        return Fraction(tree)
    if len(tree) == 2:
        return -value(tree[1])
    left, operation, right = value(tree[0]), tree[1], value(tree[2])
    if operation == "/":
        return left / right
    return {"+": left + right, "-": left - right, "*": left * right}[operation]


def leaves(tree) -> list[int]:
    if isinstance(tree, int):
        return [tree]
    return [leaf for part in tree if not isinstance(part, str) for leaf in leaves(part)]


@given(trees, blanks)
def test_parse_agrees_with_random_trees(tree, blank):
    text = written(tree, blank)
    if len(text) > MAX_LENGTH:
        with pytest.raises(ValueError, match="an expression has at most"):
            parse(text)
        return
    expression = parse(text)
    assert list(expression.numbers) == leaves(tree)
    try:
        expected = value(tree)
    except ZeroDivisionError:
        with pytest.raises(ZeroDivisionError):
            expression.value()
    else:
        assert expression.value() == expected


# Without parentheses Python's own precedence is the oracle; the text is the test's, made of numbers
# and signs.
@given(st.lists(st.tuples(st.integers(1, 99), st.sampled_from("+-*/")), min_size=1, max_size=9))
def test_parse_precedence(chain):
    text = "".join(f"{number}{operation}" for number, operation in chain) + "7"
    in_fractions = "".join(f"Fraction({number}){operation}" for number, operation in chain)
    assert parse(text).value() == eval(in_fractions + "Fraction(7)")


# `st.text()` would first sort all of Unicode, for seconds.
any_text = st.lists(st.integers(0, 0x10FFFF).map(chr), max_size=30).map("".join)


@given(st.text("0123456789+-*/() ", max_size=30) | any_text)
def test_parse_reads_or_refuses_any_text(text):
    try:
        expression = parse(text)
    except ValueError:
        return
    try:
        expression.value()
    except ZeroDivisionError:
        assert "/" in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a number is missing before 'the end'"),
        ("1+", "a number is missing before 'the end'"),
        ("+1", r"a number is missing before '\+'"),
        ("1 2", "goes on after its expression with '2'"),
        ("(1", "a parenthesis is open before 'the end'"),
        ("(1 2", "a parenthesis is open before '2'"),
        ("1)", r"goes on after its expression with '\)'"),
        ("1.5", "no number or operation at position 1"),
        ("٣", "no number or operation at position 0"),
        ("(" * (MAX_DEPTH + 1) + "1", "parentheses and signs are open at a time"),
        ("-" * (MAX_DEPTH + 1) + "1", "parentheses and signs are open at a time"),
        ("1" * (MAX_LENGTH + 1), "text has 201 characters"),
    ],
)
def test_parse_refuses_text(text, message):
    with pytest.raises(ValueError, match=message):
        parse(text)


def test_parse_reads_deepest_and_longest_text():
    deepest = "(" * MAX_DEPTH + "1" + ")" * MAX_DEPTH
    assert parse(deepest).value() == 1
    assert parse("9" * MAX_LENGTH).value() == 10**MAX_LENGTH - 1


def test_calculate_never_evaluates_python():
    assert [calculate(text) for text in ("2*3", "(1+2)/6", "7-9", "-(2)")] == [
        "6",
        "1/2",
        "-2",
        "-2",
    ]
    for text in ("", "2**3", "__import__('os')", "1e9", "9" * 199, "1/0", "x"):
        with pytest.raises(ValueError):
            calculate(text)


def test_calculator_schema():
    assert CALCULATOR.schema == {
        "type": "function",
        "function": {
            "name": "calc",
            "description": "Computes an arithmetic expression exactly.",
            "parameters": {
                "type": "object",
                "properties": {
                    "expression": {
                        "type": "string",
                        "description": "Numbers, + - * / and parentheses, as in (3+4)*5.",
                    }
                },
                "required": ["expression"],
            },
        },
    }
