"""Conversion of a network's configuration to the sizes that `sharding.planner` uses."""

from dataclasses import fields

from moe.config import ModelConfig
from sharding.planner.models.sizes import ModelSizes


def sizes_of(config: ModelConfig) -> ModelSizes:
    """Sizes of a network; biases, norms of heads and after layers, sinks, gates and windows are
    left out.

    Raises:
      ValueError: for multi-head latent attention and Gated DeltaNet, which the planner does not
        describe.
    """
    if config.mla is not None:
        raise ValueError("the planner does not support latent attention (mla).")
    if config.delta is not None:
        raise ValueError("the planner does not support Gated DeltaNet (delta).")
    same = {field.name for field in fields(ModelSizes)} - {"tied"}
    if config.num_experts == 0:
        same -= {"experts_per_token", "d_expert"}
    return ModelSizes(
        **{name: getattr(config, name) for name in same}, tied=config.head != "untied"
    )
