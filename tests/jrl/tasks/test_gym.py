"""Generators of reasoning-gym: those that can be used, those that are refused, and their scores."""

import re

import pytest
from tiers import full_but

from jrl.tasks import Verdict, load_task
from jrl.tasks.gym import gym
from jrl.tasks.load import _parse_options
from jrl.tasks.task import Example
from jrl.tasks.workers import pool
from jrl.tasks.workers.process import Worker

# The library in a process of its own takes most of a second.
NAMES = full_but(["spell_backward", "basic_arithmetic"], "spell_backward")


@pytest.fixture(scope="module", autouse=True)
def _one_process():
    """Each loads the library; `tests/jrl/tasks/workers/test_pool.py` has several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "default_workers", lambda: 1)
        yield


@pytest.fixture(scope="module", params=NAMES)
def task(request):
    made = gym(request.param, 3, size=200)
    yield made
    made.close()


def scores(task, example, *completions):
    return task.verify([example] * len(completions), completions)


def test_gold_scores_full_marks_and_garbage_none(task):
    examples = [task.train(index) for index in range(20)] + [task.heldout(0)]
    verdicts = task.verify(examples, [example.answer for example in examples])
    assert verdicts == [Verdict(1.0, "correct")] * 21
    garbage = ["", " ", "zzz", "é∑\ud800", "\0", "((((", "[[1, 2], [3]]", "?" * 100_000]
    verdicts = scores(task, examples[0], *garbage)
    assert {verdict.score for verdict in verdicts} == {0.0}
    assert [verdict.reason for verdict in verdicts[:2]] == ["unparsable"] * 2


ANSWERED = ["{}", "{}\n", " {} ", "<answer>{}</answer>", "<answer> {}\n</answer>", "{}\ufffd"]
ANSWERED += [
    r"\boxed{{{}}}",
    "#### {}",
    "<think>no</think>\n\n{}",
    "So: <answer>{}</answer> I say.",
]


def test_the_answer_is_scored_and_not_the_completion(task):
    assert_scores_the_answer(task)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["number_sorting", "time_intervals", "family_relationships", "countdown"]
)
def test_the_answer_is_scored_whatever_the_scorer_makes_of_a_text(name):
    """Some of the library's give nothing, others a share, for a text around the answer."""
    made = gym(name, 3, size=20)
    try:
        assert_scores_the_answer(made)
    finally:
        made.close()


def assert_scores_the_answer(task):
    example = task.train(0)
    verdicts = scores(task, example, *(form.format(example.answer) for form in ANSWERED))
    assert verdicts == [Verdict(1.0, "correct")] * len(ANSWERED)
    cut = [f"<think>It is {example.answer}", f"<think>a</think>{example.answer}<think>", "<answer>"]
    found = scores(task, example, *cut)
    assert [verdict.reason for verdict in found[:2]] == ["unparsable"] * 2
    assert all(verdict.score < 1 for verdict in found)


def test_a_chat_model_is_asked_as_the_library_asks(task):
    from reasoning_gym.utils import SYSTEM_PROMPTS

    for example in (task.train(0), task.heldout(0)):
        assert example.instruction == SYSTEM_PROMPTS["default"]
        assert "<answer>" in example.instruction
        assert example.messages == ()  # if there is no template, the policy reads the prompt alone


@pytest.mark.slow
def test_split_lengths_and_characters(task):
    heldout = [task.heldout(index) for index in range(task.heldout_size)]
    train = [task.train(index) for index in range(200 - task.heldout_size)]
    assert 5 < len(heldout) < 40
    assert not {example.prompt for example in heldout} & {example.prompt for example in train}
    assert max(len(example.prompt) for example in heldout + train) == task.max_prompt_length
    assert max(len(example.answer) for example in heldout + train) == task.max_response_length
    seen = set().union(*(example.prompt + example.answer for example in heldout + train))
    assert seen == set(task.characters)


@pytest.mark.slow
def test_seed_and_index_decide(task):
    name = task.name.removeprefix("gym:")
    others = [gym(name, seed, size=200) for seed in (3, 400)]
    streams = [[made.train(index) for index in range(10)] for made in (task, *others)]
    for other in others:
        other.close()
    assert streams[0] == streams[1] != streams[2]


@pytest.mark.slow
def test_load_task():
    task = load_task("gym:gcd", 0)
    assert task.name == "gym:gcd"
    task.close()


