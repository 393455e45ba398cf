"""A training step that fills the device: its tokens per second and model FLOPs utilisation.

Forward, backward and AdamW; weights and moments in float32, activations in bfloat16.
"""

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.gpu.networks import halved_to_fit, network, peak_gibibytes, weights_of
from benchmarks.gpu.rows import Figures, Row, Settings, Work, needs_gpu
from benchmarks.gpu.shapes import LLAMA_3B, MOE_4B, SMALL_DENSE, SMALL_MOE

PEAKS = {"B200": 2250e12, "H200": 989.5e12, "H100": 989.5e12, "A100": 312e12, "T4": 65e12}
"""Dense bfloat16 operations per second, by datasheet, of chips with the key in their name."""
STEPS = 5
"""That are timed."""

# Name, sizes, small sizes, form, execution, sequences.
TRAINED: tuple[tuple[str, dict[str, Any], dict[str, Any], str, dict[str, Any], int], ...] = (
    ("3.2b dense", LLAMA_3B, SMALL_DENSE, "remat selective", {"remat": "selective"}, 2),
    (
        "3.2b dense",
        LLAMA_3B,
        SMALL_DENSE,
        "mosaic, remat selective",
        {"attention": "mosaic", "remat": "selective"},
        2,
    ),
    (
        "3.6b moe",
        MOE_4B,
        SMALL_MOE,
        "mosaic, remat selective",
        {"experts": "mosaic", "remat": "selective"},
        4,
    ),
    (
        "3.6b moe",
        MOE_4B,
        SMALL_MOE,
        "batched, remat selective",
        {"experts": "batched", "remat": "selective"},
        4,
    ),
)


def rows(settings: Settings) -> Iterator[Row]:
    """Sequences of 4096 tokens; of half as many of them where the device has no memory for all."""
    for name, sizes, small, form, execution, batch in TRAINED:
        needs = needs_gpu() if "mosaic" in execution.values() else None
        config = network(small if settings.small else sizes, **execution)
        length, most = (16, 2) if settings.small else (4096, batch)
        run = partial(halved_to_fit, partial(_step, settings, config, length), most)
        yield Row(f"step/{'small ' + name if settings.small else name}", form, run, needs)


def _step(settings: Settings, config: Any, length: int, batch: int) -> Figures:
    import jax

    from benchmarks.moe_step import program
    from moe.config import training_flops
    from moe.weights import num_parameters

    start, step = program(config)
    # A step gives its state up: two would not fit.
    state = [start(weights_of(config, settings.seed))]
    keys = jax.random.split(jax.random.key(settings.seed), STEPS + 2)

    def timed(key: Any) -> float:
        tokens = jax.random.randint(key, (batch, length), 0, config.vocab_size)
        began = time.perf_counter()
        moved, loss = step(state.pop(), tokens)
        jax.block_until_ready((moved, loss))
        state.append(moved)
        if not float(loss) < 1e3:
            raise ValueError(f"the loss is {float(loss)}")
        return time.perf_counter() - began

    compiling = timed(keys[0])
    steps = sorted(timed(key) for key in (keys[1:2] if settings.small else keys[2:]))
    seconds = steps[len(steps) // 2]
    work = Work(batch * length * training_flops(config, length), "operations")
    figures = {
        "milliseconds": 1e3 * seconds,
        **work.rate(seconds, settings),
        "compile_s": compiling,
        "tokens_per_s": batch * length / seconds,
        "parameters": num_parameters(config),
        **peak_gibibytes(),
    }
    peak = peak_of(jax.devices()[0].device_kind)
    return figures if peak is None else figures | {"mfu": work.amount / seconds / peak}


def peak_of(kind: str) -> float | None:
    """The datasheet's rate of a device of that name, None for one that is not listed."""
    return next((peak for name, peak in PEAKS.items() if name in kind), None)
