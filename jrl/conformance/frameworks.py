"""Calls of a function of NumPy, JAX or PyTorch, with results and gradients in NumPy."""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

Function = Callable[..., Any]
Results = dict[str, np.ndarray]
QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,
}
"""Options of XLA for programs that run once."""
BATCH_SIZE = 12
"""Signatures in one program: compilation takes longer than in proportion to them."""


class NotExpressed(Exception):
    """Raised by an adapter for a call that a library cannot express; the message says why."""


@dataclass(frozen=True)
class Call:
    """Arrays and settings by name, and the inputs by which the first result is differentiated."""

    inputs: Mapping[str, np.ndarray]
    settings: Mapping[str, Any]
    by: tuple[str, ...] = ()
    half: bool = False


@dataclass(frozen=True)
class Failure:
    """A call without results; `expressed` is False if the function does not express them."""

    reason: str
    expressed: bool = True


def framework_of(function: Function) -> str:
    """The framework that the module of a function has imported: jax, torch or else numpy."""
    module = sys.modules.get(function.__module__)
    names = {
        (x.__name__ if isinstance(x, ModuleType) else getattr(x, "__module__", None) or "")
        for x in vars(module or ModuleType("")).values()
    }
    roots = {name.partition(".")[0] for name in names}
    return next((name for name in ("jax", "torch") if name in roots), "numpy")


