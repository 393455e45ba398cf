"""Networks that are measured, on one device."""

from typing import Any


def network(sizes: dict[str, Any], dtype: str = "bfloat16", **execution: Any) -> Any:
    """A network of these sizes, computed so."""
    from moe.config import ModelConfig
    from moe.execution import Execution

    return ModelConfig(**sizes, dtype=dtype, execution=Execution(**execution))  # pyright: ignore


def one_device() -> Any:
    import jax

    from sharding.folding import Layout, fold

    return fold(Layout(), jax.devices()[:1])


def weights_of(config: Any, seed: int, halved: bool = False) -> Any:
    """Fresh weights, float32, or as a server keeps them: in bfloat16, never there in float32."""
    import jax
    import jax.numpy as jnp

    from moe.weights import initialise

    def make(key: Any) -> Any:
        weights = initialise(config, key)
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16), weights) if halved else weights

    return jax.jit(make)(jax.random.key(seed))


def peak_gibibytes() -> dict[str, float]:
    """What was in use on the device at most, so far, in this process; nothing where it is not
    counted."""
    import jax

    stats = jax.devices()[0].memory_stats()
    return {} if stats is None else {"peak_gib": stats["peak_bytes_in_use"] / 2**30}


def halved_to_fit(run: Any, rows: int) -> dict[str, Any]:
    """``run(rows)``, of half as many rows as often as the device has no memory for it."""
    while True:
        try:
            return {"rows": rows, **run(rows)}
        except Exception as error:
            if "RESOURCE_EXHAUSTED" not in str(error) or rows == 1:
                raise
        rows //= 2
