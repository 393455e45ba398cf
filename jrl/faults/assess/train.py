"""``python -m jrl.faults train``: trains the denoising models on records without faults.

The models that come with the package are made by this command without arguments, from simulated
fleets; a fleet's own healthy records make better ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jaxtyping import Array, Float, Float32
from rich.console import Console

from jrl.config.numbers import check_seed
from jrl.faults.fleet import Fleet
from jrl.faults.minder import vae
from jrl.faults.minder.models import ANY, JOINT, SHIPPED
from jrl.faults.minder.prepare import prepare
from jrl.faults.simulate import METRICS, PRODUCTION, Settings, simulate


@dataclass(frozen=True)
class Training:
    """Settings of the models' training; the paper gives none of these."""

    records: tyro.conf.Positional[tuple[str, ...]] = ()
    """Healthy records (.npz) to train on; None simulates fleets."""
    out: str = str(SHIPPED)
    """The file to write."""
    seed: int = 0
    """Random seed of simulated fleets, windows, weights and noise."""
    fleets: int = 24
    """Number of simulated fleets, if no records are given."""
    windows: int = 20_000
    """Windows per metric to train on."""
    steps: int = 3000
    """Steps of Adam."""
    batch: int = 256
    """Windows per metric and step."""
    rate: float = 5e-3
    """Learning rate at its highest; it falls to zero along a cosine."""
    variance: float = 1e-3
    """Variance of the noise around a reconstruction, in squares of a metric's range: more denoises
    more."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    training = tyro.cli(Training, prog="python -m jrl.faults train", args=arguments)
    check_seed(training.seed)
    fleets = [Fleet.load(path) for path in training.records] or healthy_fleets(training)
    models, error = train_models(fleets, training, show=Console().print)
    if not training.records:
        models[JOINT] = train_joint(healthy_fleets(training, PRODUCTION), training)
    vae.save(training.out, models)
    size = Path(training.out).stat().st_size / 1024
    print(f"{training.out}: {len(models)} models, {size:.0f} KiB")
    print("mean squared error: " + ", ".join(f"{k} {v:.2e}" for k, v in error.items()))
    return 0


def healthy_fleets(training: Training, metrics: Sequence[str] = tuple(METRICS)) -> list[Fleet]:
    """Simulated fleets of 4 to 64 machines in which nothing fails."""
    random = np.random.default_rng(training.seed)
    return [
        simulate(
            Settings(machines=int(random.integers(4, 65)), metrics=tuple(metrics), faulty=False),
            seed=10_000_000 + training.seed * 1000 + index,
        ).fleet
        for index in range(training.fleets)
    ]


def train_models(
    fleets: Sequence[Fleet], training: Training, show: Callable[[str], None] = lambda line: None
) -> tuple[dict[str, vae.Weights], dict[str, float]]:
    """One model per metric and one for `ANY`, trained together, and their errors."""
    random = np.random.default_rng(training.seed)
    windows = gather_windows(fleets, training.windows, random)
    pooled = np.concatenate(list(windows.values()), axis=-1)
    selected = random.integers(pooled.shape[-1], size=training.windows)
    windows[ANY] = pooled[..., selected]
    data = np.stack(list(windows.values()))
    weights, errors = fit(data, training, show)
    names = list(windows)
    models = {name: {k: v[i] for k, v in weights.items()} for i, name in enumerate(names)}
    return models, dict(zip(names, errors.tolist(), strict=True))


def train_joint(fleets: Sequence[Fleet], training: Training) -> vae.Weights:
    """One joint model for windows of all metrics: the paper's ablation "INT"."""
    random = np.random.default_rng(training.seed)
    windows = gather_windows(fleets, training.windows, random, same_positions=True)
    data = np.concatenate(list(windows.values()), axis=1)[None]
    weights, _ = fit(data, training)
    return {name: value[0] for name, value in weights.items()}


def gather_windows(
    fleets: Sequence[Fleet],
    num_windows: int,
    random: np.random.Generator,
    same_positions: bool = False,
) -> dict[str, Float32[np.ndarray, "time channel n"]]:
    """Windows of each metric, equally many per fleet.

    With `same_positions`, they are at the same positions for all metrics. Half of them are shrunk
    and shifted inside [0, 1]. A fault of one machine widens the range that its fleet is scaled by,
    and the models have to see healthy machines of such a fleet too.
    """
    prepared = [prepare(fleet) for fleet in fleets]
    names = prepared[0].metrics
    each = -(-num_windows // len(prepared))
    out: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for fleet in prepared:
        draws = np.random.default_rng(int(random.integers(2**32)))
        state = draws.bit_generator.state
        for name in names:
            if same_positions:
                draws.bit_generator.state = state
            values = fleet.values[fleet.metrics.index(name)]
            machine = draws.integers(values.shape[0], size=each)
            begin = draws.integers(values.shape[1] - vae.WINDOW + 1, size=each)
            window = values[machine, begin + np.arange(vae.WINDOW)[:, None]]
            size = np.where(draws.random(each) < 0.5, 1.0, draws.uniform(0.2, 1.0, each))
            moved = window * size + draws.random(each) * (1 - size)
            out[name].append(moved.astype(np.float32)[:, None])
    return {name: np.concatenate(chunks, -1)[..., :num_windows] for name, chunks in out.items()}


def fit(
    data: Float32[np.ndarray, "metric time channel n"],
    training: Training,
    show: Callable[[str], None] = lambda line: None,
) -> tuple[vae.Weights, Float[np.ndarray, "metric"]]:
    """Trains one model per metric, all in one compiled function; returns weights and errors."""
    num_metrics, _, num_channels, num_windows = data.shape
    key = jax.random.key(training.seed)
    weights = jax.vmap(lambda k: vae.init(k, num_channels))(jax.random.split(key, num_metrics))
    optimizer = optax.adam(optax.cosine_decay_schedule(training.rate, training.steps))

    def step(state: tuple, key: Array) -> tuple[tuple, Array]:
        weights, moments = state
        which, noise = jax.random.split(key)
        selected = jax.random.randint(which, (training.batch,), 0, num_windows)
        shape = (num_metrics, vae.LATENT, training.batch)
        gradient, errors = jax.grad(_sum_of_losses, has_aux=True)(
            weights,
            jnp.take(on_device, selected, axis=-1),
            jax.random.normal(noise, shape),
            training,
        )
        with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an integer power
            updates, moments = optimizer.update(gradient, moments, weights)
        return (optax.apply_updates(weights, updates), moments), errors

    on_device = jnp.asarray(data)
    state, errors = (weights, optimizer.init(weights)), jnp.zeros(())
    run = jax.jit(partial(jax.lax.scan, step))
    num_chunks = 10
    for chunk in range(num_chunks):
        keys = jax.random.split(
            jax.random.fold_in(key, chunk + 1), -(-training.steps // num_chunks)
        )
        state, errors = run(state, keys)
        show(f"step {(chunk + 1) * len(keys)}: mean squared error {errors[-20:].mean():.2e}")
    return state[0], np.asarray(errors[-20:].mean(0))


def _sum_of_losses(
    weights: vae.Weights, windows: Array, noise: Array, training: Training
) -> tuple[Array, Array]:
    each = jax.vmap(partial(vae.loss, variance=training.variance))
    bounds, errors = each(weights, windows, noise)
    return jnp.sum(bounds), errors
