"""Float32 masters of weights that a network has in bfloat16 (mixed-precision training).

A step of the optimizer is often smaller than the last digit of a bfloat16 weight, which would not
move. So the optimizer steps a float32 master of each weight, in the shards of its moments
(`sharding.zero`), and what all devices have, compute with and sample with is the master cast: once
a step, before it is gathered. Where the network computes in float32 its weights are their own
masters, and there is no second copy.

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

from jrl.trainer.learner.records import making
from moe import placement
from moe.adapters.trees import trained
from moe.config import ModelConfig
from moe.weights import Transformer, cast, table
from sharding.folding import FoldedMesh
from sharding.zero import unshard


def keeps_masters(config: ModelConfig) -> bool:
    """Whether the optimizer steps masters beside the weights."""
    # Adapters are float32 whatever the network computes in, and no other weight is stepped.
    return config.dtype != "float32" and config.lora is None


def float32_shardings(config: ModelConfig, mesh: FoldedMesh) -> Transformer[NamedSharding]:
    """Where the float32 weights of a network live: the masters in shards, those that are their own
    masters where the network has them."""
    places = placement.shard_shardings if keeps_masters(config) else placement.shardings
    return places(config, mesh)


@cache
def to_masters(config: ModelConfig, mesh: FoldedMesh) -> Callable[..., Transformer[Array]]:
    """Makes masters that begin as the weights it is given, in buffers of their own: of any dtype
    and layout, shaped as `mesh` stores them."""
    # A copy where it is float32 already: updates give the buffers away.
    return making(
        lambda weights: jax.tree.map(lambda leaf: jnp.copy(leaf.astype(jnp.float32)), weights),
        placement.shard_shardings(config, mesh),
    )


def weights_of(
    masters: Transformer[Array], config: ModelConfig, mesh: FoldedMesh
) -> Transformer[Array]:
    """The weights that the network computes with, from float32 ones of any layout; these
    themselves where they are their own masters."""
    return _to_weights(config, mesh)(masters) if keeps_masters(config) else masters


def gathered(
    masters: Transformer[Array], config: ModelConfig, mesh: FoldedMesh
) -> Transformer[Array]:
    """`weights_of` masters in their shards, inside a jitted step: cast first, so that a device
    sends and receives the bytes of the weights, not those of the masters."""
    statement = table(config)
    specs = trained(placement.specs(config, mesh), statement)
    shard_specs = trained(placement.shard_specs(config, mesh), statement)
    shard_dims = trained(placement.shard_dims(config, mesh), statement)
    # Beside adapters nothing has masters, and they themselves are as they compute.
    weights = masters if config.lora is not None else cast(masters, config)
    shards = laid_out(weights, shard_specs, mesh)
    # Left in shards: each layer is gathered where it runs, forward and again backward.
    if config.execution.fsdp:
        return shards
    # That the gathered weights are equal on all devices of a cut is not in the type of a gather.
    gather = jax.shard_map(
        lambda shards: unshard(shards, shard_dims),
        mesh=mesh.mesh,
        in_specs=(shard_specs,),
        out_specs=specs,
        check_vma=False,
    )
    return gather(shards)


def laid_out(
    weights: Transformer[Array], specs: Transformer[PartitionSpec], mesh: FoldedMesh
) -> Transformer[Array]:
    """Global arrays, by `specs` from here on."""
    places = jax.tree.map(lambda spec: NamedSharding(mesh.mesh, spec), specs)
    return jax.lax.with_sharding_constraint(weights, places)


@cache
def _to_weights(config: ModelConfig, mesh: FoldedMesh) -> Callable[..., Transformer[Array]]:
    return making(lambda masters: cast(masters, config), placement.shardings(config, mesh))
