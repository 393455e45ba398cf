"""Learner: a network with its optimizer state, and their sharding."""

import functools
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from jrl.recipes.base.optimizer import Optimizer
from jrl.trainer.learner import masters
from moe import placement
from moe.adapters import trees
from moe.config import ModelConfig
from moe.weights import Transformer, table
from sharding.folding import FoldedMesh
from sharding.sharded_jit import jit_sharded

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
    if config.lora is not None:
        # Moments of trained weights only: those of a frozen weight would be zeros for ever.
        trainable, base = split(weights, config)
        trained_weights = copy_arrays(trainable)
        moments = _init_moments(optimizer, trained_weights, config, mesh)
        return Learner(trees.combine_trees(trained_weights, base), moments, *_zero_counters(mesh))
    keeps = masters.keeps_masters(config)
    trained_weights = masters.to_masters(config, mesh)(weights) if keeps else copy_arrays(weights)
    opt_state = _init_moments(optimizer, trained_weights, config, mesh)
    if not keeps:
        return Learner(trained_weights, opt_state, *_zero_counters(mesh))
    weights = masters.weights_of(trained_weights, config, mesh)
    return Learner(weights, opt_state, *_zero_counters(mesh), masters=trained_weights)


def copy_arrays(tree: Tree) -> Tree:
    """Copies all arrays in one compiled function, as updates donate their inputs."""
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(_copy_leaves(leaves))


@jax.jit
def _copy_leaves(leaves: list[Array]) -> list[Array]:
    # A list for the reason of `sharding.sharded_jit.jit_sharded`.
    return [jnp.copy(leaf) for leaf in leaves]


def _init_moments(
    optimizer: Optimizer, trained_weights: Any, config: ModelConfig, mesh: FoldedMesh
) -> Any:
    leaves, structure = jax.tree.flatten(trained_weights)
    sizes = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
    return _compiled_moments_init(optimizer, structure, sizes, config, mesh)(trained_weights)


@functools.cache
def _compiled_moments_init(
    optimizer: Optimizer,
    structure: Any,
    sizes: tuple[jax.ShapeDtypeStruct, ...],
    config: ModelConfig,
    mesh: FoldedMesh,
) -> Callable[[Any], Any]:
    """Compiled function of `_init_moments`, cached."""
    init = transformation(optimizer).init
    like = jax.eval_shape(init, structure.unflatten(sizes))
    return jit_sharded(init, state_shardings(like, config, mesh))


def _zero_counters(mesh: FoldedMesh) -> tuple[Array, Array, Array]:
    """Counters of a new learner."""
    # Distinct buffers: a donated argument may not name one twice.
    replicated = NamedSharding(mesh.mesh, PartitionSpec())
    updates, skipped, in_a_row = (
        jax.device_put(jnp.zeros((), jnp.int32), replicated) + 0 for _ in range(3)
    )
    return updates, skipped, in_a_row


def split(
    weights: Transformer[Leaf], config: ModelConfig
) -> tuple[Transformer[Leaf], Transformer[Leaf]]:
    """Splits the weights into trained and frozen ones."""
    weight_table = table(config)
    return trees.select_trained(weights, weight_table), trees.select_frozen(weights, weight_table)


def state_shardings(opt_state: Any, config: ModelConfig, mesh: FoldedMesh) -> Any:
    """Shardings of the optimizer state: moments sharded (`moe.placement.shard_specs`), counters
    replicated."""
    shards = split(placement.shard_shardings(config, mesh), config)[0]

    def sharding_of(node: Any) -> Any:
        replicated = NamedSharding(mesh.mesh, PartitionSpec())
        return shards if isinstance(node, Transformer) else replicated

    return jax.tree.map(sharding_of, opt_state, is_leaf=lambda node: isinstance(node, Transformer))
