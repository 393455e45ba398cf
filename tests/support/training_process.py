"""One process of a small training: gradient steps that are really computed, watched by a sampler.

    python training_process.py RUN MACHINE

It says that it has compiled with the file RUN/MACHINE.ready, and trains from the moment at which
there is a file RUN/go until there is a file RUN/stop.
"""

import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from jrl.faults.collect.sampler import Sampler

WIDTH, ROWS, PAUSE = 96, 64, 0.02


def loss(weights, inputs):
    hidden = inputs
    for matrix in weights:
        hidden = jnp.tanh(hidden @ matrix)
    return jnp.mean((hidden - inputs[:, ::-1]) ** 2)


@jax.jit
def step(weights, inputs):
    value, gradients = jax.value_and_grad(loss)(weights, inputs)
    return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], value


def main(run: Path, machine: str) -> None:
    keys = jax.random.split(jax.random.key(0), 4)
    weights = [jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5 for key in keys[:3]]
    inputs = jax.random.normal(keys[3], (ROWS, WIDTH))
    weights, first = step(weights, inputs)
    first.block_until_ready()
    (run / f"{machine}.ready").touch()
    while not (run / "go").exists():
        time.sleep(0.05)
    with Sampler(run / "faults", machine, period=0.5) as sampler:
        while not (run / "stop").exists():
            for _ in range(20):
                weights, value = step(weights, inputs)
                value.block_until_ready()
            time.sleep(PAUSE)  # a trainer would wait for data here
            sampler.clock.step()
    assert value < first, "the steps taught nothing"


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
