"""How programs that run once or twice are compiled: what the compiler's passes would win is less
than they cost."""

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
