"""Learner: a network with its optimizer state, float32 master weights, and their sharding.

A step of the optimizer is often smaller than the rounding error of a bfloat16 weight, which would
not change. So the optimizer updates a float32 master of each weight, sharded as its moments
(`sharding.zero`). All devices compute and sample with the cast masters: they are cast once a
step, before they are gathered. A network that computes in float32 has no second copy: its weights
are their own masters.

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
from jrl.recipes.base.optimizer import Optimizer, transformation
from moe import placement
from moe.adapters import combine_trees, select_frozen, select_trained
from moe.config import Model, ModelConfig
from moe.weights import Transformer, cast, shapes, table
from sharding.folding import FoldedMesh
from sharding.sharded_jit import abstract_array, jit_sharded
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
        are cast; None if it updates `weights`.
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


def init_learner(optimizer: Optimizer, weights: Transformer[Array], model: Model) -> Learner[Array]:
    """Creates a learner before its first step.

    Args:
      weights: float32; copied, because updates donate their buffers. For a network with adapters in
        the dtypes of computation; its frozen weights are not copied.
    """
    # State of trained weights only: moments of a frozen weight would be zeros for ever.
    trained, frozen = split(weights, model.config)
    keeps = keeps_masters(model.config)
    trained = to_masters(model)(trained) if keeps else copy_arrays(trained)
    opt_state = _state_init(optimizer, model)(trained)
    counters: dict[str, Any] = {
        name: replicate(jnp.zeros((), jnp.int32), model.mesh)
        for name in ("updates", "skipped", "skipped_in_a_row")
    }
    if keeps:
        return Learner(weights_of(trained, model), opt_state, **counters, masters=trained)
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
def _state_init(optimizer: Optimizer, model: Model) -> Callable[..., Any]:
    """Compiled function that initialises the optimizer state of trained weights."""
    like = abstract_state(optimizer, model)
    init = transformation_of(optimizer, model.config).init
    return jit_sharded(init, jax.tree.map(lambda leaf: leaf.sharding, like))


def transformation_of(optimizer: Optimizer, config: ModelConfig) -> optax.GradientTransformation:
    """Optax transformation of an optimizer for the trained weights of a network."""
    weight_table = table(config)
    return transformation(optimizer, select_trained(weight_table, weight_table))


@cache
def abstract_state(optimizer: Optimizer, model: Model) -> Any:
    """Shapes, dtypes and shardings of the optimizer state of a network."""
    state = jax.eval_shape(transformation_of(optimizer, model.config).init, _trained_shapes(model))
    return jax.tree.map(abstract_array, state, state_shardings(state, model))


@cache
def _trained_shapes(model: Model) -> Transformer[jax.ShapeDtypeStruct]:
    """Shapes of the trained weights, as stored on the mesh."""
    stored = jax.eval_shape(
        lambda weights: placement.in_chunks(weights, model.mesh), shapes(model.config)
    )
    return select_trained(stored, table(model.config))


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


def state_shardings(opt_state: Any, model: Model) -> Any:
    """Shardings of an optimizer state, whatever the transformation.

    A leaf in the place of a weight is sharded as the weight's shards are
    (`moe.placement.shard_specs`): all axes of a moment, and of a factor with fewer axes those that
    it has in common with the weight. Everything else is replicated.
    """
    mesh = model.mesh
    specs = split(placement.shard_specs(model), model.config)[0]
    shapes = _trained_shapes(model)
    weights = {
        path: (leaf.shape, spec)
        for (path, leaf), spec in zip(
            jax.tree.leaves_with_path(shapes), jax.tree.leaves(specs), strict=True
        )
    }

    def shard(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        # A transformation may keep a record of its own in the place of a weight.
        for length in range(len(path), 0, -1):
            if path[:length] in weights:
                return NamedSharding(mesh.mesh, _spec_like(leaf.shape, *weights[path[:length]]))
        return replicated(mesh)

    return map_networks(
        lambda node: jax.tree.map_with_path(shard, node), lambda _: replicated(mesh), opt_state
    )


def _spec_like(
    shape: tuple[int, ...], weight_shape: tuple[int, ...], spec: PartitionSpec
) -> PartitionSpec:
    """PartitionSpec of an array that has some of a weight's axes, in their order."""
    if shape == weight_shape:
        return spec
    first, entries = 0, list[Any]()
    for size in shape:
        axis = next((i for i in range(first, len(weight_shape)) if weight_shape[i] == size), None)
        entries.append(None if axis is None or axis >= len(spec) else spec[axis])
        # An axis that the weight does not have takes the place of none.
        first = first if axis is None else axis + 1
    return PartitionSpec(*entries)


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


def float32_shardings(model: Model) -> Transformer[NamedSharding]:
    """Shardings of the float32 weights of a network: masters are sharded, and weights that are
    their own masters keep the shardings of the network."""
    shardings = placement.shard_shardings if keeps_masters(model.config) else placement.shardings
    return shardings(model)


@cache
def to_masters(model: Model) -> Callable[..., Transformer[Array]]:
    """Compiled function that copies weights of any dtype and sharding to new masters, shaped as the
    mesh stores them."""
    # A copy if it is float32 already: updates donate the buffers.
    return jit_sharded(
        lambda weights: jax.tree.map(lambda leaf: jnp.copy(leaf.astype(jnp.float32)), weights),
        placement.shard_shardings(model),
    )


def weights_of(masters: Transformer[Array], model: Model) -> Transformer[Array]:
    """Casts float32 masters of any sharding to the weights of computation; returns them unchanged
    if they are their own masters."""
    return _to_weights(model)(masters) if keeps_masters(model.config) else masters


def cast_and_gather(masters: Transformer[Array], model: Model) -> Transformer[Array]:
    """Casts and all-gathers sharded masters, inside a jitted step: cast first, so that a device
    sends and receives the bytes of the weights, not of the masters."""
    config = model.config
    weight_table = table(config)
    specs = select_trained(placement.specs(model), weight_table)
    shard_specs = select_trained(placement.shard_specs(model), weight_table)
    shard_dims = select_trained(placement.shard_dims(model), weight_table)
    # Adapters and their base weights have no masters.
    weights = masters if config.lora is not None else cast(masters, config)
    shards = constrain_sharding(weights, shard_specs, model.mesh)
    # Left in shards: each layer is gathered when it runs, forward and again backward.
    if config.execution.fsdp:
        return shards
    # The type of a gather does not say that gathered weights are equal on all devices.
    return jax.shard_map(
        lambda shards: unshard(shards, shard_dims),
        mesh=model.mesh.mesh,
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
def _to_weights(model: Model) -> Callable[..., Transformer[Array]]:
    return jit_sharded(lambda masters: cast(masters, model.config), placement.shardings(model))
