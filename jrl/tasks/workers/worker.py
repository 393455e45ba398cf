"""Worker program for code that may hang, fail or do harm, in a process of its own.

It is started by its path, and loads `jrl.tasks.answers` by its path, so that it never loads jax:

    worker.py math RULE                         math-verify
    worker.py gym NAME SEED SIZE OPTIONS        a generator of reasoning-gym
    worker.py reward DESCRIPTION                a custom reward (`jrl.tasks.workers.user_code`)
    worker.py environment DESCRIPTION           custom environments
    worker.py template PROGRAM CALLS SECONDS    chat templates (`jrl.text.template_program`)

It answers each line, a JSON object, with another; an exception becomes ``{"error": ...}``. An
`async` reward gets several questions in a line, and answers each in a line. math-verify and
reasoning-gym pass texts to `eval`, completions among them: the program replaces their parsers.
"""

import ast
import functools
import json
import logging
import math
import os
import signal
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

Message = dict[str, Any]

# An expression that needs more memory fails here, without affecting the trainer.
MEMORY_BYTES = 8 * 2**30
# The caller kills a slow worker; this alarm ends a worker whose caller was killed.
ORPHAN_SECONDS = 900

# Modules of reasoning-gym that call `eval` or `exec` only on texts of their own.
_TRUSTED_MODULES = (
    "reasoning_gym.arithmetic.basic_arithmetic",
    "reasoning_gym.arithmetic.bitwise_arithmetic",
    "reasoning_gym.arithmetic.gsm_symbolic",
    "reasoning_gym.code.codeio",
)

ANSWERS = "jrl_answers"

_FUNCTIONS = {"sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh"}
_FUNCTIONS |= {"asin", "acos", "atan", "exp", "log", "ln", "sqrt", "Abs", "erf", "Integral"}
_CONSTANTS = {"pi", "E", "I"}


def parse_expr(text: str, local_dict=None, *_, evaluate: bool = True, **__):
    """Replacement of `sympy.parse_expr`, which evaluates its text as Python.

    Parses numbers, names, ``+ - * / **`` and the usual functions. A name is its value in
    `local_dict`, a constant, or a symbol.

    Raises:
      ValueError: the text contains anything else.
    """
    import sympy

    names = local_dict or {}
    options = {} if evaluate else {"evaluate": False}
    add, multiply, power = (
        functools.partial(each, evaluate=evaluate) for each in (sympy.Add, sympy.Mul, sympy.Pow)
    )
    operations = {
        ast.Add: add,
        ast.Sub: lambda left, right: add(left, multiply(-1, right)),
        ast.Mult: multiply,
        ast.Div: lambda left, right: multiply(left, power(right, -1)),
        ast.Pow: power,
    }

    def build(node: ast.AST):
        match node:
            case ast.Constant(value=int() as value) if not isinstance(value, bool):
                return sympy.Integer(value)
            case ast.Constant(value=float()):
                return sympy.Float(ast.get_source_segment(source, node))
            case ast.Name(id=name):
                if name in names:
                    return names[name]
                return getattr(sympy, name) if name in _CONSTANTS else sympy.Symbol(name)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return multiply(-1, build(operand))
            case ast.UnaryOp(op=ast.UAdd(), operand=operand):
                return build(operand)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in operations:
                return operations[type(op)](build(left), build(right))
            case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if (
                name in _FUNCTIONS
            ):
                return getattr(sympy, name)(*map(build, arguments), **options)
        raise ValueError(f"text={text!r} is not an expression of numbers, symbols and functions")

    source = text.strip()
    try:
        return build(ast.parse(source, mode="eval").body)
    except SyntaxError as error:
        raise ValueError(f"text={text!r} is not an expression ({error.msg})") from error


def _replace_parser() -> None:
    """Replaces sympy's `parse_expr` for libraries that are imported afterwards."""
    import sympy
    import sympy.parsing
    import sympy.parsing.sympy_parser

    for module in (sympy, sympy.parsing, sympy.parsing.sympy_parser):
        vars(module)["parse_expr"] = parse_expr


