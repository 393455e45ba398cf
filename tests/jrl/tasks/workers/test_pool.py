"""Pool of workers: answers in order, a time limit each, and no process left."""

import sys
import threading
import time

import pytest
from confinement import runs

from jrl.tasks.workers.pool import MAX_DEFAULT_WORKERS, QUESTIONS_PER_WORKER, Pool, default_workers
from jrl.tasks.workers.process import Worker, WorkerEnded

# Answers with its process and how often it was asked; does on demand what third-party code may do.
PROGRAM = """
import json, os, sys, time
print("{}", flush=True)
asked, ready = 0, set()
for line in sys.stdin:
    question = json.loads(line)
    if "prepare" in question:
        time.sleep(question["prepare"] / 1000)
        ready.add(question["prepare"])
        print("{}", flush=True)
        continue
    asked += 1
    time.sleep(question.get("sleep", 0))
    if "once" in question and not os.path.exists(question["once"]):
        open(question["once"], "w").close()
        os.kill(os.getpid(), 9)
    if "exit" in question:
        os._exit(question["exit"])
    answer = {"pid": os.getpid(), "asked": asked, "ready": sorted(ready)}
    print(json.dumps(question | answer), flush=True)
"""
COMMAND = [sys.executable, "-S", "-c", PROGRAM]


@pytest.fixture
def make():
    """Makes pools, and closes them."""
    made = []

    def pool(size, seconds=20.0, **options):
        made.append(Pool(lambda: Worker(COMMAND, seconds=seconds), size, **options))
        return made[-1]

    yield pool
    for one in made:
        one.close()


def test_pool_answers_in_order_of_questions(make):
    # The first of each worker's is slow, so that all are at work when it ends.
    questions = [{"n": n, "sleep": 0.3 * (n < 3)} for n in range(40)]
    answers = make(3).ask_all(questions)
    assert [answer["n"] for answer in answers] == list(range(40))
    assert len({answer["pid"] for answer in answers}) == 3
    assert len({answer["pid"] for answer in answers[:3]}) == 3


@pytest.mark.slow
def test_pool_replaces_worker_that_hangs(make):
    """Each answer has its own time limit; the worker that hangs is killed and replaced."""
    pool = make(2, seconds=1.0)
    pids = {answer["pid"] for answer in pool.ask_all([{"sleep": 0.2}] * 2 * QUESTIONS_PER_WORKER)}
    assert len(pids) == 2
    questions = [
        {"n": n, **({"sleep": 600} if n in (0, 5) else {})} for n in range(4 * QUESTIONS_PER_WORKER)
    ]
    begin = time.monotonic()
    answers = pool.ask_all(questions)
    for n, answer in enumerate(answers):
        if n in (0, 5):
            assert isinstance(answer, TimeoutError)
        else:
            assert answer["n"] == n
    # Both at the same time or one after the other, and the time of a start; not one per question.
    assert time.monotonic() - begin < 10
    after = {answer["pid"] for answer in pool.ask_all([{"sleep": 0.2}] * 2 * QUESTIONS_PER_WORKER)}
    gone = [pid for pid in pids if not runs(pid)]
    assert gone and len(after) == 2 and not after & set(gone)


def test_pool_returns_error_of_worker_that_dies(make):
    answers = make(2).ask_all([{"n": n, **({"exit": 3} if n == 4 else {})} for n in range(9)])
    assert isinstance(answers[4], WorkerEnded)
    assert [answer["n"] for answer in answers if not isinstance(answer, Exception)] == [
        *range(4),
        *range(5, 9),
    ]


def test_pool_asks_again_after_killed_worker(make, tmp_path):
    questions = [{"n": n, **({"once": str(tmp_path / "killed")} if n == 2 else {})} for n in (1, 2)]
    assert [answer["n"] for answer in make(1).ask_all(questions)] == [1, 2]
    assert (tmp_path / "killed").exists()


def test_pool_starts_few_workers_for_few_questions(make):
    pool = make(4)
    assert [pool.ask({})["asked"] for _ in range(3)] == [1, 2, 3]
    assert {answer["pid"] for answer in pool.ask_all([{}] * QUESTIONS_PER_WORKER)} == {
        pool.ask({})["pid"]
    }
    assert pool.ask_all([]) == []


@pytest.mark.slow
def test_pool_prepares_outside_time_limit(make):
    pool = make(1, seconds=0.5, prepare=lambda question: {"prepare": question["n"]})
    assert pool.ask_all([{"n": 900}])[0]["ready"] == [900]
    assert pool.ask({"n": 5}, seconds=20.0)["ready"] == [900]
    slow = make(1, prepare=lambda question: {"prepare": question["n"]}, prepare_seconds=0.3)
    assert isinstance(slow.ask_all([{"n": 60_000}])[0], TimeoutError)


@pytest.mark.slow
def test_pool_close_ends_busy_workers(make):
    pool = make(2, seconds=600.0)
    pids = {answer["pid"] for answer in pool.ask_all([{"sleep": 0.2}] * 2 * QUESTIONS_PER_WORKER)}
    ended = []

    def ask():
        with pytest.raises(ValueError, match="worker is closed"):
            pool.ask_all([{"sleep": 600}] * 2 * QUESTIONS_PER_WORKER)
        ended.append(True)

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.2)
    begin = time.monotonic()
    pool.close()
    thread.join(20)
    assert ended and time.monotonic() - begin < 20
    assert len(pids) == 2 and not any(map(runs, pids))
    pool.close()


def test_pool_is_shared_by_threads(make):
    pool, found = make(2), {}
    threads = [
        threading.Thread(
            target=lambda k=k: found.update({k: pool.ask_all([{"n": (k, n)} for n in range(20)])})
        )
        for k in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k in range(3):
        assert [answer["n"] for answer in found[k]] == [[k, n] for n in range(20)]


def test_default_workers_and_pool_size():
    assert 1 <= default_workers() <= MAX_DEFAULT_WORKERS
    with pytest.raises(ValueError, match="verifiers=0 must be at least 1"):
        Pool(lambda: Worker(COMMAND), 0)
