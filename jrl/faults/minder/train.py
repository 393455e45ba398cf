"""``python -m jrl.faults train RECORDS``: trains the denoising models on records without faults.

`--models` of ``watch`` and ``replay`` uses them. A fleet's own healthy records make better models
than simulated fleets, which the models of the package were trained on.
"""

import shlex
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
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

from jrl.checks import check_seed
from jrl.command_line import parse_flags
from jrl.faults.collect.fleet import Fleet
from jrl.faults.collect.vocabulary import meaning
from jrl.faults.minder import vae
from jrl.faults.minder.embedding import prepare
from jrl.program import program


@dataclass(frozen=True)
class Training:
    """Settings of the models' training; the paper gives none of these."""

    out: str = "models.npz"
    """The file to write; by default models.npz in the working directory. --models of watch and
    replay reads it."""
    seed: int = 0
    """Random seed of windows, weights and noise."""
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


@dataclass(frozen=True)
class TrainOptions(Training):
    """Healthy records to train on, and settings of the training."""

    records: tyro.conf.Positional[tuple[str, ...]] = ()
    """Healthy records (.npz) to train on, for example healthy.npz."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    options = parse_flags(TrainOptions, program("faults train"), arguments)
    check_seed(options.seed)
    if not options.records:
        raise ValueError(
            "records is empty: give files of healthy records, for example healthy.npz; "
            "python -m benchmarks.faults train, in a checkout, trains on simulated fleets."
        )
    fleets = [Fleet.load(path) for path in options.records]
    write_models(*train_models(fleets, options, show=Console().print), options.out)
    return 0


def write_models(models: dict[str, vae.Weights], errors: Mapping[str, float], out: str) -> None:
    """Writes a file of models, and prints its size, the errors and the command that uses it."""
    vae.save(out, models)
    print(f"{out}: {len(models)} models, {Path(out).stat().st_size / 1024:.0f} KiB")
    print("mean squared error: " + ", ".join(f"{k} {v:.2e}" for k, v in errors.items()))
    file = shlex.quote(out)
    print(f"use them: {program('faults replay')} RECORD --detector minder --models {file}")


def train_models(
    fleets: Sequence[Fleet], training: Training, show: Callable[[str], None] = lambda line: None
) -> tuple[dict[str, vae.Weights], dict[str, float]]:
    """One model per metric and `vae.ANY`, trained together, and their mean squared errors."""
    windows = windows_by_model(fleets, training.windows, np.random.default_rng(training.seed))
    data = np.stack(list(windows.values()))
    weights, errors = fit(data, training, show)
    models = {name: {k: v[i] for k, v in weights.items()} for i, name in enumerate(windows)}
    return models, dict(zip(windows, errors.tolist(), strict=True))


def windows_by_model(
    fleets: Sequence[Fleet], num_windows: int, random: np.random.Generator
) -> dict[str, Float32[np.ndarray, "time channel n"]]:
    """Windows to train each model on, `vae.ANY` last.

    Models have the names that `Minder` looks up (`jrl.faults.collect.vocabulary.meaning`): recorded
    metrics of the same meaning, such as the power of each GPU, have one model.
    """
    recorded = gather_windows(fleets, num_windows, random)
    of_any = _select(list(recorded.values()), num_windows, random)
    by_meaning: defaultdict[str, list[np.ndarray]] = defaultdict(list)
    for name, of_metric in recorded.items():
        by_meaning[meaning(name)].append(of_metric)
    windows = {
        name: arrays[0] if len(arrays) == 1 else _select(arrays, num_windows, random)
        for name, arrays in by_meaning.items()
    }
    return {**windows, vae.ANY: of_any}


def gather_windows(
    fleets: Sequence[Fleet],
    num_windows: int,
    random: np.random.Generator,
    same_positions: bool = False,
) -> dict[str, Float32[np.ndarray, "time channel n"]]:
    """Windows of each metric of the first fleet, equally many per fleet.

    With `same_positions`, they are at the same positions for all metrics. About half of them are
    shrunk and shifted inside [0, 1]. A fault of one machine widens the range that its fleet is
    scaled by, and the models have to see healthy machines of such a fleet too.

    Raises:
      ValueError: if a fleet lacks one of these metrics.
    """
    prepared = [prepare(fleet) for fleet in fleets]
    names = prepared[0].metrics
    per_fleet = -(-num_windows // len(prepared))
    windows: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for index, fleet in enumerate(prepared):
        missing = [name for name in names if name not in fleet.metrics]
        if missing:
            raise ValueError(
                f"record {index + 1} has no metric {missing[0]!r} that varies, as the first has: "
                "train on records of the same metrics."
            )
        draws = np.random.default_rng(int(random.integers(2**32)))
        state = draws.bit_generator.state
        for name in names:
            if same_positions:
                draws.bit_generator.state = state
            values = fleet.values[fleet.metrics.index(name)]
            machine = draws.integers(values.shape[0], size=per_fleet)
            begin = draws.integers(values.shape[1] - vae.WINDOW + 1, size=per_fleet)
            window = values[machine, begin + np.arange(vae.WINDOW)[:, None]]
            shrinks = draws.random(per_fleet) >= 0.5
            scale = np.where(shrinks, draws.uniform(0.2, 1.0, per_fleet), 1.0)
            moved = window * scale + draws.random(per_fleet) * (1 - scale)
            windows[name].append(moved.astype(np.float32)[:, None])
    return {name: np.concatenate(arrays, -1)[..., :num_windows] for name, arrays in windows.items()}


def _select(
    arrays: Sequence[np.ndarray], num_windows: int, random: np.random.Generator
) -> Float32[np.ndarray, "time channel n"]:
    """Random windows out of the arrays, with replacement."""
    pooled = np.concatenate(arrays, axis=-1)
    return pooled[..., random.integers(pooled.shape[-1], size=num_windows)]


def fit(
    data: Float32[np.ndarray, "metric time channel n"],
    training: Training,
    show: Callable[[str], None] = lambda line: None,
) -> tuple[vae.Weights, Float[np.ndarray, "metric"]]:
    """Weights of one model per metric, stacked, all trained in one compiled function, and the mean
    squared error of each metric over the last steps."""
    num_metrics, _, num_channels, num_windows = data.shape
    key = jax.random.key(training.seed)
    weights = jax.vmap(lambda k: vae.init(k, num_channels))(jax.random.split(key, num_metrics))
    optimizer = optax.adam(optax.cosine_decay_schedule(training.rate, training.steps))

    def step(state: tuple, key: Array) -> tuple[tuple, Array]:
        weights, moments = state
        selection_key, noise_key = jax.random.split(key)
        selected = jax.random.randint(selection_key, (training.batch,), 0, num_windows)
        shape = (num_metrics, vae.LATENT, training.batch)
        gradient, errors = jax.grad(_sum_of_losses, has_aux=True)(
            weights,
            jnp.take(on_device, selected, axis=-1),
            jax.random.normal(noise_key, shape),
            training,
        )
        with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an integer power
            updates, moments = optimizer.update(gradient, moments, weights)
        return (optax.apply_updates(weights, updates), moments), errors

    on_device = jnp.asarray(data)
    state, errors = (weights, optimizer.init(weights)), jnp.zeros(())
    run = jax.jit(partial(jax.lax.scan, step))
    chunk_steps = -(-training.steps // 10)
    for chunk in range(1, 11):
        keys = jax.random.split(jax.random.fold_in(key, chunk), chunk_steps)
        state, errors = run(state, keys)
        show(f"step {chunk * chunk_steps}: mean squared error {errors[-20:].mean():.2e}")
    return state[0], np.asarray(errors[-20:].mean(0))


def _sum_of_losses(
    weights: vae.Weights, windows: Array, noise: Array, training: Training
) -> tuple[Array, Array]:
    losses = jax.vmap(partial(vae.loss, variance=training.variance))
    bounds, errors = losses(weights, windows, noise)
    return jnp.sum(bounds), errors