def _reject_execution(*_, **__):
    raise ValueError("nothing is executed here")


def _load_answers() -> None:
    """Loads `jrl.tasks.answers` as `jrl_answers`, without `jrl`, which would load jax."""
    if ANSWERS not in sys.modules:
        # Under another name: no module of this process is called `jrl`.
        _load_file(Path(__file__).parents[1] / "answers/__init__.py", ANSWERS)


def math_checker(rule: str = "final") -> Callable[[Message], Message]:
    """Answers ``{"gold": ..., "completion": ...}`` by the rule of
    `jrl.tasks.answers.verdict.RULES`."""
    _replace_parser()
    _load_answers()
    verdict, symbolic = import_module("jrl_answers.verdict"), import_module("jrl_answers.symbolic")
    judge = verdict.Judge(symbolic, rule)

    def check(question: Message) -> Message:
        try:
            reason = judge(question["gold"], question["completion"])
        except ValueError as error:
            return {"error": str(error)}
        return {"score": float(reason == "correct"), "reason": reason}

    # The libraries initialise at their first use, outside of the first answer's time limit.
    check({"gold": "\\sqrt{3}", "completion": "$2 \\cdot \\sqrt{3}$"})
    return check


def gym_checker(
    name: str, seed: str, size: str, options: str = "{}"
) -> Callable[[Message], Message]:
    """Answers ``{"check": number}``, ``{"rows": [start, stop]}``, ``{"prepare": index}`` and
    ``{"index":, "completion":}``."""
    _replace_parser()
    import reasoning_gym
    from reasoning_gym.factory import DATASETS
    from reasoning_gym.utils import SYSTEM_PROMPTS

    _load_answers()
    extraction = import_module("jrl_answers.extraction")

    def create() -> Any:
        arguments = json.loads(options)
        return reasoning_gym.create_dataset(name, seed=int(seed), size=int(size), **arguments)

    def check(num_rows: int) -> Message:
        """Tests the generator on its first rows: empty if it is usable, else the error."""
        again = create()
        for index in range(num_rows):
            _, answer = row(index)
            if any(again[index][name] != entry(index)[name] for name in ("question", "answer")):
                return {"error": f"row {index} is not the same twice for one seed: choose another"}
            if answer and (points := dataset().score_answer(answer, entry(index))) != 1.0:
                message = f"its reference answer to row {index} scores {points}: choose another"
                return {"error": message}
        return {}

    @functools.cache
    def dataset() -> Any:
        generator = create()
        module = type(generator).__module__
        if not module.startswith(_TRUSTED_MODULES):
            vars(sys.modules[module]).update(eval=ast.literal_eval, exec=_reject_execution)
        return generator

    @functools.cache
    def entry(index: int) -> Any:
        return dataset()[index]

    def row(index: int) -> tuple[str, str]:
        question, answer = entry(index)["question"], entry(index)["answer"]
        if answer is None:
            answer = example_answer(index)
        elif not isinstance(answer, str) or not answer:
            raise ValueError(
                f"row {index} has answer={answer!r}, which is neither a text nor None: "
                "choose another generator"
            )
        if not isinstance(question, str):
            raise ValueError(f"row {index} has question={question!r}, which is not a text")
        return question, answer

    def example_answer(index: int) -> str:
        """Answer in the metadata of a row, as text or JSON, that scores full marks; empty if there
        is none."""
        examples = (v for k, v in entry(index)["metadata"].items() if "answer" in k)
        for example in examples:
            text = example if isinstance(example, str) else json.dumps(example)
            if dataset().score_answer(text, entry(index)) == 1.0:
                return text
        return ""

    def score(index: int, completion: str) -> Message:
        extracted = extraction.extract(completion)
        if extracted is None or not extracted.text:
            return {"score": 0.0, "reason": "unparsable"}
        points = float(dataset().score_answer(extracted.text, entry(index)))
        if math.isnan(points):
            return {"error": "the score is not a number"}
        points = min(max(points, 0.0), 1.0)
        reason = {0.0: "wrong", 1.0: "correct"}.get(points, "partial")
        return {"score": points, "reason": reason}

    def answer(request: Message) -> Message:
        if name not in DATASETS:
            return {"names": sorted(DATASETS)}
        if "check" in request:
            return check(request["check"])
        if "rows" in request:
            rows = [row(index) for index in range(*request["rows"])]
            return {"rows": rows, "instruction": SYSTEM_PROMPTS["default"]}
        if "prepare" in request:
            entry(request["prepare"])
            return {}
        return score(request["index"], request["completion"])

    return answer


