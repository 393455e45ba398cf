"""Multi-process runs: start through `jax.distributed`, agreement on host values, shutdown."""
