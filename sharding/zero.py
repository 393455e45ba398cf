"""ZeRO: sharding of optimizer states, gradients and weights over replicas of a weight.

Stage 1: the gradients of the replicas are summed, and each device needs only its shard of the sum:
one reduce-scatter, a step of the optimizer on the shards, and an all-gather of the new weights.
Stage 3 (fully sharded data parallelism, FSDP) stores the weights in shards too, and unshards them
for use.

If the replicas are both inside a sequence-parallel group (``cp x tp``, whose ranks are neighbours)
and across such groups, each collective is hierarchical, one inside and one across: gradients are
scattered inside first, so that ``1 / n`` of them is sent across if n devices are inside, and
weights are gathered across first. The volume equals one collective over all. Across, gradients
may be sent in half the bytes (`sharding.compression`). They may be reduced inside the backward
pass, layer by layer (`Reduced`).

References:
  Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020,
  section 5 (stage 1 communicates as much as an all-reduce, stage 3 half as much again).
  https://arxiv.org/abs/1910.02054
  Jin et al., "MegaScale-MoE", 2025, appendix A.1 (attention weights that are replicated on every
  device of a node: reduce-scatter inside, across, all-gather across, inside).
  https://arxiv.org/abs/2505.11432
"""

import itertools
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from sharding.collectives import Axes, typed_zeros, vary, with_transpose
from sharding.compression import compressed_reduce_scatter
from sharding.folding import FoldedMesh

Leaf = TypeVar("Leaf")
Tree = TypeVar("Tree")


@dataclass(frozen=True)
class ShardDim:
    """Sharded dimension of a weight, and the mesh axes that it is sharded over.

    Attributes:
      dim: the dimension, counted from the end, so that it is the same for one of a stack.
      stages: the mesh axes, those inside a sequence-parallel group and those across; a gradient is
        scattered over one after the other. Empty if the weight is not sharded.
      compressed: the stage of these over which a gradient is sent in bfloat16 and summed in float32
        (`sharding.compression`); empty if all of it is sent in float32.
    """

    dim: int
    stages: tuple[Axes, ...]
    compressed: Axes = ()

    @property
    def atoms(self) -> Axes:
        """The axes of all stages, in the order of the shards: the first stage's change slowest."""
        return tuple(itertools.chain(*self.stages))


def replica_axes(spec: PartitionSpec, mesh: FoldedMesh) -> Axes:
    """Atomic mesh axes over which a weight is replicated, slowest first.

    For a weight of attention these are ``dp x cp``, and ``tp`` too where ``tp`` does not shard it;
    for an expert they are ``edp``.
    """
    # A dimension over one atom is written as its name alone.
    entries = ((entry,) if isinstance(entry, str) else entry or () for entry in spec)
    sharding_axes = {atom for entry in entries for atom in entry}
    return tuple(atom for atom in mesh.axes if atom not in sharding_axes)


def shard_dim(
    spec: PartitionSpec,
    shape: tuple[int, ...],
    mesh: FoldedMesh,
    first: int = 0,
    comm_dtype: str = "float32",
) -> ShardDim:
    """Dimension of a weight that its optimizer state is sharded along, and the `replica_axes` used.

    It is the dimension, not sharded in the weight, that can be sharded over the most devices, the
    first of equals. All replica axes are used if its size is divisible by the number of replicas;
    along axes that it is not divisible by, shards are replicated.

    Args:
      spec: sharding of the weight.
      shape: shape of the full weight.
      first: leading dimensions that are not to be sharded.
      comm_dtype: "float32" or "bfloat16", the communication dtype of gradients across
        sequence-parallel groups. Inside a group they are sent in float32, and so are gradients
        across replica axes that no dimension is divisible by.
    """
    spec = PartitionSpec(*spec, *[None] * (len(shape) - len(spec)))
    # A dimension sharded over tp, ep or pp could be sharded further only by moving elements.
    unsharded_dims = [dim for dim, entry in enumerate(spec) if entry is None and dim >= first]
    atoms = {
        dim: _dividing_atoms(shape[dim], replica_axes(spec, mesh), mesh) for dim in unsharded_dims
    }
    best = max(unsharded_dims, key=lambda dim: mesh.size(atoms[dim]), default=None)
    if best is None:
        return ShardDim(-1, ())
    inside = tuple(atom for atom in atoms[best] if atom in mesh.sequence)
    across = tuple(atom for atom in atoms[best] if atom not in mesh.sequence)
    stages = tuple(stage for stage in (inside, across) if stage)
    return ShardDim(best - len(shape), stages, across if comm_dtype == "bfloat16" else ())


