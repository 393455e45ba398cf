"""Compilation of programs that run once or twice: the compiler's passes cost more than they
save."""

import functools
import gc
import sys

import jax

UNOPTIMISED = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,
    # Later compilers have no such option, and end the process that asks for it.
    **({"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11) else {}),
}
"""Options of `jax.jit`."""
FLAGS = [f"--{option}={str(value).lower()}" for option, value in UNOPTIMISED.items()]
"""The same for ``XLA_FLAGS``."""


def trace_quickly() -> None:
    """Spares a process that traces thousands of programs what that costs beside them."""
    # Tracing makes objects by the million; looking through them again and again takes a sixth of
    # the time, and few of them are garbage.
    gc.freeze()
    gc.set_threshold(200_000, 50, 50)
    # One context for everything that is lowered: one for each takes a seventh of the time. It is
    # JAX's own business; a JAX that makes it elsewhere is slower here, and as good.
    mlir = sys.modules.get("jax._src.interpreters.mlir")
    if hasattr(mlir, "make_ir_context"):
        mlir.make_ir_context = functools.cache(mlir.make_ir_context)
