"""Buffers of token dispatch: their sizes, in tokens per peer and rows per device, and the slots of
tokens and expert ids in them."""

from dataclasses import replace
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from moe.architecture.feed_forward import Activation
from moe.execution import Execution
from moe.ops.sorting import inverse_slots
from moe.router.routing import Routing
from moe.weights import Experts
from sharding.costs.transfer import balanced_rows
from sharding.folding import FoldedMesh


class DispatchOptions(NamedTuple):
    """Options of a dispatcher, see `moe.experts.dispatch.choice.dispatch`."""

    mesh: FoldedMesh
    execution: Execution = Execution()
    capacity: int | None = None
    product: str | None = None
    activation: Activation = "silu"

    def sizes(
        self, weights: Experts[Array], routing: Routing
    ) -> tuple[int, int, int, FoldedMesh, int | None, float | None]:
        """Arguments of `buffer_rows` and `peer_tokens`."""
        (num_tokens, k), num_local = routing.experts.shape, weights.down.shape[0]
        return num_tokens, k, num_local, self.mesh, self.capacity, self.execution.buffer_factor


def peer_assignments(num_tokens: int, k: int, num_local: int, capacity: int | None) -> int:
    """Largest number of expert ids that one device can send to another: ``min(T min(k, L), C L)``.

    A token has an expert once (`without_repeats` ensures it), so that it has at most ``min(k, L)``
    of the L experts of a device.
    """
    most = num_tokens * min(k, num_local)
    return most if capacity is None else min(most, capacity * num_local)


def buffer_rows(
    num_tokens: int,
    k: int,
    num_local: int,
    mesh: FoldedMesh,
    capacity: int | None = None,
    buffer_factor: float | None = None,
) -> int:
    """Largest number of rows that the experts of one device compute, for any routing.

    With ``n = ep etp`` devices that share experts these are the `peer_assignments` of each, or with
    a `buffer_factor` and if that is less the `sharding.costs.transfer.balanced_rows`.
    """
    devices = mesh.size(mesh.ep) * mesh.size(mesh.etp)
    most = devices * peer_assignments(num_tokens, k, num_local, capacity)
    if buffer_factor is None:
        return most
    return min(most, balanced_rows(buffer_factor, num_tokens, k, mesh.layout))


def peer_tokens(
    num_tokens: int,
    k: int,
    num_local: int,
    mesh: FoldedMesh,
    capacity: int | None = None,
    buffer_factor: float | None = None,
) -> int:
    """Largest number of tokens that one device can send to another, with buffers of equal size.

    A token is sent to a device once, however many of its experts are there: these are ``min(T, C
    L)``, and no more than a device's share of `buffer_rows`.
    """
    devices = mesh.size(mesh.ep) * mesh.size(mesh.etp)
    most = num_tokens if capacity is None else min(num_tokens, capacity * num_local)
    rows = buffer_rows(num_tokens, k, num_local, mesh, capacity, buffer_factor)
    return min(most, -(-rows // devices))


def local_assignments(
    experts: Int[Array, "token k"],
    probs: Float[Array, "token k"],
    num_local: int,
    mesh: FoldedMesh,
) -> tuple[Int[Array, "token columns"], Float[Array, "token columns"]]:
    """Local expert ids of each token on this device, from 0, and their gate weights.

    A token has at most ``min(k, L)`` of them, which are the columns; the rest are `num_local`.
    """
    local = experts - lax.axis_index(mesh.ep) * num_local
    is_local = (local >= 0) & (local < num_local)
    local = jnp.where(is_local, local, num_local)
    if num_local >= experts.shape[1]:
        return local, probs
    columns = _first_true(is_local, num_local)
    return jnp.take_along_axis(local, columns, axis=1), jnp.take_along_axis(probs, columns, axis=1)


def mask_replicated_bias(weights: Experts[Array], mesh: FoldedMesh) -> Experts[Array]:
    """Experts whose output bias is zero on all ``etp`` ranks but the first: the outputs of the
    ranks are partial sums, so the bias must be added once."""
    if weights.down_bias is None:
        return weights
    is_first = lax.axis_index(mesh.etp) == 0
    return replace(weights, down_bias=jnp.where(is_first, weights.down_bias, 0))


def has_experts_at(
    experts: Int[Array, "token k"], num_local: int, num_peers: int
) -> Bool[Array, "token peer"]:
    """True for a token and a device along ``ep`` that has one of its experts."""
    # Padding has an expert id past the last and so a peer past the last.
    peer = experts // num_local
    return jnp.any(peer[:, :, None] == jnp.arange(num_peers)[None, None, :], axis=1)


def slots_of(
    slot: Int[Array, "token peer"], num_slots: int, k: int
) -> tuple[Int[Array, "slot"], Int[Array, "token k"]]:
    """Token of each slot, one past the last for an empty one, and the slots of each token.

    Args:
      slot: slot of a token in the buffer for each peer, `num_slots` for none.
      k: experts per token, and so the largest number of peers that it is sent to.
    """
    num_peers = slot.shape[1]
    token = inverse_slots(slot.reshape(-1), num_slots) // num_peers
    if num_peers > k:
        slot = jnp.take_along_axis(slot, _first_true(slot < num_slots, k), axis=1)
    return token, slot


def _first_true(mask: Bool[Array, "token column"], columns: int) -> Int[Array, "token columns"]:
    """Indices of `columns` columns for each token, the true ones first, in order."""
    # By counting and not by sorting: few columns are compared with each other.
    so_far, others = jnp.cumsum(mask, axis=1), jnp.cumsum(~mask, axis=1)
    rank = jnp.where(mask, so_far, so_far[:, -1:] + others) - 1
    return jnp.argmax(rank[:, None, :] == jnp.arange(columns)[None, :, None], axis=2)
