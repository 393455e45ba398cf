"""Operations with several implementations: their operands, and reference implementations in plain
JAX. Of the layers' code it is all that `moe.kernels` imports."""
