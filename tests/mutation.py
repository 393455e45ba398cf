"""Change one thing at a time in the objectives and see whether a test fails.

    python tests/mutation.py jrl/losses                 all files below, two at a time
    python tests/mutation.py jrl/losses/policy --list   only say what would be changed

A mutant is the code with one sign turned, one comparison loosened, one number off by one, one mask
or one stopped gradient left out, one axis or one reduction replaced. It is killed if a test fails.
The survivors are printed: each is either a hole in the tests or a change without an effect.

Mutation tools that fork after the tests have started do not work here, because a forked copy of a
running XLA has lost its threads. This one forks a process that has imported JAX and not used it.
"""

import argparse
import ast
import copy
import functools
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
HERE = "tests/jrl/losses"
COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
CALLS = {
    "maximum": "minimum",
    "minimum": "maximum",
    "max": "min",
    "min": "max",
    "sum": "max",
    "any": "all",
    "all": "any",
    "exp": "abs",
    "abs": "negative",
}
# Left out altogether: the first argument takes the place of the call.
DROPPED = {"keep", "stop_gradient", "clip", "abs", "sqrt"}


@dataclass(frozen=True)
class Mutant:
    """One file with one change.

    Attributes:
      path: the file, relative to the root.
      line: where the change is.
      change: what it is, before and after.
      function: the function or class of the file that it is in, "" outside of them.
      source: the whole file with it.
    """

    path: Path
    line: int
    change: str
    function: str
    source: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.change}"


def mutants(path: Path) -> Iterator[Mutant]:
    """Every mutant of one file, in the order of its lines."""
    tree = ast.parse(path.read_text())
    found = []
    for number, node in enumerate(_code(tree)):
        for replacement in _replacements(node):
            changed = copy.deepcopy(tree)
            target = list(_code(changed))[number]
            before = ast.unparse(node)
            _become(target, replacement)
            after = ast.unparse(replacement)
            source = ast.unparse(ast.fix_missing_locations(changed))
            relative = path.resolve().relative_to(ROOT)
            change = f"{before}  ->  {after}"
            found.append(Mutant(relative, node.lineno, change, _around(node.lineno, tree), source))
    return iter(sorted(found, key=lambda mutant: mutant.line))


def _around(line: int, tree: ast.Module) -> str:
    """The function or class that a line is in."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            if first <= line <= (node.end_lineno or line):
                return node.name
    return ""


def _code(tree: ast.AST) -> Iterator[ast.expr]:
    """Expressions that compute: not annotations, docstrings, messages or checks that raise."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Raise | ast.Import | ast.ImportFrom | ast.JoinedStr):
            continue
        if isinstance(node, ast.If) and any(isinstance(s, ast.Raise) for s in node.body):
            continue
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            if isinstance(node, ast.FunctionDef):
                for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
                    yield from _expressions(default)
            for statement in node.body:
                yield from _code(ast.Module([statement], []))
        elif isinstance(node, ast.AnnAssign):
            if node.value is not None:
                yield from _expressions(node.value)
        elif isinstance(node, ast.Assign) and isinstance(tree, ast.Module) and not _inside(node):
            continue
        elif isinstance(node, ast.expr):
            yield from _expressions(node)
        elif isinstance(node, ast.stmt):
            yield from _code(node)


def _inside(node: ast.Assign) -> bool:
    """Whether an assignment computes; names of types and lists of names do not."""
    return not any(isinstance(t, ast.Name) and t.id[0].isupper() for t in node.targets) and not any(
        isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets
    )


def _expressions(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, ast.JoinedStr):
        return
    if isinstance(node, ast.expr):
        yield node
    for child in ast.iter_child_nodes(node):
        yield from _expressions(child)


def _replacements(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        yield ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
    elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
        yield ast.Compare(node.left, [COMPARISONS[type(node.ops[0])]()], node.comparators)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Invert | ast.Not):
        yield node.operand
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield ast.BoolOp(other, node.values)
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield ast.Constant(node.value + 1)
    elif isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name in DROPPED and node.args:
            yield node.args[0]
        if name in CALLS and isinstance(node.func, ast.Attribute):
            yield ast.Call(
                ast.Attribute(node.func.value, CALLS[name], ast.Load()), node.args, node.keywords
            )
        if name == "where" and len(node.args) == 3:
            yield ast.Call(node.func, [node.args[0], node.args[2], node.args[1]], node.keywords)


def _become(target: ast.AST, replacement: ast.AST) -> None:
    """Turn a node of the copy into another one, in place."""
    target.__class__ = replacement.__class__
    target.__dict__ = {**target.__dict__, **copy.deepcopy(replacement).__dict__}


