"""Router statistics: sums over tokens, for auxiliary losses and metrics."""

from collections.abc import Callable
from dataclasses import replace
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from moe.config import ModelConfig
from moe.ops.precision import float32_product
from moe.router.routing import log_scores
from sharding.collectives import all_sum, varying

Leaf = TypeVar("Leaf")
Result = TypeVar("Result")


class LoadFractions(NamedTuple):
    """The fraction of assignments that each expert got (``f_e``), ``[token, route]`` or
    ``[route]``.

    Attributes:
      sequence: among the tokens of the same sequence; None if nothing is trained.
      batch: among the tokens of the micro-batch in this sequence-parallel group (``cp x tp``), the
        rows of one ``dp`` rank; None if the coefficient of its loss is 0.
      everywhere: among the tokens of the micro-batch on all devices; None likewise.
    """

    sequence: Array | None
    batch: Array | None = None
    everywhere: Array | None = None


@struct.dataclass
class RouterStatistics(Generic[Leaf]):
    """Sums over tokens from which the router's losses and its load are computed.

    Every field but `choices` adds up over micro-batches and devices.

    Attributes:
      load: ``[route]`` assignments that each expert was chosen for, dropped ones included;
        ``[layer, route]`` for a whole network.
      tokens: ``[]`` tokens routed.
      balance: ``[]`` sum over sequences of the load-balancing loss times the tokens of the
        sequence.
      batch_balance: ``[]`` the same with the load of this sequence-parallel group's micro-batch
        instead of a sequence's; 0 if its coefficient is 0.
      global_balance: ``[]`` the same with the load of the micro-batch of all devices; 0 if its
        coefficient is 0.
      z: ``[]`` sum over tokens of the squared logsumexp of the logits.
      entropy: ``[]`` sum over tokens of the entropy of the router's distribution, in nats; no
        gradient.
      dropped: ``[]`` assignments left out because their expert was full.
      positions: ``[]`` positions in the packed batch; positions of a prompt that several rows share
        count once.
      padded: ``[]`` positions of padding.
      overflow: ``[]`` assignments that exceeded the buffers of their experts' devices and are
        missing from the result; None if the buffers are large enough for any routing
        (`Execution.buffer_factor`).
      agreed: ``[]`` sum over replayed tokens of the fraction of the router's own selection that is
        recorded (`moe.router.routing.agreement`); None if nothing is replayed.
      replayed: ``[]`` number of replayed tokens; None likewise.
      mass: ``[route]`` sum over tokens of each expert's probability, for half batches, whose
        `batch_balance` and `global_balance` are computed with the sums of the other half; else
        None.
      choices: ``[token, k]`` expert ids before dropping, ``[layer, token, k]`` for a whole network;
        None if they were not requested (`moe.model.routing_choices`).
    """

    load: Leaf
    tokens: Leaf
    balance: Leaf
    batch_balance: Leaf
    global_balance: Leaf
    z: Leaf
    entropy: Leaf
    dropped: Leaf
    positions: Leaf
    padded: Leaf
    overflow: Leaf | None = None
    agreed: Leaf | None = None
    replayed: Leaf | None = None
    mass: Leaf | None = None
    choices: Leaf | None = None


