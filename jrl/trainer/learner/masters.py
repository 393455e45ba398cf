"""Float32 master weights of a network that computes in bfloat16 (mixed-precision training).

A step of the optimizer is often smaller than the rounding error of a bfloat16 weight, which would
not change. So the optimizer updates a float32 master of each weight, sharded as its moments
(`sharding.zero`). All devices compute and sample with the cast masters, which are cast once a step,
before they are gathered. Where the network computes in float32 its weights are their own masters,
and there is no second copy.

References:
  Micikevicius et al., "Mixed Precision Training", 2018, section 3.1.
  https://arxiv.org/abs/1710.03740
"""

from collections.abc import Callable
from functools import cache

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from moe import placement
from moe.adapters.trees import select_trained
from moe.config import ModelConfig
from moe.weights import Transformer, cast, table
from sharding.folding import FoldedMesh
from sharding.sharded_jit import jit_sharded
from sharding.zero import unshard


def keeps_masters(config: ModelConfig) -> bool:
    """True if the optimizer updates separate master weights."""
    # Adapters are float32 whatever the network computes in, and no other weight is trained.
    return config.dtype != "float32" and config.lora is None


def float32_shardings(config: ModelConfig, mesh: FoldedMesh) -> Transformer[NamedSharding]:
    """Shardings of the float32 weights of a network: of masters sharded, of weights that are their
    own masters those of the network."""
    shardings = placement.shard_shardings if keeps_masters(config) else placement.shardings
    return shardings(config, mesh)


@cache
def to_masters(config: ModelConfig, mesh: FoldedMesh) -> Callable[..., Transformer[Array]]:
    """Compiled function that copies weights of any dtype and sharding to new masters, shaped as
    `mesh` stores them."""
    # A copy where it is float32 already: updates donate the buffers.
    return jit_sharded(
        lambda weights: jax.tree.map(lambda leaf: jnp.copy(leaf.astype(jnp.float32)), weights),
        placement.shard_shardings(config, mesh),
    )


def weights_of(
    masters: Transformer[Array], config: ModelConfig, mesh: FoldedMesh
) -> Transformer[Array]:
    """Casts float32 masters of any sharding to the weights of computation; returns them unchanged
    where they are their own masters."""
    return _to_weights(config, mesh)(masters) if keeps_masters(config) else masters


def cast_and_gather(
    masters: Transformer[Array], config: ModelConfig, mesh: FoldedMesh
) -> Transformer[Array]:
    """Casts and all-gathers sharded masters, inside a jitted step: cast first, so that a device
    sends and receives the bytes of the weights, not those of the masters."""
    weight_table = table(config)
    specs = select_trained(placement.specs(config, mesh), weight_table)
    shard_specs = select_trained(placement.shard_specs(config, mesh), weight_table)
    shard_dims = select_trained(placement.shard_dims(config, mesh), weight_table)
    # Adapters and their base weights have no masters.
    weights = masters if config.lora is not None else cast(masters, config)
    shards = constrain_sharding(weights, shard_specs, mesh)
    # Left in shards: each layer is gathered where it runs, forward and again backward.
    if config.execution.fsdp:
        return shards
    # The type of a gather does not say that gathered weights are equal on all devices.
    gather = jax.shard_map(
        lambda shards: unshard(shards, shard_dims),
        mesh=mesh.mesh,
        in_specs=(shard_specs,),
        out_specs=specs,
        check_vma=False,
    )
    return gather(shards)


def constrain_sharding(
    weights: Transformer[Array], specs: Transformer[PartitionSpec], mesh: FoldedMesh
) -> Transformer[Array]:
    """Constrains the sharding of global arrays to `specs`."""
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh.mesh, spec), specs)
    return jax.lax.with_sharding_constraint(weights, shardings)


@cache
def _to_weights(config: ModelConfig, mesh: FoldedMesh) -> Callable[..., Transformer[Array]]:
    return jit_sharded(lambda masters: cast(masters, config), placement.shardings(config, mesh))
