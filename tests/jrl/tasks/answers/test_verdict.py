"""Verdicts: agreement with the table of cases, and with math-verify."""

import logging
import subprocess
import sys
import time
import tomllib
from contextlib import suppress
from importlib import import_module
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jrl.tasks.answers.expression import NoExpression, TooLarge, read_expression
from jrl.tasks.answers.notation import plain_notation, tokens_of
from jrl.tasks.answers.numbers import NUMBER, read_statement
from jrl.tasks.answers.verdict import EVALUATED, RULES, Judge
from jrl.tasks.check import VERDICTS, load_cases


@pytest.fixture(scope="module")
def symbolic():
    """The module as in a worker, but with sympy's parser: the test's own texts are harmless."""
    return import_module("jrl.tasks.answers.symbolic")


@pytest.fixture(scope="module")
def judge(symbolic):
    return Judge(symbolic)


GROUPS = {(case.kind, case.reference): None for case in load_cases()}


def expected(case):
    if case.unevaluated:
        return "unevaluated"
    return {"right": "correct"}.get(case.verdict, case.verdict)


@pytest.mark.parametrize(("kind", "gold"), GROUPS)
def test_judge_agrees_with_table_of_cases(judge, kind, gold):
    group = [case for case in load_cases() if (case.kind, case.reference) == (kind, gold)]
    assert group
    found = {case.completion: judge(gold, case.completion) for case in group}
    assert found == {case.completion: expected(case) for case in group}


def test_table_of_cases_is_large_and_distinct():
    table = load_cases()
    assert len(table) >= 200
    assert len({(case.reference, case.completion) for case in table}) == len(table)
    assert {case.verdict for case in table} == set(VERDICTS)
    assert all(sum(case.verdict == verdict for case in table) >= 20 for verdict in VERDICTS)
    assert sum(bool(case.because) for case in table) >= 80


def test_reasons_of_table_name_its_cases():
    text = files("jrl.tasks").joinpath("cases.toml").read_text(encoding="utf-8")
    for group in tomllib.loads(text)["cases"]:
        given = {c for verdict in (*VERDICTS, "unevaluated") for c in group.get(verdict, ())}
        assert set(group.get("because", {})) <= given


def test_judge_accepts_unevaluated_by_rule_of_values(symbolic):
    """Unevaluated answers are correct, and all other verdicts are unchanged."""
    judge = Judge(symbolic, EVALUATED)
    for case in load_cases():
        if case.completion.strip():
            right = case.verdict == "right" or case.unevaluated
            assert (judge(case.reference, case.completion) == "correct") == right, case


def test_judge_refuses_unknown_rule(symbolic):
    with pytest.raises(
        ValueError, match="answers='exact' is not a rule: choose one of final, eval"
    ):
        Judge(symbolic, "exact")
    assert RULES == ("final", "evaluated")


NUMBERS = st.one_of(
    st.integers(-10_000, 10**7).map(str),
    st.integers(1000, 10**9).map(lambda n: f"{n:,}"),
    st.tuples(st.integers(-500, 500), st.integers(1, 999)).map(lambda n: f"{n[0]}.{n[1]}"),
    st.tuples(st.integers(-9, 9), st.sampled_from([7, 11, 13])).filter(lambda n: n[0]).map(
        lambda n: rf"\frac{{{n[0]}}}{{{n[1]}}}"
    ),
    st.tuples(st.integers(1, 6), st.sampled_from([7, 11])).map(lambda n: f"{n[0]}/{n[1]}"),
)  # fmt: skip
DECORATIONS = st.sampled_from(
    [
        *("{}", "{}.", "{},", "{};", "{}:", "**{}**", "**{}.**", "${}$", "${}$.", "$${}$$"),
        *(r"\({}\)", r"\[{}\]", r"\boxed{{{}}}", r"$\boxed{{{}}}$.", "#### {}", "#### {}."),
        *("#### **{}**", "The answer is {}.", "The answer is ${}$.", "the final answer is {}"),
        *("Answer: {}", "**Answer:** {}", "Final answer: {}\n", "So we get {}.", "It is ${}$."),
        *("First 3, then 4.\nThe answer is {}.", "= {}", "x = {}", "$x = {}$", "{} dollars"),
        *("{} km", "€{}", "£{}", "{} €", "She has {} pens.", "{}\ufffd\n", "\n\n {} \n"),
        *(r"Thus \boxed{{{}}} pens, as was asked in part 2.", "<answer> {} </answer>", "I say {}!"),
        *("The total of 3 and 5 and more is {}.", "It costs {} dollars in total.", "( {} )"),
    ]
)


def by_math_verify(gold, completion):
    from math_verify import parse, verify

    options = {"fallback_mode": "no_fallback", "parsing_timeout": None}
    golds, found = parse(f"${gold}$", **options), parse(completion, **options)
    return bool(golds and found) and verify(golds, found, timeout_seconds=None)


