"""Change one thing at a time in the objectives and see whether a test fails.

    python tests/mutation.py jrl/losses                 all files below, two at a time
    python tests/mutation.py jrl/losses/policy --list   only say what would be changed
    python tests/mutation.py jrl/losses/value.py:92     one line, after a hole is closed

A mutant is the code with one sign turned, one comparison loosened, one number off by one, one mask
or one stopped gradient left out, one axis or one reduction replaced. It is killed if a test fails.
The survivors are printed: each is either a hole in the tests or a change that has no effect.

Each worker collects the vectors and the rules for arrays once and forks for every mutant: the copy
puts the changed functions in the place of the old ones and runs the tests that may know. A copy of
a process in which XLA runs has lost XLA's threads, so nothing may touch a device while collecting.
"""

import argparse
import ast
import functools
import gc
import itertools
import multiprocessing
import os
import re
import signal
import sys
import time
import types
from collections.abc import Sequence
from multiprocessing.queues import Queue
from pathlib import Path
from typing import NoReturn

import pytest
import rich.console
import rich.progress
from jax._src import xla_bridge
from mutants import ROOT, Mutant, mutants_of

from jrl import losses

HERE = "tests/jrl/losses"
# Collected once, and run for every mutant before the files that name its functions.
COLLECTED = ("test_vectors.py", "test_array_contract.py")
# The plugin of jaxtyping is imported before pytest could rewrite its assertions.
IMPORTED = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
OPTIONS = ("-q", "-s", "-p", "no:cacheprovider", "-m", "", "-W", IMPORTED)
# The number of the mutant that is none, and what a copy says of one that it could not put in place.
UNCHANGED, MISPLACED = -1, 70


