"""Files of prompts and answers: what they may hold, and how math-verify scores completions."""

import gzip
import importlib.util
import json
import os
import subprocess
import sys
import threading

import pytest
from annotations import unchecked

from jrl.tasks import load_task
from jrl.tasks.data.chats import load_chats
from jrl.tasks.data.fields import Fields
from jrl.tasks.data.files import _read_unique, jsonl, prompts_of, read_records
from jrl.tasks.data.prompt_list import FiniteTask, PromptList
from jrl.tasks.mixture import lists_of
from jrl.tasks.task import Example
from jrl.tasks.workers import pool
from jrl.tasks.workers import worker as worker_program
from jrl.tasks.workers.pool import Pool
from jrl.tasks.workers.process import Worker

GOLD = [
    *("42", "3/4", r"\frac{1}{2}", "x^2+1", "1,000", "(1,2)", "[0,5)", "12%", "-3.50", "3 cm"),
    *(r"\sqrt{2}", "2^{10}", "x=5", r"hence $\boxed{7}$", "5+5=10, so\n#### 10", r"\{1,2\}", "A"),
    r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
]

GARBAGE = [
    *(
        "",
        "   ",
        "\n",
        "zzz",
        "?!",
        "####",
        "((((",
        r"\boxed{",
        "$",
        "\0\1",
        "é∑",
        "\ud800",
        "____",
    ),
    *("the answer is 43", r"\frac{1}{0}", "9" * 50_000, "answer: " * 1000, "__import__('os')"),
]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module", autouse=True)
def _one_process():
    """Each loads sympy; `tests/jrl/tasks/workers/test_pool.py` has several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "default_workers", lambda: 1)
        yield


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    rows = [{"prompt": f"p{n}", "answer": gold, "n": n} for n, gold in enumerate(GOLD)]
    path = write(tmp_path_factory.mktemp("jsonl") / "gold.jsonl", rows)
    # The limit is for the machine's worst day; what is to time out would take years.
    made = jsonl(path, 0, seconds=3.0)
    yield made
    made.close()


def reasons(task, gold, *completions):
    verdicts = task.verify([Example("p", gold)] * len(completions), completions)
    assert all(verdict.score == (verdict.reason == "correct") for verdict in verdicts)
    return [verdict.reason for verdict in verdicts]


def test_gold_scores_full_marks(task):
    examples = [task.heldout(index) for index in range(task.heldout_size)]
    examples += [task.train(index) for index in range(len(GOLD) - task.heldout_size)]
    assert sorted(example.answer for example in examples) == sorted(GOLD)
    verdicts = task.verify(examples, [example.answer for example in examples])
    assert {verdict.reason for verdict in verdicts} == {"correct"}


def test_garbage_scores_nothing(task):
    found = dict(zip(GARBAGE, reasons(task, "42", *GARBAGE), strict=True))
    assert set(found.values()) <= {"wrong", "unparsable"}
    assert found[""] == found["zzz"] == found["####"] == "unparsable"
    assert found["the answer is 43"] == "wrong"


@pytest.mark.parametrize(
    ("gold", "completion", "reason"),
    [
        ("42", "The answer is 42.", "correct"),
        ("42", "first 41, then\n#### 42", "correct"),
        ("42", "first 42, then\n#### 41", "wrong"),
        ("42", "42.0", "correct"),
        ("1/2", "0.5", "correct"),
        ("x^2+1", "1+x^2", "correct"),
        ("x^2+1", "1", "wrong"),
        ("1", "x^2+1", "wrong"),
        ("1,000", "1000", "correct"),
        ("42", "$41$ or $43$", "wrong"),
        ("12", "1 2", "wrong"),
    ],
)
def test_comparisons(task, gold, completion, reason):
    assert reasons(task, gold, completion) == [reason]


def test_gold_that_cannot_be_read_never_scores(task):
    assert reasons(task, "?!", "?!", "42", "") == ["error", "error", "unparsable"]


def test_words_are_compared_as_text(task):
    found = reasons(task, "Paris", "paris.", "It is Paris.", "Paris or Rome", "42", "")
    assert found == ["correct", "correct", "wrong", "wrong", "unparsable"]


def test_a_power_tower_is_read_off_the_main_thread(task):
    found = []

    def verify():
        found.extend(reasons(task, "42", "42", "$9^{9^{9^{9}}}$", "$9^{9^{9^{9}}}$", "6*7", "41"))

    thread = threading.Thread(target=verify)
    thread.start()
    thread.join()
    # Nobody works such a number out, and so it takes no time.
    assert found == ["correct", "wrong", "wrong", "unevaluated", "wrong"]


def test_a_worker_that_fails_is_an_error():
    program = "print('{}', flush=True); input()"
    examples = [Example(f"p{n}", str(n)) for n in range(3)]
    workers = Pool(lambda: Worker([sys.executable, "-c", program]), 2)
    task = FiniteTask(PromptList("failing", examples, 0), workers, lambda example, text: {})
    assert [verdict.reason for verdict in task.verify(examples, ["1", "", "3"])] == [
        "error",
        "unparsable",
        "error",
    ]
    task.close()


def test_nothing_is_executed(tmp_path, task):
    trace = tmp_path / "trace"
    attack = f"__import__('pathlib').Path('{trace}').touch()"
    assert "correct" not in reasons(task, "42", attack, f"${attack}$", f"\\boxed{{{attack}}}")
    assert not trace.exists()


@pytest.mark.slow
def test_the_worker_does_not_load_jax():
    report = (
        "import runpy, sys; sys.argv = ['worker', 'math']\n"
        f"runpy.run_path({worker_program.__file__!r}, run_name='__main__')\n"
        "sys.exit('jax' in sys.modules or 'math_verify' not in sys.modules)"
    )
    question = json.dumps({"gold": "42", "completion": "42"})
    done = subprocess.run(
        [sys.executable, "-P", "-c", report], input=question, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1:] == ['{"score": 1.0, "reason": "correct"}']


def test_close_leaves_no_process(tmp_path):
    task = jsonl(write(tmp_path / "a.jsonl", [{"prompt": p, "answer": 7} for p in "ab"]), 0)
    pids = [w._process.pid for w in task._pool._workers if hasattr(w, "_process")]
    assert pids
    for pid in pids:
        os.kill(pid, 0)
    task.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    """Three hundred rows, twice: under two seeds."""
    rows = [{"prompt": f"{n}+{n}=", "answer": 2 * n} for n in range(300)]
    path = write(tmp_path_factory.mktemp("jsonl") / "numbers.jsonl", rows)
    made = [load_task(f"jsonl:{path}", seed) for seed in (0, 1)]
    yield made
    for task in made:
        task.close()


def test_split_and_passes(numbers):
    task, other = numbers
    heldout = [task.heldout(index).prompt for index in range(task.heldout_size)]
    size = 300 - len(heldout)
    assert 15 < len(heldout) < 45
    passes = [[task.train(n * size + index) for index in range(size)] for n in range(3)]
    prompts = [[example.prompt for example in one] for one in passes]
    assert all(len(set(one)) == size for one in prompts)
    assert prompts[0] != prompts[1]
    assert sorted(prompts[0]) == sorted(prompts[1]) == sorted(prompts[2])
    assert not set(prompts[0]) & set(heldout)
    # Neither side of the split depends on the seed; the order of training does.
    assert [other.heldout(index).prompt for index in range(other.heldout_size)] == heldout
    assert [other.train(index).prompt for index in range(size)] != prompts[0]
    assert task.train(size + 3) == passes[1][3]


def chats_of(kind, path, seed):
    return load_chats(f"{kind}:{path}", seed)


@pytest.mark.parametrize("read", [prompts_of, chats_of])
def test_the_order_does_not_depend_on_where_the_file_is(tmp_path, read):
    rows = [{"prompt": f"{n}+{n}=", "completion": str(2 * n)} for n in range(50)]
    orders = []
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        prompts = read("jsonl", str(write(tmp_path / folder / "numbers.jsonl", rows)), 0)
        indices = range(2 * len(prompts.train_prompts))
        orders.append([prompts.train(index).prompt for index in indices])
    assert orders[0] == orders[1]


def test_measured_lengths_and_characters(numbers):
    task, _ = numbers
    assert (task.max_prompt_length, task.max_response_length) == (len("299+299="), len("598"))
    assert task.characters == "+0123456789="


def test_indices(numbers):
    task, _ = numbers
    with pytest.raises(ValueError, match=rf"index={task.heldout_size} is out of range: .*in \[0"):
        task.heldout(task.heldout_size)
    with pytest.raises(ValueError, match="index=-1 is out of range"):
        task.train(-1)


@pytest.mark.slow
def test_two_rows_make_two_sides(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"prompt": "a", "answer": "1"}\r\n\n{"prompt": "b", "answer": "2"}'
    )
    task = jsonl(path, 0)
    assert task.heldout_size == 1
    assert {task.heldout(0).prompt, task.train(0).prompt} == {"a", "b"}
    assert task.train(0) == task.train(1)
    task.close()


def one(path, fields=None):
    """The only example of a file."""
    fields = Fields() if fields is None else fields
    (example,), _ = _read_unique("jsonl", path, fields, True, {})
    return example


@pytest.mark.parametrize(
    ("written", "answer"),
    [
        ("2.5", "2.5"),
        ("7", "7"),
        ("-0.50", "-0.50"),
        ("1e-7", "0.0000001"),
        ("2.5e3", "2500"),
        ("12345678901234567.25", "12345678901234567.25"),
    ],
)
def test_an_answer_may_be_a_number(tmp_path, written, answer):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"prompt": "a", "answer": {written}}}')
    assert one(path) == Example("a", answer)


@pytest.mark.parametrize(
    "written", ["NaN", "-Infinity", "1e999", "1e-400", "1e400000", f"1e{10**20}"]
)
def test_an_answer_that_is_no_number_to_write_out(tmp_path, written):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"prompt": "a", "answer": {written}}}')
    with pytest.raises(ValueError, match=r':1: field "answer": .*: write it as a text'):
        one(path)


@pytest.mark.slow
def test_numbers_are_checked_as_answers(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "half of 5", "answer": 2.5}\n{"prompt": "b", "answer": 1e1}\n')
    task = jsonl(path, 0)
    verdicts = task.verify(lists_of(task)[0].examples, ["It is \\boxed{5/2}", "\\boxed{10}"])
    assert [verdict.reason for verdict in verdicts] == ["correct", "correct"]
    task.close()


TURNS = [{"role": "system", "content": "Count."}, {"role": "user", "content": "1+1?"}]


def test_fields_have_the_names_that_they_are_given(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"q": "a", "gold": 1, "prompt": "no", "turns": TURNS}))
    assert one(path, Fields("q", "gold")) == Example("a", "1")
    messages = (("system", "Count."), ("user", "1+1?"))
    expected = Example("system: Count.\nuser: 1+1?", "1", messages)
    assert one(path, Fields("q", "gold", "turns")) == expected
    with pytest.raises(ValueError, match=r'no field "question" \(it has .*--prompt-field'):
        one(path, Fields("question", "gold"))


def test_a_conversation_takes_the_place_of_a_prompt(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": TURNS[1:], "answer": "2"}))
    assert one(path) == Example("1+1?", "2", (("user", "1+1?"),))
    path.write_text(json.dumps({"messages": TURNS, "prompt": "a", "answer": "2"}))
    assert one(path) == Example("a", "2")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], r'field "messages" is \[\]: it must be a list of {"role": ..., "content": ...}'),
        ("hi", r"""field "messages" is 'hi': it must be a list"""),
        (["hi"], r"""field "messages": message 1 is 'hi': write "role" and "content\""""),
        ([*TURNS, {"role": "user"}], r"""message 3: has no field "content" \(it has 'role'\)"""),
        ([{"role": "user", "content": [1]}], r'message 1: part 1 of "content" is 1: it must be'),
        ([{"role": "assistant", "content": "2"}], r"no user message precedes the assistant's turn"),
    ],
)
def test_conversations_that_are_refused(tmp_path, messages, message):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": messages, "answer": "2"}))
    with pytest.raises(ValueError, match=rf":1: .*{message}"):
        one(path)


