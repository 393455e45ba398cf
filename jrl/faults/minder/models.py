"""Denoising models that are shipped with the package."""

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
