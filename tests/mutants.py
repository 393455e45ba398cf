"""Changes that `mutation.py` tries: one sign, comparison, number, mask or reduction at a time."""

import ast
import copy
import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
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
DROPPED = {"zero_masked", "stop_gradient", "clip", "abs", "sqrt"}


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


@functools.cache
def mutants(path: Path) -> Sequence[Mutant]:
    """Every mutant of one file, in the order of its lines."""
    tree = ast.parse(path.read_text())
    result = []
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
            result.append(Mutant(relative, node.lineno, change, _around(node.lineno, tree), source))
    return sorted(result, key=lambda mutant: mutant.line)


def mutants_of(path: str) -> Iterator[Mutant]:
    """Every mutant of a file, of one line of it (``FILE:LINE``), or of a folder's files."""
    place, _, line = path.partition(":")
    files = sorted(Path(place).rglob("*.py")) if Path(place).is_dir() else [Path(place)]
    for mutant in itertools.chain.from_iterable(map(mutants, files)):
        if not line or mutant.line == int(line):
            yield mutant


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
    """True if an assignment computes; names of types and lists of names do not."""
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