GOOD = b'{"prompt": "a", "answer": "1"}\n'


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"has 0 examples; at least 2 are needed"),
        (b"\n  \n", r"has 0 examples; at least 2 are needed"),
        (GOOD, r"has 1 examples; at least 2 are needed"),
        (GOOD + b"{prompt: 1}\n", r":2: is not JSON \(.*\): write one"),
        (GOOD + b"\n" + b"[" * 100_000, r":3: is not JSON \(.*recursion.*\): write one"),
        (GOOD + b"[1]\n", r":2: holds a list: write an object"),
        (GOOD + b"\xff\n", r":2: is not UTF-8"),
        (GOOD + b'{"prompt": "b"}\n', r""":2: has no field "answer" \(it has 'prompt'\): add or"""),
        (b"{}\n" + GOOD, r':1: has no field "prompt" \(it has nothing\): add or rename it'),
        (GOOD + b'{"prompt": "b", "answer": null}', r':2: field "answer" is None: it must be a'),
        (GOOD + b'{"prompt": "b", "answer": true}', r':2: field "answer" is True: it must be a'),
        (GOOD + b'{"prompt": "b", "answer": " "}', r""":2: field "answer" is ' ': it must be"""),
        (GOOD + b'{"prompt": 3, "answer": "1"}', r':2: field "prompt" is 3: it must be a text'),
        (GOOD + b'{"prompt": "\\ud800", "answer": "1"}', r':2: field "prompt" has a lone'),
        (
            GOOD + b'{"prompt": "b", "answer": "2"}\n{"prompt": "a", "answer": 7}',
            r":3: the prompt of line 1 again, with another answer \('7' here, '1' there\)",
        ),
        (GOOD + b'{"prompt": "b", "answer": "?!"}', r":2: answer '\?!' cannot be checked \(it"),
        (GOOD + b'{"prompt": "b", "answer": "' + b"(" * 3000 + b'"}', r":2: .* cannot be checked"),
    ],
)
@unchecked()
def test_lines_that_are_refused(tmp_path, content, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.jsonl:? ?.*" + message) as raised:
        jsonl(path, 0, seconds=1.0)
    assert "\n" not in str(raised.value)


def test_files_as_they_are_published(tmp_path):
    """Compressed files and a JSON array have the same records as the lines."""
    rows = [{"prompt": f"{n}+1?", "answer": n + 0.50} for n in range(3)]
    lines = write(tmp_path / "a.jsonl", rows)
    expected = [record for _, record in read_records("jsonl", lines)]
    packed, array = tmp_path / "a.jsonl.gz", tmp_path / "a.json"
    packed.write_bytes(gzip.compress(lines.read_bytes()))
    array.write_text("\ufeff" + json.dumps(rows, indent=1), encoding="utf-8")
    for path in (packed, array):
        found = list(read_records("jsonl", path))
        assert [record for _, record in found] == expected
        assert [location for location, _ in found] == [f"{path}:{n}" for n in (1, 2, 3)]
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz: cannot be read \(Compressed file ended"):
        list(read_records("jsonl", packed))
    array.write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"a\.json: is a Parquet file: give parquet:.*a\.json"):
        list(read_records("jsonl", array))
    array.write_text("[1\n")
    with pytest.raises(ValueError, match=r"a\.json:1: is not JSON .*, or one JSON array of them"):
        list(read_records("jsonl", array))


@pytest.mark.slow
def test_files_that_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"absent: cannot be read \(No such file or directory\)"):
        load_task(f"jsonl:{tmp_path / 'absent'}", 0)
    with pytest.raises(ValueError, match=r"cannot be read \(Is a directory\)"):
        load_task(f"jsonl:{tmp_path}", 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "extra"), [("jsonl:a.jsonl", r"\.\[math\]"), ("gym:gcd", r"\.\[gym\]")]
)
def test_a_missing_library_is_named(monkeypatch, spec, extra):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("jrl.tasks.data.files.find_spec", lambda name: None)
    monkeypatch.setattr("jrl.tasks.gym.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=rf'is not installed: run pip install -e "{extra}"'):
        load_task(spec, 0)


def answered(count, unreadable):
    """Lines of which some have an answer that cannot be checked."""
    answers = ["?!" if line in unreadable else str(line) for line in range(1, count + 1)]
    return "".join(
        json.dumps({"prompt": f"p{a}{n}", "answer": a}) + "\n" for n, a in enumerate(answers)
    )


def test_unreadable_answers_are_left_out_and_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(answered(40, {7, 30}))
    task = jsonl(path, 0, workers=1)
    try:
        (prompts,) = lists_of(task)
        assert sorted(prompts.unreadable) == [f"{path}:30", f"{path}:7"]
        assert len(prompts.examples) == 38
        assert all(example.answer != "?!" for example in prompts.examples)
    finally:
        task.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("unreadable", "choice", "message"),
    [
        ({7}, "refuse", r":7: answer '\?!' cannot be checked"),
        (set(range(1, 9)), "drop", ":1: 8 of 40 answers cannot be checked; the first is answer"),
        ({7}, "ignore", "unreadable_answers='ignore' is unknown: choose one of drop, refuse"),
    ],
)
def test_unreadable_answers_are_an_error(tmp_path, unreadable, choice, message):
    path = tmp_path / "a.jsonl"
    path.write_text(answered(40, unreadable))
    with pytest.raises(ValueError, match=message):
        jsonl(path, 0, workers=1, unreadable=choice)