def shard_spec(
    spec: PartitionSpec, shape: tuple[int, ...], mesh: FoldedMesh, first: int = 0
) -> PartitionSpec:
    """PartitionSpec of a weight's optimizer state: `spec`, sharded along its `shard_dim` too."""
    sharded_dim = shard_dim(spec, shape, mesh, first)
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    if sharded_dim.atoms:
        entries[sharded_dim.dim] = sharded_dim.atoms
    return PartitionSpec(*entries)


def reduce_scatter(
    mesh: FoldedMesh,
    spec: PartitionSpec,
    sharded_dim: ShardDim,
    gradient: Array,
    is_sharded: bool = False,
) -> Array:
    """Reduce-scatter: the gradient summed over all `replica_axes`; each device keeps its shard.

    Runs inside the `jax.shard_map`; the result is sharded as `shard_spec`. Volume sent, of a
    gradient of G numbers and n replicas: ``G (n-1)/n``, half the volume of an all-reduce. With i of
    them inside a sequence-parallel group and a across, n = i a, that is ``G (i-1)/i`` inside and
    ``(G/i) (a-1)/a`` across. The numbers are float32, bfloat16 across groups if `sharded_dim` is
    `compressed`: half the bytes, and each element of the sum off by at most ``2^-8 sum |g_i|`` over
    the a terms that are sent.

    Args:
      spec: sharding of the weight.
      sharded_dim: its `ShardDim`.
      gradient: local gradient, not reduced, varying over every axis.
      is_sharded: the gradient is of shards, and the transpose of `unshard` has summed it over
        the devices of `sharded_dim`.
    """
    if sharded_dim.atoms and not is_sharded:
        gradient = _reduce_scatter_gradient(gradient, sharded_dim)
    # Along replica axes that no dimension is divisible by, the sum is replicated.
    return lax.psum(
        gradient, tuple(a for a in replica_axes(spec, mesh) if a not in sharded_dim.atoms)
    )


def unshard(shards: Tree, shard_dims: Any) -> Tree:
    """All-gathers full weights from their shards; `shard_dims` has a `ShardDim` for each.

    Runs inside the `jax.shard_map`, on shards that vary over the devices they are sharded over. Its
    gradient is a reduce-scatter into shards, so FSDP needs no backward pass of its own. It sums in
    float32, whatever dtype the shards are gathered in, and rounds to that once. Volume sent, of a
    weight of W numbers in n shards: ``W (n-1)/n`` in the dtype of the shards, and as many float32
    numbers by the gradient, bfloat16 across groups if the `ShardDim` is `compressed`. A gradient
    is then rounded each time that it is scattered, for every micro-batch; it is not rounded if no
    device is inside and the shards are bfloat16, as their gradient is bfloat16 already.
    """

    def gather(shard: Array, sharded_dim: ShardDim) -> Array:
        if not sharded_dim.atoms:
            return shard
        dtype = shard.dtype

        def gather_stages(shard: Array) -> Array:
            for stage in reversed(sharded_dim.stages):
                shard = lax.all_gather(shard, stage, axis=shard.ndim + sharded_dim.dim, tiled=True)
            return shard

        def scatter(gradient: Array) -> Array:
            gradient = gradient.astype(jnp.float32)
            return _reduce_scatter_gradient(gradient, sharded_dim).astype(dtype)

        return with_transpose(gather_stages, scatter)(shard)

    return jax.tree.map(gather, shards, shard_dims)


