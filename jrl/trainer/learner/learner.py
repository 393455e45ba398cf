"""Learner: a network with its optimizer state, float32 master weights, and their sharding.

A step of the optimizer is often smaller than the rounding error of a bfloat16 weight, which would
not change. So the optimizer updates a float32 master of each weight, sharded as its moments
(`sharding.zero`). All devices compute and sample with the cast masters, which are cast once a step,
before they are gathered. Where the network computes in float32 its weights are their own masters,
and there is no second copy.

References:
  Micikevicius et al., "Mixed Precision Training", 2018, section 3.1 (master weights).
  https://arxiv.org/abs/1710.03740
"""

from collections.abc import Callable
from functools import cache
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from jrl.recipes.base.batch import replicated
from jrl.recipes.base.optimizer import Optimizer
from moe import placement
from moe.adapters import combine_trees, select_frozen, select_trained
from moe.config import ModelConfig
from moe.weights import Transformer, cast, shapes, table
from sharding.folding import FoldedMesh
from sharding.sharded_jit import jit_sharded
from sharding.zero import unshard

Leaf = TypeVar("Leaf")
Tree = TypeVar("Tree")


@struct.dataclass
class Learner(Generic[Leaf]):
    """Network and its optimizer state.

    Attributes:
      weights: the network, in the dtype of computation.
      opt_state: of optax.
      updates: ``[]`` optimizer steps taken.
      skipped: ``[]`` optimizer steps left out because loss or gradient was not finite.
      skipped_in_a_row: ``[]`` those since the last step taken.
      masters: sharded float32 master weights, which the optimizer updates and from which `weights`
        are cast; None where it updates `weights`.
    """

    weights: Transformer[Leaf]
    opt_state: Any
    updates: Leaf
    skipped: Leaf
    skipped_in_a_row: Leaf
    masters: Transformer[Leaf] | None = None

    @property
    def float32_weights(self) -> Transformer[Leaf]:
        """Weights that the optimizer updates."""
        return self.weights if self.masters is None else self.masters


def transformation(optimizer: Optimizer) -> optax.GradientTransformation:
    """Optax transformation of an optimizer: clipping and AdamW."""
    # Clipped first: one large gradient must not stay in Adam's moments for hundreds of steps.
    # Weight decay is decoupled from them (Loshchilov and Hutter, arXiv:1711.05101).
    return optax.chain(
        optax.clip_by_global_norm(optimizer.max_grad_norm),
        # Betas of 0.9 and 0.999, the defaults of optax: `Optimizer.mu_dtype` depends on how far
        # moments move in a step.
        optax.adamw(
            optimizer.rate_at,
            weight_decay=optimizer.weight_decay,
            mu_dtype=optimizer.mu_dtype,
        ),
    )


def init_learner(
    optimizer: Optimizer, weights: Transformer[Array], config: ModelConfig, mesh: FoldedMesh
) -> Learner[Array]:
    """Creates a learner before its first step.

    Args:
      weights: float32; copied, because updates donate their buffers. For a network with adapters in
        the dtypes of computation; its frozen weights are not copied.
    """
    # Moments of trained weights only: those of a frozen weight would be zeros for ever.
    trained, frozen = split(weights, config)
    keeps = keeps_masters(config)
    trained = to_masters(config, mesh)(trained) if keeps else copy_arrays(trained)
    opt_state = _moments_init(optimizer, config, mesh)(trained)
    counters: dict[str, Any] = {
        name: replicate(jnp.zeros((), jnp.int32), mesh)
        for name in ("updates", "skipped", "skipped_in_a_row")
    }
    if keeps:
        return Learner(weights_of(trained, config, mesh), opt_state, **counters, masters=trained)
    return Learner(combine_trees(trained, frozen), opt_state, **counters)


def copy_arrays(tree: Tree) -> Tree:
    """Copies all arrays in one compiled function, as updates donate their inputs."""
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(_copy_leaves(leaves))


@jax.jit
def _copy_leaves(leaves: list[Array]) -> list[Array]:
    # A list for the reason of `sharding.sharded_jit.jit_sharded`.
    return [jnp.copy(leaf) for leaf in leaves]


@cache
def _moments_init(
    optimizer: Optimizer, config: ModelConfig, mesh: FoldedMesh
) -> Callable[..., optax.OptState]:
    """Compiled function that initialises the optimizer state of trained weights."""
    init = transformation(optimizer).init
    # For the structure: shardings do not depend on sizes.
    like = jax.eval_shape(init, select_trained(shapes(config), table(config)))
    return jit_sharded(init, state_shardings(like, config, mesh))


def replicate(tree: Tree, mesh: FoldedMesh) -> Tree:
    """Copies arrays to every device, each into a buffer of its own: a donated argument may not name
    one twice."""
    # `device_put` may return a buffer that another array has; a sum is a new one.
    return jax.tree.map(lambda leaf: jax.device_put(leaf, replicated(mesh)) + 0, tree)


def split(
    weights: Transformer[Leaf], config: ModelConfig
) -> tuple[Transformer[Leaf], Transformer[Leaf]]:
    """Splits the weights into trained and frozen ones."""
    weight_table = table(config)
    return select_trained(weights, weight_table), select_frozen(weights, weight_table)


def state_shardings(opt_state: Any, config: ModelConfig, mesh: FoldedMesh) -> Any:
    """Shardings of the optimizer state: moments sharded (`moe.placement.shard_specs`), counters
    replicated."""
    shards = split(placement.shard_shardings(config, mesh), config)[0]
    return map_networks(lambda _: shards, lambda _: replicated(mesh), opt_state)


def map_networks(
    network: Callable[[Transformer[Any]], Any], leaf: Callable[[Any], Any], tree: Any
) -> Any:
    """Maps one function over the weight trees in `tree`, and another over all other leaves."""

    def is_network(node: Any) -> bool:
        return isinstance(node, Transformer)

    return jax.tree.map(
        lambda node: network(node) if is_network(node) else leaf(node), tree, is_leaf=is_network
    )


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
    return jax.shard_map(
        lambda shards: unshard(shards, shard_dims),
        mesh=mesh.mesh,
        in_specs=(shard_specs,),
        out_specs=specs,
        check_vma=False,
    )(shards)


def constrain_sharding(
    weights: Transformer[Array], specs: Transformer[PartitionSpec], mesh: FoldedMesh
) -> Transformer[Array]:
    """Constrains the sharding of global arrays to `specs`."""
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh.mesh, spec), specs)
    return jax.lax.with_sharding_constraint(weights, shardings)


@cache
def _to_weights(config: ModelConfig, mesh: FoldedMesh) -> Callable[..., Transformer[Array]]:
    return jit_sharded(lambda masters: cast(masters, config), placement.shardings(config, mesh))