def accepted(function: Function) -> set[str] | None:
    """The names of a function's parameters; None if it takes any."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return {p.name for p in parameters}


def run(
    function: Function, outputs: Sequence[str], calls: Sequence[Call], framework: str
) -> list[Results | Failure]:
    """The results of every call, or why there are none."""
    return {"numpy": _numpy, "torch": _torch, "jax": _jax}[framework](function, outputs, calls)


def named(result: Any, outputs: Sequence[str]) -> dict[str, Any]:
    """Results of a function by the names of the file, from an array, tuple, mapping or record."""
    if isinstance(result, Mapping):
        outcome = {name: result[name] for name in outputs if name in result}
    elif not hasattr(result, "shape") and all(hasattr(result, name) for name in outputs):
        outcome = {name: getattr(result, name) for name in outputs}
    else:
        multiple = result if isinstance(result, tuple | list) else [result]
        outcome = dict(zip(outputs, multiple, strict=False))
    if outputs[0] not in outcome:
        raise ValueError(f"the function returned no {outputs[0]}: {type(result).__name__}")
    flat = {}
    for name, x in outcome.items():
        if isinstance(x, Mapping):
            flat |= {f"{name}.{one}": value for one, value in x.items()}
        elif x is not None:
            flat[name] = x
    return {name: x.value() if hasattr(x, "value") else x for name, x in flat.items()}


def _attempt(call: Callable[[], Results]) -> Results | Failure:
    try:
        return call()
    except NotExpressed as error:
        return Failure(str(error), expressed=False)
    except Exception as error:  # whatever a stranger's function raises is the finding
        return Failure(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")


def _host(results: Mapping[str, Any]) -> Results:
    numbers = {name: np.asarray(x) for name, x in results.items()}
    return {name: x.astype(float) for name, x in numbers.items() if x.dtype.kind not in "OUS"}


def _numpy(function: Function, outputs: Sequence[str], calls: Sequence[Call]) -> list:
    def one(call: Call) -> Results:
        if call.half:
            raise NotExpressed("NumPy has no bfloat16")
        with np.errstate(all="ignore"):
            return _host(named(function(**call.inputs, **call.settings), outputs))

    return [_attempt(lambda call=call: one(call)) for call in calls]


def _torch(function: Function, outputs: Sequence[str], calls: Sequence[Call]) -> list:
    import torch

    def tensor(x: np.ndarray, half: bool) -> Any:
        built = torch.tensor(x)
        return built.to(torch.bfloat16) if half and built.is_floating_point() else built

    def one(call: Call) -> Results:
        inputs = {name: tensor(x, call.half) for name, x in call.inputs.items()}
        settings = {
            name: tensor(x, call.half) if isinstance(x, np.ndarray) else x
            for name, x in call.settings.items()
        }
        leaves = [inputs[name].requires_grad_() for name in call.by]
        outcome = named(function(**inputs, **settings), outputs)
        slopes = [None] * len(leaves)
        if leaves and outcome[outputs[0]].requires_grad:
            slopes = torch.autograd.grad(outcome[outputs[0]].sum(), leaves, allow_unused=True)
        for name, leaf, slope in zip(call.by, leaves, slopes, strict=True):
            outcome[f"gradient by {name}"] = torch.zeros_like(leaf) if slope is None else slope
        return _host({n: torch.as_tensor(x).detach().double().numpy() for n, x in outcome.items()})

    return [_attempt(lambda call=call: one(call)) for call in calls]


def _jax(function: Function, outputs: Sequence[str], calls: Sequence[Call]) -> list:
    """All calls as one program; one by one those that cannot be traced."""
    import jax
    import jax.numpy as jnp

    def arrays(call: Call) -> tuple[Any, Any]:
        passed = {n: x for n, x in call.settings.items() if isinstance(x, np.ndarray)}
        if not call.half:
            return dict(call.inputs), passed
        return jax.tree.map(
            lambda x: x.astype(jnp.bfloat16) if x.dtype.kind == "f" else x, (call.inputs, passed)
        )

    def one(call: Call, inputs: Mapping[str, Any], passed: Mapping[str, Any]) -> dict[str, Any]:
        def first(changed: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
            result = named(
                function(**{**inputs, **changed}, **{**call.settings, **passed}), outputs
            )
            return jnp.sum(result[outputs[0]]), result

        if not call.by:
            return first({})[1]
        slopes, result = jax.grad(first, has_aux=True)({name: inputs[name] for name in call.by})
        return result | {f"gradient by {name}": slope for name, slope in slopes.items()}

    similar: dict[str, list[int]] = {}  # calls of one signature are one loop of the program
    for n, call in enumerate(calls):
        static = {k: x for k, x in call.settings.items() if not isinstance(x, np.ndarray)}
        shapes = jax.tree.map(lambda x: (x.shape, str(x.dtype)), arrays(call))
        similar.setdefault(repr((static, shapes, call.by)), []).append(n)
    failed: set[int] = set()

    def program(multiple: list[list[int]], batch: list) -> dict[int, Any]:
        outcome = {}
        for members, stacked in zip(multiple, batch, strict=True):
            try:
                each = jax.lax.map(lambda x, first=members[0]: one(calls[first], *x), stacked)
                outcome |= {
                    n: jax.tree.map(lambda x, i=i: x[i], each) for i, n in enumerate(members)
                }
            except Exception:  # tried again outside of the program, which has a plain message
                failed.update(members)
        return outcome

    # Later compilers have no such option, and end the process that asks for it.
    old = {"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11) else {}
    # A 32-bit integer stays one; what is given in float32 stays float32.
    context: AbstractContextManager = getattr(jax, "enable_x64", lambda _: nullcontext())(True)
    with context:
        outcome = {}
        for start in range(0, len(similar), BATCH_SIZE):
            multiple = [*similar.values()][start : start + BATCH_SIZE]
            batch = [
                jax.tree.map(lambda *x: np.stack(x), *(arrays(calls[n]) for n in members))
                for members in multiple
            ]
            compiled = jax.jit(partial(program, multiple), compiler_options=QUICK | old)
            outcome |= jax.device_get(compiled(batch))
        return [
            _attempt(
                lambda n=n, call=call: _host(
                    jax.device_get(one(call, *jax.tree.map(jnp.asarray, arrays(call))))
                    if n in failed
                    else outcome[n]
                )
            )
            for n, call in enumerate(calls)
        ]