def template_checker(program: str, calls: str, seconds: str) -> Callable[[Message], Message]:
    """Renders chat templates, by the paths of `jrl.text.template_program` and
    `jrl.tasks.tools.calls`."""
    module = _load_file(Path(program))
    _limit_memory(module.MAX_MEMORY)
    return module.Templates(_load_file(Path(calls)).Arguments, float(seconds))


def _load_file(path: Path, package: str | None = None) -> ModuleType:
    """The module in a file; `package` is the name of the package for its relative imports."""
    folders = None if package is None else [str(path.parent)]
    spec = spec_from_file_location(package or path.stem, path, submodule_search_locations=folders)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    if package is not None:
        sys.modules[package] = module
    spec.loader.exec_module(module)
    return module


USER_CODE = Path(__file__).with_name("user_code.py")
CHECKERS: dict[str, Callable[..., Callable[[Message], Message]]] = {
    "math": math_checker,
    "gym": gym_checker,
    "template": template_checker,
    "reward": lambda described: _load_file(USER_CODE).reward_checker(described),
    "environment": lambda described: _load_file(USER_CODE).environment_checker(described),
}


def main() -> None:
    """Answers questions from the standard input until it ends."""
    questions = os.fdopen(os.dup(0), encoding="utf-8")
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # Libraries must not write into the answers, or read from the questions.
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    kind, *arguments = sys.argv[1:]
    if kind not in ("reward", "environment"):  # whose libraries may map as much memory as they like
        logging.disable(logging.CRITICAL)
        _limit_memory(MEMORY_BYTES)

    def send(message: Message) -> None:
        channel.write(json.dumps(message) + "\n")
        channel.flush()

    try:
        check: Any = CHECKERS[kind](*arguments)
    except Exception as error:
        send({"error": f"{type(error).__name__}: {error}"})
        return
    send({"together": True} if getattr(check, "accepts_batches", False) else {})
    try:
        _serve(questions, check, send)
    finally:
        if (close := getattr(check, "close", None)) is not None:
            # The caller has ended, perhaps without closing the environments.
            _alarm(ORPHAN_SECONDS)
            close()


def _serve(questions: Iterable[str], check: Any, send: Callable[[Message], None]) -> None:
    """Answers all questions, one line each."""
    for line in questions:
        _alarm(ORPHAN_SECONDS)
        question = json.loads(line)
        if "together" in question:

            def send_answer(message: Message) -> None:
                send(message)
                _alarm(ORPHAN_SECONDS)

            check.each(question["together"], question["seconds"], send_answer)
        else:
            try:
                reply = check(question)
            except Exception as error:
                reply = {"error": f"{type(error).__name__}: {error}"[:500]}
            send(reply)
        _alarm(0)  # no limit on waiting for a question: it ends with the input


def _alarm(seconds: int) -> None:
    if hasattr(signal, "alarm"):
        signal.alarm(seconds)


def _limit_memory(num_bytes: int) -> None:
    """Bounds the address space of this process on Linux."""
    if sys.platform == "linux":
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


if __name__ == "__main__":
    main()
