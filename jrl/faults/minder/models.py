"""Denoising models: those of the package, and those that a user trained."""

import zipfile
import zlib
from functools import cache
from pathlib import Path

from jrl.faults.minder import vae

SHIPPED = Path(__file__).parent / "models.npz"
"""The models that come with the package, as ``python -m jrl.faults train`` writes them."""
ANY = "any metric"
"""Name of the model for metrics that have none of their own, trained on all metrics together."""
JOINT = "production metrics together"
"""Name of the model of all `PRODUCTION` metrics at once: the paper's ablation "INT"."""


@cache
def shipped_models() -> dict[str, vae.Weights]:
    """The models that come with the package, by metric."""
    return vae.load(SHIPPED)


def load_models(path: Path | str) -> dict[str, vae.Weights]:
    """The models of a file that ``python -m jrl.faults train`` wrote, by metric.

    Raises:
      ValueError: where the file is damaged or something else.
      OSError: where it cannot be read.
    """
    shapes = {name: weight.shape for name, weight in shipped_models()[ANY].items()}
    try:
        models = vae.load(path)
    except (ValueError, TypeError, EOFError, zipfile.BadZipFile, zlib.error):
        models = {}
    if ANY not in models or any(
        {name: weight.shape for name, weight in weights.items()} != shapes
        for metric, weights in models.items()
        if metric != JOINT
    ):
        raise ValueError(
            f"models={str(path)!r} is not a file of denoising models, or is damaged: give one that "
            "python -m jrl.faults train wrote."
        )
    return models