@functools.cache
def definitions() -> dict[tuple[Path, str], set[str]]:
    """Every function and class of the objectives, and the names that it mentions.

    A function whose derivative is given by a decorator such as ``@f.defjvp`` mentions that too.
    """
    result: dict[tuple[Path, str], set[str]] = {}
    for path in sorted((ROOT / "jrl/losses").rglob("*.py")):
        file = path.relative_to(ROOT)
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                if (file, node.name) in result:
                    sys.exit(f"{file} has two definitions of {node.name}: give each its own name")
                names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
                names |= {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
                result[file, node.name] = names
                for decorator in node.decorator_list:
                    owner = file, getattr(getattr(decorator, "value", None), "id", "")
                    if owner in result:
                        result[owner].add(node.name)
    return result


@functools.cache
def public_users(path: Path, function: str) -> list[set[str]]:
    """The public functions through which one can be reached: itself or the nearest first, then all.

    Code outside of functions counts as all functions of its file.
    """
    names = {*losses.__all__, *losses.diagnostics.__all__}
    known = {function} if function else {name for file, name in definitions() if file == path}
    nearest: set[str] = set()
    while True:
        public = known & names
        nearest = nearest or public
        users = {name for (_, name), mentioned in definitions().items() if mentioned & known}
        if users <= known:
            if not nearest:
                sys.exit(f"no public function uses {function or 'any'} of {path}")
            return [nearest, public]
        known |= users


def stages(mutant: Mutant, items: list[pytest.Item]) -> tuple[list[pytest.Item], list[str]]:
    """Tests that may find a mutant: of the collected ones, vectors and rules for arrays of the
    nearest public functions; then the files that name a public function through which it is
    reached."""
    nearest, public = public_users(mutant.path, mutant.function)
    collected = [item for item in items if any(name in item.name for name in nearest)]
    mentioning = [
        str(file)
        for file in sorted((ROOT / HERE).rglob("test_*.py"))
        if file.name not in (*COLLECTED, "test_public_functions.py")
        and any(re.search(rf"\b{name}\b", file.read_text()) for name in public)
    ]
    return collected, mentioning


class Misplaced(Exception):
    """The functions of a mutant are not among those that were imported."""


def install(mutant: Mutant) -> None:
    """Put the changed code in the place of what has been imported, wherever that is referred to."""
    module = sys.modules[".".join(mutant.path.with_suffix("").parts).removesuffix(".__init__")]
    fresh = {"__name__": module.__name__, "__package__": module.__package__}
    exec(compile(mutant.source, "<mutant>", "exec"), fresh)
    if not mutant.function:
        for name, value in fresh.items():
            if isinstance(value, (int, float, tuple, dict)) and not name.startswith("__"):
                setattr(module, name, value)
        return
    gc.unfreeze()  # tests/support/compiling.py has frozen the functions
    changed = _functions("<mutant>", mutant.function)
    imported = _functions(str(ROOT / mutant.path), mutant.function)
    if not changed or changed.keys() - imported.keys():
        raise Misplaced
    for name, function in changed.items():
        imported[name].__code__ = function.__code__
        imported[name].__defaults__ = function.__defaults__
        imported[name].__kwdefaults__ = function.__kwdefaults__


def _functions(file: str, within: str) -> dict[str, types.FunctionType]:
    """The functions and methods of a file that are, or are in, one of its names."""
    return {
        result.__code__.co_qualname: result
        for result in gc.get_objects()
        if isinstance(result, types.FunctionType)
        and result.__code__.co_filename == file
        and result.__code__.co_qualname.split(".")[0] == within
        and "<locals>" not in result.__code__.co_qualname
    }


class Trials:
    """Replacement for pytest's loop in a worker: a fork for every mutant it is handed.

    Attributes:
      tasks: numbers of mutants, then None.
      results: numbers of mutants, and whether they were killed.
    """

    def __init__(self, chosen: list[Mutant], limit: float, tasks: Queue, results: Queue) -> None:
        self.chosen, self.limit, self.tasks, self.results = chosen, limit, tasks, results

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            raise RuntimeError("the tests cannot be collected")
        if xla_bridge.backends_are_initialized():
            raise RuntimeError(f"one of {COLLECTED} uses a device while it is being collected")
        for number in iter(self.tasks.get, None):
            self.results.put((number, self.killed(number, session)))
        return True

    def pytest_internalerror(self, excinfo: pytest.ExceptionInfo) -> None:
        self.results.put(str(excinfo.value))

    def killed(self, number: int, session: pytest.Session) -> bool:
        """True if a test fails in a copy of this process; running out of time is a failure too."""
        child = os.fork()
        if child == 0:
            self.run(number, session)
        end = time.monotonic() + self.limit
        while number == UNCHANGED or time.monotonic() < end:
            done, status = os.waitpid(child, os.WNOHANG)
            if done and os.waitstatus_to_exitcode(status) == MISPLACED:
                raise RuntimeError(f"the code to be changed was not found: {self.chosen[number]}")
            if done:
                return os.waitstatus_to_exitcode(status) != 0
            time.sleep(0.02)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return True

    def run(self, number: int, session: pytest.Session) -> NoReturn:
        """The life of a copy: run the tests, and leave with 0 if all of them pass."""
        status = 1
        try:
            if number != UNCHANGED:
                install(self.chosen[number])
            of_each = [
                stages(mutant, session.items)
                for mutant in (self.chosen if number == UNCHANGED else [self.chosen[number]])
            ]
            items = list(dict.fromkeys(item for result, _ in of_each for item in result))
            files = list(dict.fromkeys(file for _, result in of_each for file in result))
            passed(items, session) and passed(session.perform_collect(files), session)
            status = int(session.testsfailed > 0)
        except Misplaced:
            status = MISPLACED
        finally:
            os._exit(status)


def passed(items: Sequence[pytest.Item], session: pytest.Session) -> bool:
    """True if all tests pass; the first failure ends them."""
    for item, following in itertools.pairwise([*items, None]):
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.testsfailed:
            return False
    return True


def work(chosen: list[Mutant], limit: float, tasks: Queue, results: Queue) -> None:
    """The life of a worker, which is told numbers of mutants until it is told None."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    files = [f"{HERE}/rules/{name}" for name in COLLECTED]
    status = pytest.main([*OPTIONS, *files], plugins=[Trials(chosen, limit, tasks, results)])
    if status != 0:
        results.put(f"a worker's pytest ended with {status!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="+", help="files, FILE:LINE or folders to change")
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    parser.add_argument("--every", type=int, default=1, help="try one of so many")
    parser.add_argument(
        "--first", type=int, default=0, help="with --every, leave out so many first"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one mutant")
    arguments = parser.parse_args()
    result = itertools.chain.from_iterable(map(mutants_of, arguments.paths))
    chosen = list(dict.fromkeys(result))[arguments.first :: arguments.every]
    if not chosen:
        sys.exit(f"{' '.join(arguments.paths)}: nothing to change; --list shows what there is.")
    for mutant in chosen:
        public_users(mutant.path, mutant.function)
    if arguments.list:
        print(*chosen, f"{len(chosen)} mutants", sep="\n")
        return

    context = multiprocessing.get_context("spawn")
    tasks, results = context.Queue(), context.Queue()
    workers = [
        context.Process(target=work, args=(chosen, arguments.limit, tasks, results), daemon=True)
        for _ in range(arguments.workers)
    ]
    for worker in workers:
        worker.start()
    tasks.put(UNCHANGED)
    if result_of(results)[1]:
        sys.exit("the tests fail without any change: mend them first")
    for number in (*range(len(chosen)), *[None] * len(workers)):
        tasks.put(number)
    survivors = 0
    for _ in rich.progress.track(chosen, console=rich.console.Console(stderr=True)):
        number, killed = result_of(results)
        survivors += not killed
        if not killed:
            print(f"survived  {chosen[number]}", flush=True)
    killed = len(chosen) - survivors
    print(f"{killed} of {len(chosen)} mutants killed ({killed / len(chosen):.1%})")


def result_of(results: Queue) -> tuple[int, bool]:
    """The next verdict; what goes wrong in a worker ends everything."""
    result = results.get()
    if isinstance(result, str):
        sys.exit(result)
    return result


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