@pytest.fixture(scope="module")
def quiet():
    """Disables logging: math-verify warns of each text that it cannot read."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.slow
@pytest.mark.usefixtures("quiet")
@settings(max_examples=150, deadline=None, derandomize=True)
@given(NUMBERS, DECORATIONS, NUMBERS)
def test_judge_accepts_whatever_math_verify_accepts(gold, decoration, other):
    judge = Judge(import_module("jrl.tasks.answers.symbolic"))
    completion = decoration.format(gold)
    assert judge(gold, completion) == "correct"
    wrong = decoration.format(other)
    if (
        not by_math_verify(gold, wrong)
        and read_statement(gold).value != read_statement(other).value
    ):
        assert judge(gold, wrong) != "correct"


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.text("0123456789+-*/^(){}[]=., or\\frac sqrt!%π½<>$\n", max_size=60))
def test_read_statement_of_any_text(text):
    read_statement(text)
    with suppress(NoExpression, TooLarge):
        read_expression(tokens_of(plain_notation(text)))


@pytest.mark.parametrize(
    "text",
    [
        *("9" * 100_000, "1," * 50_000, "1 " * 50_000, "(" * 50_000, "1+" * 50_000, "-" * 50_000),
        *("9^" * 5_000 + "9", r"\frac{" * 5_000, r"\sqrt" * 5_000 + "9", "!" * 50_000 + "9"),
        *("**" * 50_000, "or " * 50_000, "answer is " * 20_000, "1 or " * 20_000, "½" * 50_000),
        *("3000!" * 400, "10^{1000000000}", "1e999999", "(3000!)^{40}", "2^{2^{2^{2^{2^{2}}}}}"),
        *("9999999^{39/64}", r"\sqrt[64]{" + "9" * 900 + "}", "1" + "0" * 3999, "x" * 100_000),
        *("^" * 50_000, "{" * 50_000, "$" * 50_001, "**a " * 20_000, "- 1\n" * 20_000),
    ],
)
def test_judge_of_long_and_deep_text_takes_no_time(judge, text):
    begin = time.process_time()
    assert judge("42", text) != "correct"
    assert judge("42", rf"\boxed{{{text}}}") != "correct"
    assert time.process_time() - begin < 2.0


# As files of problems write them.
GOLDS = [
    *(r"\frac{3}{4}", r"\text{Evelyn}", "(-2,1)", r"[0,\infty)", "x^3+3x-6", r"\text{(C)}", "18."),
    *(r"-1 \text{ or } 3", "3, 5, 7", r"10\%", r"6\text{ cm}", r"\sqrt{51}", r"144\pi", "y=2x+3"),
    *(r"\$36", "70.31", "4210_5", "2k+2", r"11\frac{1}{2}", r"10,\!000", r"\$32,\!000", "1,000"),
    *(r"\left( 3, \frac{\pi}{2} \right)", r"-\frac{35}{9}", r"90^\circ", r"x \in [-2,7]", "p - q"),
    *(
        r"\frac{1}{2}+\frac{\sqrt{3}}{2}i",
        r"\begin{pmatrix} -1/3 \\ 2/3 \end{pmatrix}",
        r"\emptyset",
    ),
    *(r"\frac{270}7\text{ degrees}", r"\{1\pm\sqrt{5},-2\}", r"1 \pm \sqrt{19}", r"0.\overline{3}"),
    *("2:3", "12:00 PM", "six", r"1.5 \times 10^{-3}", "A,C", "-2 < x < 3", "e^2", r"\ln 3", "n!"),
    *("f(x)=x^2", r"\frac{x+1}{x-1}", "5^{10}", r"7 \frac{1}{3}", r"\frac12", "2+3i", "-i", "04"),
    *(r"\pi r^2 h", "2 r h", r"\frac{1}{2} b h", "x^2 m", "V = l w h", r"2\pi m", "3 m"),
    *("No solution", "(x-1)(x+2)", r"\text{neither}", "10^9+7", "4:5:6", r"\binom{10}{3}", "0"),
]


@pytest.mark.parametrize("gold", GOLDS)
def test_judge_accepts_reference_in_usual_forms(judge, gold):
    forms = ["{}", "${}$", r"\boxed{{{}}}", "The answer is ${}$.", "**{}**", "Answer: {}"]
    forms += ["<answer>{}</answer>", "#### {}", r"So it is $\boxed{{{}}}$.", "<think>3?</think>{}"]
    found = {form: judge(gold, form.format(gold)) for form in forms}
    assert found == dict.fromkeys(forms, "correct")
    assert judge(gold, "It is 123456789, or so.") in ("wrong", "unparsable")


def test_read_statement_keeps_digits():
    read = {"1,234.50": "1234.5", "007": "7", ".5": "0.5", "1e-3": "1e-3", "17 + 25": "17+25"}
    found = {text: read_statement(text) for text in read}
    assert all(each.kind == NUMBER for each in found.values())
    assert {text: each.digits for text, each in found.items()} == read


def test_verdict_imports_no_sympy():
    """The trainer reads numbers too, with no extra installed."""
    folder = Path(__file__).parents[4] / "jrl" / "tasks"
    command = (
        f"import sys; sys.path.insert(0, {str(folder)!r}); import answers.verdict; "
        "sys.exit(any(name in sys.modules for name in ('sympy', 'math_verify', 'jrl', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", command]).returncode == 0