def statistics(
    logits: Float[Array, "token route"],
    probabilities: Float[Array, "token route"],
    load: Float[Array, "route"],
    fractions: LoadFractions,
    multiplicity: Float[Array, "token"],
    config: ModelConfig,
    with_mass: bool = False,
) -> RouterStatistics[Array]:
    """Router statistics: sums over tokens, each `multiplicity` times (0 for padding).

    The load-balancing loss of a set of tokens is ``E sum_e f_e P_e``, ``f_e`` the fraction of its
    assignments that expert ``e`` got (`fractions`, without gradient) and ``P_e`` the mean
    probability of ``e`` over its tokens: 1 when even, at most ``E``. Weighted by the tokens of the
    set it is a sum over tokens. Taken per sequence, it does not depend on how a batch is cut into
    micro-batches or sharded over devices; taken over a micro-batch, it does.

    Args:
      load: `RouterStatistics.load` of these tokens.
      with_mass: `RouterStatistics.mass` is computed.

    References:
      DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, eq. 17 to 20. https://arxiv.org/abs/2412.19437
      Fedus et al., "Switch Transformers", 2021, eq. 4. https://arxiv.org/abs/2101.03961
      Qiu et al., "Demons in the Detail", 2025 (counts over all devices). https://arxiv.org/abs/2501.11873
      Zoph et al., "ST-MoE", 2022, eq. 5 (z-loss). https://arxiv.org/abs/2202.08906
    """
    logits = logits.astype(jnp.float32)
    log_total = jax.nn.logsumexp(logits, axis=-1)
    scores = log_scores(logits, config)
    log_scale = jax.nn.logsumexp(scores, axis=-1)
    entropy = -jnp.sum(probabilities * (scores - log_scale[:, None]), axis=-1)
    # No loss uses it: its gradient would need the probabilities in the backward pass.
    entropy = jax.lax.stop_gradient(entropy)

    def total(per_token: Float[Array, "token *rest"]) -> Float[Array, "*rest"]:
        # Padding may hold anything: it is left out before it is multiplied.
        counted = (multiplicity > 0).reshape(-1, *(1,) * (per_token.ndim - 1))
        return float32_product(multiplicity, jnp.where(counted, per_token, 0.0))

    def balance(fraction: Array | None) -> Float[Array, ""]:
        if fraction is None:
            return jnp.zeros_like(multiplicity, shape=())
        fraction = jnp.broadcast_to(jax.lax.stop_gradient(fraction), probabilities.shape)
        return total(probabilities.shape[-1] * jnp.sum(fraction * probabilities, -1))

    return RouterStatistics(
        load=load,
        tokens=jnp.sum(multiplicity),
        balance=balance(fractions.sequence),
        batch_balance=balance(fractions.batch),
        global_balance=balance(fractions.everywhere),
        z=total(jnp.square(log_total)),
        entropy=total(entropy),
        dropped=jnp.zeros_like(multiplicity, shape=()),
        positions=jnp.sum(jnp.ones_like(multiplicity)),
        padded=jnp.sum((multiplicity == 0).astype(jnp.float32)),
        mass=total(probabilities) if with_mass else None,
    )


def sums_over_layers(
    collected: list[RouterStatistics[Array] | None], scanned: bool
) -> RouterStatistics[Array] | None:
    """Router statistics summed over layers; load and expert ids are stacked instead.

    Args:
      collected: statistics of each layer or, of a scanned stack, of each layer of a period, with a
        dimension of periods in front; None for layers without experts.
    """
    present = [stats for stats in collected if stats is not None]
    if not present:
        return None
    if scanned:
        stats = jax.tree.map(layers_in_order, *present)
        total = jax.tree.map(lambda x: jnp.sum(x, axis=0), replace(stats, choices=None))
        return replace(total, load=stats.load, choices=stats.choices)
    total = jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *present)
    by_layer = [(stats.load, stats.choices) for stats in present]
    load, choices = jax.tree.map(lambda *layers: jnp.stack(layers), *by_layer)
    return replace(total, load=load, choices=choices)


def layers_in_order(*stacks: Array) -> Array:
    """Array ``[layer, ...]`` from an array ``[period, ...]`` for each layer of a period."""
    return jnp.stack(stacks, axis=1).reshape(-1, *stacks[0].shape[1:])


def overflow_of(router: RouterStatistics[Array] | None, config: ModelConfig) -> Array | None:
    """Number of expert ids that overflowed in a pass, summed over all devices, inside the
    `jax.shard_map`.

    None without experts, or if the buffers are large enough for any routing: compiled programs then
    contain no count.
    """
    if router is None or router.overflow is None or config.execution.buffer_factor is None:
        return None
    return all_sum(router.overflow, tuple(sorted(varying(router.overflow))))


def run_with_fallback(
    program: Callable[[], tuple[Result, Array | None]], fallback: Callable[[Result], Result]
) -> tuple[Result, bool]:
    """Runs a compiled function, and another one where its buffers overflowed.

    Args:
      program: returns its result and its overflow (`overflow_of`).
      fallback: the same with buffers for any routing. Gets the result of `program`, which may have
        donated its arguments.

    Returns:
      The result, and true if `fallback` computed it.
    """
    result, overflow = program()
    # A sum over all devices, so that all processes decide alike; reading it blocks.
    if overflow is None or not int(overflow):
        return result, False
    return fallback(result), True
