"""LSTM-VAE that denoises windows of one metric, and files of such models.

The sizes are the paper's: one LSTM layer with hidden size 4, latent size 8, windows of 8 samples.
The layout is not known in detail: here the decoder, a second LSTM, reads the latent vector at each
step. The last axis has the machines, so that gates are computed for thousands at a time.
"""

import io
import zipfile
import zlib
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

WINDOW, HIDDEN, LATENT = 8, 4, 8
Weights = dict[str, Array]

SHIPPED = Path(__file__).parent / "models.npz"
"""The models that come with the package, as ``python -m benchmarks.faults train`` writes them."""
ANY = "any metric"
"""Name of the model for metrics that have none of their own, trained on all metrics together."""
JOINT = "production metrics together"
"""Name of the model of all `PRODUCTION` metrics at once: the paper's ablation "INT"."""


def init(key: Array, num_channels: int = 1) -> Weights:
    """Weights of one model for windows of `num_channels` metrics, normal with variance 1/inputs.

    A model of multiple metrics has the same sizes as a model of one.
    """
    hidden, latent = HIDDEN, LATENT
    shapes = {
        "encoder/input": (4 * hidden, num_channels),
        "encoder/state": (4 * hidden, hidden),
        "mean/kernel": (latent, hidden),
        "log_variance/kernel": (latent, hidden),
        "decoder/input": (4 * hidden, latent),
        "decoder/state": (4 * hidden, hidden),
        "output/kernel": (num_channels, hidden),
    }
    keys = jax.random.split(key, len(shapes))
    weights = {
        name: jax.random.normal(k, shape) * shape[1] ** -0.5
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    for name in ("encoder", "decoder"):
        # A forget gate that starts open remembers the window (Jozefowicz et al., 2015).
        weights[f"{name}/bias"] = jnp.zeros((4 * hidden, 1)).at[hidden : 2 * hidden].set(1.0)
    for name, size in (("mean", latent), ("log_variance", latent), ("output", num_channels)):
        weights[f"{name}/bias"] = jnp.zeros((size, 1))
    return weights


def _cell(gates: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
    """One step of an LSTM; `gates` are input, forget, candidate and output, one below the other."""
    _, memory = state
    let_in, forget, candidate, out = jnp.split(gates, 4)
    memory = jax.nn.sigmoid(forget) * memory + jax.nn.sigmoid(let_in) * jnp.tanh(candidate)
    return jax.nn.sigmoid(out) * jnp.tanh(memory), memory


def encode(
    weights: Weights, windows: Float[Array, "time channel n"]
) -> tuple[Float[Array, "latent n"], Float[Array, "latent n"]]:
    """Mean and log-variance of the latent vector of each window."""
    zero = jnp.zeros((weights["encoder/state"].shape[1], windows.shape[-1]))
    state = (zero, zero)
    for sample in windows:
        gates = weights["encoder/input"] @ sample + weights["encoder/state"] @ state[0]
        state = _cell(gates + weights["encoder/bias"], state)
    mean = weights["mean/kernel"] @ state[0] + weights["mean/bias"]
    return mean, weights["log_variance/kernel"] @ state[0] + weights["log_variance/bias"]


def decode(weights: Weights, latent: Float[Array, "latent n"]) -> Float[Array, "time channel n"]:
    """Decodes latent vectors to windows."""
    zero = jnp.zeros((weights["decoder/state"].shape[1], latent.shape[-1]))
    state, samples = (zero, zero), []
    latent_gates = weights["decoder/input"] @ latent + weights["decoder/bias"]
    for _ in range(WINDOW):
        state = _cell(latent_gates + weights["decoder/state"] @ state[0], state)
        samples.append(weights["output/kernel"] @ state[0] + weights["output/bias"])
    return jnp.stack(samples)


def reconstruct(
    weights: Weights, windows: Float[Array, "time channel n"]
) -> Float[Array, "time channel n"]:
    """Reconstruction of the windows through the latent mean: the embedding of the detector."""
    return decode(weights, encode(weights, windows)[0])


def loss(
    weights: Weights,
    windows: Float[Array, "time channel n"],
    noise: Float[Array, "latent n"],
    *,
    variance: float,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Negative evidence lower bound (ELBO) per window, in nats up to a constant, and the mean
    squared error.

    ``|x - x'|^2 / (2 variance) + KL(q(z|x) || N(0, 1))`` with
    ``z = mean + exp(log_variance / 2) noise``.
    """
    mean, log_variance = encode(weights, windows)
    rebuilt = decode(weights, mean + jnp.exp(0.5 * log_variance) * noise)
    error = jnp.square(windows - rebuilt)
    divergence = 0.5 * jnp.sum(jnp.exp(log_variance) + mean**2 - 1 - log_variance, axis=0)
    bound = jnp.sum(error, axis=(0, 1)) / (2 * variance) + divergence
    return jnp.mean(bound), jnp.mean(error)


def save(path: Path | str, models: dict[str, Weights]) -> None:
    """Writes models by metric name, as one ``.npz`` file of ``metric/layer/parameter`` arrays."""
    arrays = {
        f"{metric}/{name}": np.asarray(value, np.float32)
        for metric, weights in models.items()
        for name, value in weights.items()
    }
    with Path(path).open("wb") as file:
        np.savez_compressed(file, **arrays)  # pyright: ignore[reportArgumentType]


def load(path: Path | str) -> dict[str, Weights]:
    """Reads a file that `save` wrote."""
    models: dict[str, Weights] = {}
    # From memory, for numpy leaves the file of a damaged one open.
    with np.load(io.BytesIO(Path(path).read_bytes()), allow_pickle=False) as file:
        for key in file.files:
            metric, layer, parameter = key.rsplit("/", 2)  # a metric may be step/time
            models.setdefault(metric, {})[f"{layer}/{parameter}"] = jnp.asarray(file[key])
    return models


@cache
def shipped_models() -> dict[str, Weights]:
    """The models that come with the package, by metric."""
    return load(SHIPPED)


def load_models(path: Path | str) -> dict[str, Weights]:
    """The models of a file that ``python -m jrl.faults train`` wrote, by metric.

    Raises:
      ValueError: if the file is damaged or something else.
      OSError: if it cannot be read.
    """
    shapes = {name: weight.shape for name, weight in shipped_models()[ANY].items()}
    try:
        models = load(path)
    except (ValueError, TypeError, EOFError, zipfile.BadZipFile, zlib.error):
        models = {}
    if ANY not in models or any(
        {name: weight.shape for name, weight in weights.items()} != shapes
        for metric, weights in models.items()
        if metric != JOINT
    ):
        raise ValueError(
            f"models={str(path)!r} is not a file of denoising models, or is damaged: give one that "
            "jrl faults train wrote."
        )
    return models