@functools.cache
def definitions() -> dict[tuple[Path, str], set[str]]:
    """Every function and class of the objectives, and the names that it mentions."""
    found = {}
    for file in sorted((ROOT / "jrl/losses").rglob("*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
                names |= {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
                found[file.relative_to(ROOT), node.name] = names
    return found


@functools.cache
def public_users(path: Path, function: str) -> list[set[str]]:
    """The public functions through which one can be reached: itself or the nearest first, then all.

    Code outside of functions counts as all functions of its file.
    """
    package = (ROOT / "jrl/losses/__init__.py").read_text()
    known = {function} if function else {name for file, name in definitions() if file == path}
    nearest: set[str] = set()
    while True:
        public = {name for name in known if f'"{name}"' in package}
        nearest = nearest or public
        users = {name for (_, name), mentioned in definitions().items() if mentioned & known}
        if users <= known:
            return [nearest, public]
        known |= users


def stages(mutant: Mutant) -> list[list[str]]:
    """Which tests may know about a mutant: vectors and rules for arrays of the nearest public
    functions first, then every test that names one of all it can be reached through."""
    nearest, public = public_users(mutant.path, mutant.function)
    chosen = " or ".join(sorted(nearest))
    mentioning = [
        str(file.relative_to(ROOT))
        for file in sorted((ROOT / HERE).glob("test_*.py"))
        if file.stem not in ("test_array_contract", "test_vectors", "test_public_functions")
        and any(re.search(rf"\b{name}\b", file.read_text()) for name in public)
    ]
    return [
        [f"{HERE}/test_vectors.py", "-k", f"({chosen}) and not files_hold"],
        [f"{HERE}/test_array_contract.py", "-k", chosen],
        mentioning,
    ]


class Tester:
    """A copy of the tree in which mutants are tried, and a process ready to try them."""

    def __init__(self, folder: Path, limit: float) -> None:
        self.folder, self.limit, self.written = folder, limit, int(time.time())
        for name in ("jrl", "moe", "sharding", "tests", "pyproject.toml", "README.md"):
            source = ROOT / name
            ignore = shutil.ignore_patterns("__pycache__")
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=ignore)
            else:
                shutil.copy(source, folder / name)

    def killed(self, mutant: Mutant) -> bool:
        """Whether a test fails with the mutant in place; running out of time is a failure too."""
        place = self.folder / mutant.path
        original = place.read_text()
        self.write(place, mutant.source)
        try:
            # Status 5 is "no test was chosen", as for a function without vectors.
            return any(self.run(tests) not in (0, 5) for tests in stages(mutant) if tests)
        finally:
            self.write(place, original)

    def write(self, place: Path, source: str) -> None:
        """A file that no bytecode of an earlier one can pass for: each is a second younger."""
        self.written += 1
        place.write_text(source)
        os.utime(place, (self.written, self.written))

    def run(self, tests: list[str]) -> int:
        """The exit status of tests in the copy, by a child of this process."""
        child = os.fork()
        if child == 0:
            self._child(tests)
        end = time.monotonic() + self.limit
        while time.monotonic() < end:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return -1

    def _child(self, tests: list[str]) -> None:
        status = 3
        try:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            os.chdir(self.folder)
            sys.path[:] = [str(self.folder), *(p for p in sys.path if Path(p or ".") != ROOT)]
            import pytest

            status = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests]))
        finally:
            os._exit(status)


def warm_up() -> None:
    """Import what every test imports, and use none of it: a device in use cannot be forked.

    Not the plugins of pytest, which are to be imported under its eyes.
    """
    import jax
    import jax.numpy
    import jax.test_util
    import numpy  # noqa: F401

    # Single operations are compiled once for all mutants that do not change them.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


tester: Tester


def start_worker(scratch: str, limit: float) -> None:
    """Give this process a copy of the tree of its own."""
    global tester
    warm_up()
    tester = Tester(Path(tempfile.mkdtemp(dir=scratch)), limit)


def healthy(mutant: Mutant) -> bool:
    """Whether the vectors are met without the change; the suite says the rest."""
    return tester.run(stages(mutant)[0]) in (0, 5)


def trial(mutant: Mutant) -> bool:
    """Whether the mutant was killed."""
    return tester.killed(mutant)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="+", type=Path, help="files or folders to change")
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    parser.add_argument("--every", type=int, default=1, help="try one of so many")
    parser.add_argument(
        "--first", type=int, default=0, help="with --every, leave out so many first"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one mutant")
    arguments = parser.parse_args()
    files = [f for p in arguments.paths for f in ([p] if p.is_file() else sorted(p.rglob("*.py")))]
    chosen = [m for f in files for m in mutants(f)][arguments.first :: arguments.every]
    if arguments.list:
        print(*chosen, f"{len(chosen)} mutants", sep="\n")
        return

    with (
        tempfile.TemporaryDirectory() as scratch,
        ProcessPoolExecutor(
            arguments.workers,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=start_worker,
            initargs=(scratch, arguments.limit),
        ) as pool,
    ):
        for mutant in {(m.path, m.function): m for m in chosen}.values():
            if not pool.submit(healthy, mutant).result():
                where = f"{mutant.function} in {mutant.path}"
                sys.exit(f"the tests of {where} fail without any change: mend them first")
        results = []
        for mutant, killed in zip(chosen, pool.map(trial, chosen), strict=True):
            results.append(killed)
            if not killed:
                print(f"survived  {mutant}", flush=True)
    print(f"{sum(results)} of {len(results)} mutants killed ({sum(results) / len(results):.1%})")


if __name__ == "__main__":
    main()