def _reduce_scatter_gradient(gradient: Array, sharded_dim: ShardDim) -> Array:
    for stage in sharded_dim.stages:
        dim = gradient.ndim + sharded_dim.dim
        if stage == sharded_dim.compressed:
            gradient = compressed_reduce_scatter(gradient, stage, dim)
        else:
            gradient = lax.psum_scatter(gradient, stage, scatter_dimension=dim, tiled=True)
    return gradient


def _dividing_atoms(size: int, atoms: Axes, mesh: FoldedMesh) -> Axes:
    """The subset of the atoms over which `size` is divisible into the most shards."""
    atoms = tuple(atom for atom in atoms if mesh.size((atom,)) > 1)
    subsets = (subset for n in range(len(atoms) + 1) for subset in itertools.combinations(atoms, n))
    return max((subset for subset in subsets if size % mesh.size(subset) == 0), key=mesh.size)


@dataclass(frozen=True)
class Reduction:
    """Reduction of a weight's gradient over devices: the arguments of `reduce_scatter`."""

    mesh: FoldedMesh
    spec: PartitionSpec
    sharded_dim: ShardDim
    is_sharded: bool = False

    def __call__(self, gradient: Array) -> Array:
        return reduce_scatter(self.mesh, self.spec, self.sharded_dim, gradient, self.is_sharded)

    def sum_zeros(self, weight: Array) -> Array:
        """Zeros of the shape and type of the sum, float32; the weight may vary over any axes."""
        shape = jax.eval_shape(
            lambda weight: self(vary(weight.astype(jnp.float32), self.mesh.axes)), weight
        )
        return typed_zeros(shape)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["weight", "before", "sum_zeros"],
    meta_fields=["reduction"],
)
@dataclass(frozen=True)
class Reduced(Generic[Leaf]):
    """A weight, or a stack of one per layer, whose gradient is reduced inside the backward pass.

    A weight has a gradient in each micro-batch of gradient accumulation. A reduction after the last
    micro-batch would send the gradients of the whole network without overlap. Here the backward
    pass of the last micro-batch adds, weight by weight, the gradients of the others and starts the
    reduction: nothing waits for it, and it does not wait for layers that come later in that pass.

    Attributes:
      weight: varying over all mesh axes.
      before: the local gradient of earlier micro-batches, not reduced, float32; None without.
      sum_zeros: zeros of the type of the sum (`Reduction.sum_zeros`): the sum is the gradient of
        these.
      reduction: reduction of the weight.

    References:
      Jin et al., "MegaScale-MoE", 2025 (gradients of a layer reduced beside the backward pass of
      the next). Megatron-LM calls it `--overlap-grad-reduce`. https://arxiv.org/abs/2505.11432
    """

    weight: Leaf
    before: Leaf | None
    sum_zeros: Leaf
    reduction: Reduction


def weights_of(tree: Any) -> Any:
    """Replaces each `Reduced` of a pytree by its weight; all other leaves are unchanged.

    The gradient of `Reduced.sum_zeros` is the sum over devices of `Reduced.before` and the weight's
    output gradient; the weight itself has none. Within a scan over stacked layers this runs on the
    slice of one layer, and the reduction starts in each iteration of the backward loop.
    """

    def reduced_weight(leaf: Any) -> Any:
        if not isinstance(leaf, Reduced):
            return leaf
        return _reduce_in_backward(leaf.reduction, leaf.weight, leaf.before, leaf.sum_zeros)

    return jax.tree.map(reduced_weight, tree, is_leaf=lambda leaf: isinstance(leaf, Reduced))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _reduce_in_backward(
    reduction: Reduction, weight: Array, before: Any, sum_zeros: Array
) -> Array:
    return weight


def _keep_before(
    reduction: Reduction, weight: Array, before: Any, sum_zeros: Array
) -> tuple[Array, Any]:
    return weight, before


def _reduce(reduction: Reduction, before: Any, gradient: Array) -> tuple[None, None, Array]:
    gradient = gradient.astype(jnp.float32)
    return None, None, reduction(gradient if before is None else before + gradient)


_reduce_in_backward.defvjp(_keep_before, _reduce)
