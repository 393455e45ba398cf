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
from jrl.trainer.learner.records import making
from moe import placement
from moe.adapters import trees
from moe.config import ModelConfig
from moe.weights import Transformer, table
from sharding.folding import FoldedMesh

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
        learned, base = split(weights, config)
        own = copied(learned)
        moments = _first_moments(optimizer, own, config, mesh)
        return Learner(trees.combine_trees(own, base), moments, *_zeros(mesh))
    keeps = masters.keeps_masters(config)
    own = masters.to_masters(config, mesh)(weights) if keeps else copied(weights)
    opt_state = _first_moments(optimizer, own, config, mesh)
    if not keeps:
        return Learner(own, opt_state, *_zeros(mesh))
    weights = masters.weights_of(own, config, mesh)
    return Learner(weights, opt_state, *_zeros(mesh), masters=own)


def copied(tree: Tree) -> Tree:
    """Copies all arrays in one compiled function, as updates donate their inputs."""
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(_copies(leaves))


@jax.jit
def _copies(leaves: list[Array]) -> list[Array]:
    # A list for the reason of `jrl.trainer.learner.records.making`.
    return [jnp.copy(leaf) for leaf in leaves]


def _first_moments(optimizer: Optimizer, own: Any, config: ModelConfig, mesh: FoldedMesh) -> Any:
    leaves, structure = jax.tree.flatten(own)
    sizes = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
    return _moments_program(optimizer, structure, sizes, config, mesh)(own)


@functools.cache
def _moments_program(
    optimizer: Optimizer,
    structure: Any,
    sizes: tuple[jax.ShapeDtypeStruct, ...],
    config: ModelConfig,
    mesh: FoldedMesh,
) -> Callable[[Any], Any]:
    """Compiled function of `_first_moments`, cached."""
    init = transformation(optimizer).init
    like = jax.eval_shape(init, structure.unflatten(sizes))
    return making(init, state_shardings(like, config, mesh))


def _zeros(mesh: FoldedMesh) -> tuple[Array, Array, Array]:
    """Counters of a new learner."""
    # Distinct buffers: a donated argument may not name one twice.
    whole = NamedSharding(mesh.mesh, PartitionSpec())
    updates, skipped, in_a_row = (
        jax.device_put(jnp.zeros((), jnp.int32), whole) + 0 for _ in range(3)
    )
    return updates, skipped, in_a_row


def split(
    weights: Transformer[Leaf], config: ModelConfig
) -> tuple[Transformer[Leaf], Transformer[Leaf]]:
    """Splits the weights into trained and frozen ones."""
    statement = table(config)
    return trees.select_trained(weights, statement), trees.select_frozen(weights, statement)


def state_shardings(opt_state: Any, config: ModelConfig, mesh: FoldedMesh) -> Any:
    """Shardings of the optimizer state: moments sharded (`moe.placement.shard_specs`), counters
    replicated."""
    shards = split(placement.shard_shardings(config, mesh), config)[0]

    def place(node: Any) -> Any:
        whole = NamedSharding(mesh.mesh, PartitionSpec())
        return shards if isinstance(node, Transformer) else whole

    return jax.tree.map(place, opt_state, is_leaf=lambda node: isinstance(node, Transformer))
