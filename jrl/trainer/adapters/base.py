"""Base weights of a run with adapters: written once, next to its checkpoints.

They are stored in ``checkpoints/base``, in the dtypes of computation and with the layers in order,
with the hashes that every checkpoint has: a run resumes without the public checkpoint that it
started from.
"""

import jax
from jaxtyping import Array

from jrl.rollout.resharding import reshard
from jrl.runs.checkpoints import Checkpoints
from jrl.trainer.learner.records import abstract_array
from jrl.trainer.setup.networks import Networks
from moe import placement
from moe.adapters.trees import without_adapters
from moe.config import ModelConfig
from moe.weights import Transformer, cast_shapes
from sharding.folding import FoldedMesh


def save(checkpoints: Checkpoints, networks: Networks, weights: Transformer[Array]) -> None:
    """Writes the base weights of a policy with adapters, unless they are stored already."""
    config, mesh = networks.policy.config.without_adapters(), networks.mesh
    base_checkpoints = _base_checkpoints(checkpoints)
    if checkpoints.latest_step() is None:
        base_checkpoints.drop_after(-1)  # of a run that was killed before its first checkpoint
    if base_checkpoints.steps():
        return
    in_order, plain = without_adapters(weights), placement.without_chunks(config, mesh)
    # Layers in order, as in every checkpoint: a run on another layout reads them too.
    if mesh != plain:
        in_order = reshard(in_order, config, mesh, plain)
    base_checkpoints.save(0, in_order)


def restore(checkpoints: Checkpoints, config: ModelConfig, mesh: FoldedMesh) -> Transformer[Array]:
    """Restores the base weights that `save` wrote, on a mesh, which may be another.

    Args:
      config: of the policy.

    Raises:
      ValueError: where they are missing, damaged, or those of another network.
    """
    config = config.without_adapters()
    plain = placement.without_chunks(config, mesh)
    like = jax.tree.map(abstract_array, cast_shapes(config), placement.shardings(config, plain))
    in_order, _ = _base_checkpoints(checkpoints).restore(0, like)
    if mesh == plain:
        return in_order
    # `reshard` returns unsharded weights (no FSDP); training may need them sharded.
    resharded = reshard(in_order, config, plain, mesh)
    return jax.device_put(resharded, placement.shardings(config, mesh))


def _base_checkpoints(checkpoints: Checkpoints) -> Checkpoints:
    return Checkpoints(checkpoints.directory / "base")
