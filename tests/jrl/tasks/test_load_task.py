"""Tasks by name, and the replacement of sympy's parser."""

import pytest
import sympy

from jrl.tasks import Task, load_task
from jrl.tasks.load import BUILT_IN
from jrl.tasks.workers.worker import parse_expr


@pytest.mark.parametrize("name", list(BUILT_IN))
def test_built_in_tasks_by_name(name):
    task = load_task(name, 5)
    assert isinstance(task, Task)
    assert task.name == name
    assert task.train(0) == BUILT_IN[name](5).train(0)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("srot", r"task='srot' is unknown: did you mean sort\? The tasks are sort, addition, scr"),
        ("", r"task='' is unknown: The tasks are sort, .*, jsonl:PATH, .*gym:NAME.*file\.py:make"),
        ("json:a.jsonl", r"task='json:a\.jsonl' is unknown: did you mean jsonl or "),
        ("jsonl", r"task='jsonl' is unknown: did you mean jsonl\?"),
        ("gym:", r"task='gym:' is unknown: did you mean gym\?"),
        ("scratchpad:1", r"task='scratchpad:1': operands have 2 to 64 digits"),
        ("scratchpad:65", r"task='scratchpad:65': operands have 2 to 64 digits"),
        ("scratchpad:9-5", r"task='scratchpad:9-5': .* the shortest no more than the longest"),
        ("scratchpad:-5", r"task='scratchpad:-5' is unknown"),
    ],
)
def test_unknown_names(spec, message):
    with pytest.raises(ValueError, match=message):
        load_task(spec, 0)


def test_paths_without_their_kind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "a.csv", "a.tsv", "own.py", "a.parquet"):
        (tmp_path / name).touch()
    for spec, fix in {
        "a.jsonl": r"give jsonl:a\.jsonl",
        "a.parquet": r"give parquet:a\.parquet",
        "own.py": r"give own\.py:NAME",
        "a.csv": r"give csv:a\.csv",
        "a.tsv": r"give csv:a\.tsv",
        ".": r"give parquet:\.",
    }.items():
        with pytest.raises(ValueError, match=rf"task='{spec}' is a path without its kind: .*{fix}"):
            load_task(spec, 0)


@pytest.mark.parametrize(
    "text",
    [
        *("2", "-3", "2.50", "1/3", "3*x**2 - x/2 + 7", "2*exp(x)*sin(3*x)", "pi*E", "--+x", "I*y"),
        *("sqrt(2)*log(x)", "Integral(x*cos(x), x)", "x - (y - z)", "2**-1", "x**(1/2)"),
    ],
)
def test_expressions_read_as_sympy_does(text):
    assert parse_expr(text) == sympy.parse_expr(text)


def test_names_given_to_the_parser_come_first():
    x = sympy.Symbol("E", positive=True)
    assert parse_expr("2*E", local_dict={"E": x}) == 2 * x


def test_load_task_keeps_unevaluated_answer():
    tower = parse_expr("9**9**9**9", evaluate=False)
    assert isinstance(tower, sympy.Pow)
    assert str(parse_expr("1 + 2", evaluate=False)) == "1 + 2"


@pytest.mark.parametrize(
    "text",
    [
        *("", "1 +", "x.real", "__import__('os')", "[1]", "x[0]", "lambda: 1", "open(x)", "True"),
        *("'a'", "x if y else z", "sin(x, evaluate=x)", "(1)(2)", "2(3)", "1; 2", "x = 1", "1j"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*object is not callable:SyntaxWarning")  # ast.parse on 2(3)
def test_anything_else_is_refused(text):
    with pytest.raises(ValueError, match="is not an expression"):
        parse_expr(text)
