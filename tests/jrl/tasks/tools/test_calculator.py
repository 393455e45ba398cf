"""The calculator."""

import pytest

from jrl.tasks.tools.calculator import CALCULATOR, calculate


def test_the_calculator_parses_and_never_evaluates():
    assert [calculate(text) for text in ("2*3", "(1+2)/6", "7-9", "-(2)")] == [
        "6",
        "1/2",
        "-2",
        "-2",
    ]
    for text in ("", "2**3", "__import__('os')", "1e9", "9" * 199, "1/0", "x"):
        with pytest.raises(ValueError):
            calculate(text)


def test_what_the_policy_is_told_of_it():
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
