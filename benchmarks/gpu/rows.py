"""What a row of the table is, and how it is checked and timed."""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Figures = dict[str, Any]
WORST = 1e-2
"""Relative difference from float32: half precision rounds to 4e-3."""
LARGER_THAN_CACHES = 2**28
"""Bytes that operands are copied up to, so that no call finds its own in a cache."""
SECONDS = 0.3
"""Of timed calls of a row."""


@dataclass(frozen=True)
class Settings:
    """How rows are measured.

    Attributes:
      small: sizes that take no time, with which kernels are interpreted where that is possible;
        None, before the device is known, is on a CPU.
      seed: of all that is drawn.
      copy: bytes per second, read and written, of a large copy on this device; None before that
        is measured.
      dense: operations per second of a large bfloat16 product on it; None as above.
      only: parts of names; rows that have none of them in name and form are left out.
    """

    small: bool | None
    seed: int
    copy: float | None = None
    dense: float | None = None
    only: Sequence[str] = ()


class Row(NamedTuple):
    """A line of the table.

    Attributes:
      name: what is computed, ``part/shape/pass``; equal names are alternatives to each other.
      form: how it is computed.
      run: measures it.
      needs: what is missing here, without which it cannot be run; None where nothing is.
    """

    name: str
    form: str
    run: Callable[[], Figures]
    needs: str | None = None


Part = Callable[[Settings], Iterator[Row]]


class Work(NamedTuple):
    """What has to be done at the least: operations of a product, or bytes read and written."""

    amount: float
    kind: Literal["operations", "bytes"]

    def rate(self, seconds: float, settings: Settings) -> Figures:
        """Of that many seconds, and beside what the device can do."""
        rate = self.amount / seconds
        if self.kind == "bytes":
            figure, scaled, share, most = "gigabytes_per_s", rate / 1e9, "of_copy", settings.copy
        else:
            figure, scaled, share, most = "teraflops", rate / 1e12, "of_dense", settings.dense
        return {figure: scaled} if most is None else {figure: scaled, share: rate / most}


def on_gpu() -> bool:
    import jax

    return jax.default_backend() == "gpu"


def needs_gpu() -> str | None:
    """What Mosaic's kernels lack here."""
    return None if on_gpu() else "an NVIDIA GPU"


def kernel_forms(settings: Settings) -> tuple[str, ...]:
    """The kernel that can be interpreted, beside its plain twin: interpreted at small sizes."""
    return ("plain", "mosaic" if on_gpu() or not settings.small else "interpreted")


def random(settings: Settings, number: int, shape: tuple[int, ...], dtype: str = "bfloat16") -> Any:
    """Normal numbers, made on the device: zeros can take less time than what is computed with."""
    import jax

    key = jax.random.fold_in(jax.random.key(settings.seed), number)
    return jax.random.normal(key, shape, dtype)


def exact(formula: str, *operands: Any) -> Any:
    """Their einsum in float32, no digit of theirs left out."""
    import jax
    import jax.numpy as jnp

    wide = [operand.astype(jnp.float32) for operand in operands]
    return jnp.einsum(formula, *wide, precision=jax.lax.Precision.HIGHEST)


def difference(found: Any, expected: Any, worst: float = WORST) -> float:
    """``||found - expected|| / ||expected||`` in float32; refused where it is too large."""
    import jax.numpy as jnp

    found, expected = (jnp.asarray(x, jnp.float32) for x in (found, expected))
    distance, size = (float(jnp.linalg.norm(x)) for x in (found - expected, expected))
    # Zeros may be expected, of cases that are empty; NaN is refused too.
    relative = distance / size if size else distance
    if not relative < worst:
        raise ValueError(f"differs from float32 by {relative:.3g}")
    return relative


def measured(
    program: Callable[..., Any],
    operands: Sequence[Any],
    work: Work,
    settings: Settings,
    compare: Callable[[Any], float] | None = None,
) -> Figures:
    """Compiles a program, compares what it gives and times it.

    Args:
      program: jitted.
      operands: of it; it must not be given any of them up.
      compare: the difference of its result from the reference, raising where that is too large.
    """
    import jax

    began = time.perf_counter()
    found = jax.block_until_ready(program(*operands))
    figures: Figures = {"compile_s": time.perf_counter() - began}
    if compare is not None:
        figures["difference"] = compare(found)
    del found
    seconds = seconds_of(program, operands, settings)
    return {"milliseconds": 1e3 * seconds, **work.rate(seconds, settings), **figures}


def seconds_of(program: Callable[..., Any], operands: Sequence[Any], settings: Settings) -> float:
    """Median seconds of a call among several that follow each other: the host is not waited for.

    Operands that caches could hold take turns with copies of themselves.
    """
    import jax

    sets = in_turn(operands, settings)
    at = 0

    def calls(number: int) -> float:
        nonlocal at
        began, last = time.perf_counter(), None
        for _ in range(number):
            last = program(*sets[at % len(sets)])
            at += 1
        jax.block_until_ready(last)
        return (time.perf_counter() - began) / number

    calls(1)
    if settings.small:
        return calls(1)
    one = calls(2)
    together = max(1, min(50, int(SECONDS / 5 / one)))
    rounds = 5 if together > 1 else max(1, min(5, int(SECONDS / one)))
    return statistics.median(calls(together) for _ in range(rounds))


def in_turn(operands: Sequence[Any], settings: Settings) -> list[tuple[Any, ...]]:
    """The operands and copies of them, together larger than any cache."""
    import jax
    import jax.numpy as jnp

    size = sum(leaf.nbytes for leaf in jax.tree.leaves(operands))
    number = 1 if settings.small else max(1, min(16, LARGER_THAN_CACHES // max(size, 1)))
    copies = [tuple(jax.tree.map(jnp.copy, operands)) for _ in range(number - 1)]
    return jax.block_until_ready([tuple(operands), *copies])


def result_of(row: Row) -> Figures:
    """The figures of a row, or why there are none."""
    named = {"row": row.name, "form": row.form}
    if row.needs is not None:
        return {**named, "needs": row.needs}
    try:
        return {**named, **row.run()}
    # Whatever a kernel, the compiler or the allocator refuses is a finding about that row alone.
    except Exception as error:
        said = str(error).strip() or type(error).__name__
        return {**named, "failed": said.splitlines()[0][:160]}
    finally:
        gc.collect()


def usable() -> bool:
    """Whether the device still computes: an illegal access leaves it unusable to this process."""
    import jax
    import jax.numpy as jnp

    try:
        jax.block_until_ready(jnp.zeros(8) + 1)
    except jax.errors.JaxRuntimeError:
        return False
    return True
