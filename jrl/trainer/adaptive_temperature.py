"""Adaptive sampling temperature of a run: entropy statistics of a step, for the sampler of the next
one, and metrics of the temperatures."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array

from jrl.losses import EntropyStatistics, Mean
from jrl.recipes.base.batch import Batch, replicated, required
from jrl.recipes.base.recipe import Recipe
from jrl.rollout.sampling import Sampling
from jrl.trainer.learner.networks import Networks
from sharding.sharded_jit import DeviceJit, jit_onto


def statistics_of_step(
    networks: Networks,
    batch: Batch[Array],
    sampled: Array,
    before: EntropyStatistics[Array],
) -> EntropyStatistics[Array]:
    """Recipe's entropy statistics of a step, replicated on every device; the statistics `before` if
    no token is in the mask.

    Args:
      batch: as `jrl.trainer.step.prepare` returns it.
      sampled: ``[batch, time]`` the mask before anything was rejected.
    """
    return _statistics(networks.recipe, replicated(networks.mesh))(
        replace(batch, mask=sampled), before
    )


@cache
def _statistics(recipe: Recipe, sharding: NamedSharding) -> Callable[..., Any]:
    def latest(batch: Batch[Array], before: EntropyStatistics[Array]) -> Any:
        # Without tokens there are no statistics, but the sampler needs some.
        any_token = jnp.any(batch.mask)
        return jax.tree.map(
            lambda new, old: jnp.where(any_token, new, old),
            recipe.entropy_statistics(batch),
            before,
        )

    return jit_onto(latest, sharding)


@partial(DeviceJit, static_argnums=0)
def temperatures(
    sampling: Sampling, batch: Batch[Array], sampled: Array, before: EntropyStatistics[Array]
) -> dict[str, Array]:
    """Metrics of the temperatures at which the tokens were sampled, from the trainer's entropies.

    Args:
      batch: as `jrl.trainer.step.prepare` returns it.
      sampled: ``[batch, time]`` the mask before anything was rejected.
      before: the statistics of the step before this one.
    """
    assert sampling.adaptive is not None
    entropy, base = required(batch.old_entropy), sampling.temperature
    # The sampler's rule applied to the trainer's entropies: no temperatures need be recorded.
    token_temperatures = sampling.adaptive.token_temperatures(entropy, sampled, before, base)
    fallback = jnp.asarray(base, token_temperatures.dtype)  # reported if no token is in the mask
    low = jnp.min(jnp.where(sampled, token_temperatures, jnp.inf))
    high = jnp.max(jnp.where(sampled, token_temperatures, -jnp.inf))
    any_token = jnp.any(sampled)
    spread = {"mean": Mean.of(token_temperatures, sampled).value(), "min": low, "max": high}
    return {
        f"sampling/temperature/{n}": jnp.where(any_token, x, fallback) for n, x in spread.items()
    }