@pytest.mark.slow
def test_partial_credit_is_named():
    task = gym("fraction_simplification", 0, size=8)  # its scorer gives a hundredth for anything
    assert scores(task, task.train(0), "zzz") == [Verdict(0.01, "partial")]
    task.close()


# Whether the metadata of a row have an answer in place of the missing one.
UNANSWERED = {
    "graph_color": True,
    "rubiks_cube": True,
    "propositional_logic": True,
    "rush_hour": False,
    "boxnet": False,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", UNANSWERED)
def test_generator_without_answers_scores_and_takes_example_answers(name):
    task = gym(name, 0, size=12)
    examples = [task.train(index) for index in range(8)]
    answers = [example.answer for example in examples]
    assert [bool(answer) for answer in answers] == [UNANSWERED[name]] * 8
    scored = [verdict.score for verdict in task.verify(examples, answers)]
    assert scored == [float(UNANSWERED[name])] * 8
    assert all(score < 0.1 for score in (v.score for v in scores(task, examples[0], "zzz", "{}")))
    task.close()


@pytest.mark.slow
def test_what_a_scorer_raises_is_an_error():
    task = gym("prime_factorization", 0, size=8)
    example = task.train(0)
    verdicts = scores(task, example, "zzz", example.answer)
    assert [verdict.reason for verdict in verdicts] == ["error", "correct"]
    task.close()


# Their scorers give the completion to `eval`, or to sympy's parser, which does.
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["spiral_matrix", "n_queens", "countdown", "simple_integration"],
)
def test_nothing_is_executed(tmp_path, name):
    trace = tmp_path / "trace"
    attack = f"__import__('pathlib').Path('{trace}').touch()"
    task = gym(name, 0, size=4)
    example = task.train(0)
    gold, attacked, listed = scores(task, example, example.answer, attack, f"[{attack}]")
    assert gold.reason == "correct"
    assert attacked.score < 0.1
    assert listed.score < 0.1
    assert not trace.exists()
    if name == "simple_integration":
        assert scores(task, example, f"3 + {example.answer}")[0].reason == "correct"
    task.close()


REFUSED = [
    ("basic_arithmetc", r"is not a generator of reasoning-gym: did you mean basic_arithmetic or "),
    ("qqqqqq", r"is not a generator of reasoning-gym: see reasoning_gym\.factory\.DATASETS"),
    ("list_functions", r"row 0 is not the same twice for one seed"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "message"), REFUSED)
def test_generators_that_are_refused_leave_no_process(name, message, monkeypatch):
    closed, close = [], Worker.close
    monkeypatch.setattr(Worker, "close", lambda self: (closed.append(self), close(self)))
    with pytest.raises(ValueError, match=rf"task=gym:{name} .*{message}"):
        gym(name, 0, size=8)
    assert len(closed) == 1


@pytest.mark.slow
def test_a_slow_generator_is_refused():
    with pytest.raises(ValueError, match=r"gave 0 of 64 prompts within 1 seconds: choose a faster"):
        gym("knight_swap", 0, size=64, load_seconds=1.0)


@pytest.mark.slow
def test_a_prompt_of_another_task(task):
    with pytest.raises(ValueError, match=r"examples has the prompt 'nobody asked'.*seed=3: verify"):
        task.verify([Example("nobody asked", "1")], ["1"])


@pytest.mark.slow
def test_generators_take_options():
    task = gym("basic_arithmetic", 0, size=8, options={"min_terms": 2, "max_terms": 2})
    assert task.name == "gym:basic_arithmetic,min_terms=2,max_terms=2"
    terms = [len(re.findall(r"[0-9]+", task.train(index).prompt)) for index in range(6)]
    assert set(terms) == {2}
    task.close()
    with pytest.raises(ValueError, match=r"gym:gcd,terms=3 cannot be .*unexpected keyword.*terms"):
        gym("gcd", 0, size=8, options={"terms": 3})


@pytest.mark.slow
def test_options_are_read_from_the_name():
    assert _parse_options("", 'gcd,min_terms=3,names=["a","b"],mode=odd') == (
        "gcd",
        {"min_terms": 3, "names": ["a", "b"], "mode": "odd"},
    )
    with pytest.raises(ValueError, match="has a twice"):
        _parse_options("gym:gcd,a=1,a=2", "gcd,a=1,a=2")
