"""Train state: everything that changes during a run, as one pytree; saved in checkpoints."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Generic, Literal, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array

from jrl.losses import EntropyStatistics
from jrl.processes.agreement import to_devices
from jrl.processes.progress import CHECKPOINT, phase
from jrl.recipes.base.batch import replicated
from jrl.recipes.base.recipe import Windows
from jrl.rollout.collection.async_collector import AsyncBuffer
from jrl.rollout.collection.windows import Unfinished, none_unfinished
from jrl.rollout.decoding.slots import SlotPool, abstract_pool, empty_pool
from jrl.rollout.resharding import reshard
from jrl.runs.checkpoints import BASE, Checkpoints
from jrl.trainer.learner.learner import (
    Learner,
    copy_arrays,
    float32_shardings,
    keeps_masters,
    map_networks,
    replicate,
    state_shardings,
    weights_of,
)
from jrl.trainer.learner.networks import Networks
from jrl.trainer.learner.update import Network
from moe import placement
from moe import weights as moe_weights
from moe.adapters import select_trained, with_base, without_adapters
from moe.config import ModelConfig
from moe.weights import Transformer
from sharding.folding import FoldedMesh
from sharding.sharded_jit import abstract_array, jit_sharded

Leaf = TypeVar("Leaf")
Purpose = Literal["weights", "critic", "rollout", "adapters"]


@dataclass(frozen=True)
class Randomness:
    """RNG keys derived from the seed, so that a run has no RNG state to save."""

    seed: int

    def key(self, purpose: Purpose) -> jax.Array:
        """RNG key for one purpose; no two purposes share a key. Keys of rollout tokens are derived
        further from prompt, sample and position."""
        # By its index in `Purpose`: reordering that would change the keys of existing runs.
        return jax.random.fold_in(jax.random.key(self.seed), get_args(Purpose).index(purpose))

    def shuffler(self, step: int, epoch: int) -> np.random.Generator:
        """Random generator for the order of rows."""
        return np.random.default_rng([self.seed, step, epoch])


@struct.dataclass
class TrainState(Generic[Leaf]):
    """Train state between two steps.

    Attributes:
      step: ``[]`` steps done.
      prompts_seen: ``[]`` training prompts used so far, warm start included.
      policy: the policy and its optimizer.
      critic: the critic and its optimizer, None if the recipe has no critic.
      reference: the reference model, the policy that training started from; None if there is no KL
        term, and for a policy with adapters, whose base weights it is (`reference_of`).
      unfinished: responses that the next step continues, None unless the recipe uses windows.
      entropy_statistics: of the step before, for the sampler of the next
        (`jrl.recipes.Recipe.entropy_statistics`): scalars, None where the sampling temperature is
        constant.
      ahead: rows sampled for later steps, None where steps are on-policy.
      pool: the slots of the engine, where rows in flight keep their KV cache; else None. A step
        donates it.
    """

    step: Leaf
    prompts_seen: Leaf
    policy: Learner[Leaf]
    critic: Learner[Leaf] | None
    reference: Transformer[Leaf] | None
    unfinished: Unfinished[Leaf] | None = None
    entropy_statistics: EntropyStatistics[Leaf] | None = None
    ahead: AsyncBuffer[Leaf] | None = None
    pool: SlotPool[Leaf] | None = None


def init_weights(config: ModelConfig, mesh: FoldedMesh, key: Array) -> Transformer[Array]:
    """Initialises weights, float32, sharded as `jrl.trainer.learner.learner` defines."""
    return _initialiser(config, mesh)(key)


@cache
def _initialiser(config: ModelConfig, mesh: FoldedMesh) -> Callable[[Array], Transformer[Array]]:
    """Compiled function of `init_weights`, cached."""
    return jit_sharded(
        lambda key: placement.in_chunks(moe_weights.initialise(config, key), mesh),
        float32_shardings(config, mesh),
    )


def init_adapters(config: ModelConfig, mesh: FoldedMesh, key: Array) -> Transformer[Array]:
    """Initialises adapters, and the value head of a critic, sharded on the mesh; None in the place
    of frozen weights."""
    return jit_sharded(
        lambda key: placement.in_chunks(moe_weights.initialise_trained(config, key), mesh),
        select_trained(placement.shardings(config, mesh), moe_weights.table(config)),
    )(key)


def init_state(
    networks: Networks,
    policy: Transformer[Array],
    critic_key: Array,
    prompts_seen: int = 0,
    adapters: Transformer[Array] | None = None,
) -> TrainState[Array]:
    """Train state before the first step.

    Args:
      policy: that training starts from, float32, without adapters.
      critic_key: RNG key of the critic's weights, if there is a critic.
      prompts_seen: training prompts used before, on whose answers the policy was trained.
      adapters: of a policy with adapters, as `init_adapters` returns them. The critic has adapters
        of its own on the same base weights, and a value head that is fully trained.
    """
    config, mesh, critic = networks.policy.config, networks.mesh, None
    # Frozen weights have no masters: they are cast once, and policy and critic share the arrays.
    if config.lora is not None:
        assert adapters is not None, "a policy with adapters needs initial adapters"
        base_weights = weights_of(policy, config.without_adapters(), mesh)
        policy = with_base(base_weights, adapters, moe_weights.table(config))
        if networks.critic is not None:
            critic_config = networks.critic.config
            critic_adapters = init_adapters(critic_config, mesh, critic_key)
            critic = networks.critic.init(
                with_base(base_weights, critic_adapters, moe_weights.table(critic_config))
            )
    elif networks.critic is not None:
        # It starts as the policy with a value head of zeros, so that values start at 0.
        head = init_weights(networks.critic.config, mesh, critic_key).head
        critic = networks.critic.init(replace(policy, head=head))
    learner = networks.policy.init(policy)
    reference = unfinished = entropy_statistics = None
    if networks.recipe.uses_reference and config.lora is None:
        # A copy, as the first update donates the policy's buffers.
        reference = copy_arrays(learner.weights)
    # Empty or neutral rather than None where steps will fill it: the state keeps its structure.
    objective = networks.policy.objective
    if isinstance(networks.recipe.collection, Windows):
        empty_rows = none_unfinished(networks.recipe, objective.response_length)
        unfinished = to_devices(empty_rows, replicated(mesh))
    if objective.sampling.adaptive is not None:
        entropy_statistics = replicate(EntropyStatistics.neutral(), mesh)
    return TrainState(
        step=replicate(jnp.zeros((), jnp.int32), mesh),
        prompts_seen=replicate(jnp.asarray(prompts_seen, jnp.int32), mesh),
        policy=learner,
        critic=critic,
        reference=reference,
        unfinished=unfinished,
        entropy_statistics=entropy_statistics,
        ahead=None
        if networks.ahead_spec is None
        else to_devices(networks.ahead_spec.empty(), replicated(mesh)),
        pool=None if networks.pool_spec is None else empty_pool(*networks.pool_spec),
    )


def abstract(networks: Networks) -> TrainState[Any]:
    """Shapes, dtypes and shardings of the state, without allocating it, to restore a checkpoint
    into."""
    policy, critic, mesh = networks.policy, networks.critic, networks.mesh

    def initial_state() -> TrainState[Array]:
        config, key = policy.config, jax.random.key(0)
        adapters = None if config.lora is None else init_adapters(config, mesh, key)
        weights = init_weights(config.without_adapters(), mesh, key)
        return init_state(networks, weights, key, adapters=adapters)

    state = replace(jax.eval_shape(initial_state), pool=None)
    pool = None if networks.pool_spec is None else abstract_pool(*networks.pool_spec)
    shardings = replace(
        _shardings(state, policy.config, mesh),
        policy=_learner_shardings(state.policy, policy),
        critic=None if critic is None else _learner_shardings(state.critic, critic),
    )
    return replace(jax.tree.map(abstract_array, state, shardings), pool=pool)


def _shardings(tree: Any, config: ModelConfig, mesh: FoldedMesh) -> Any:
    """Shardings of a tree: weights as a network is stored, everything else replicated."""
    weights = placement.shardings(config, mesh)
    return map_networks(lambda _: weights, lambda _: replicated(mesh), tree)


def _learner_shardings(learner: Learner[Any], network: Network[Any]) -> Learner[Any]:
    """Shardings of a learner, as of `update.init_learner` and `update.update`."""
    config, mesh = network.config, network.mesh
    # Separately: moments are trees like the weights, and are sharded where weights may be
    # replicated.
    return replace(
        _shardings(replace(learner, opt_state=None, masters=None), config, mesh),
        opt_state=state_shardings(learner.opt_state, config, mesh),
        masters=None if learner.masters is None else placement.shard_shardings(config, mesh),
    )


def save(
    checkpoints: Checkpoints,
    networks: Networks,
    state: TrainState[Array],
    meta: Mapping[str, Any] | None = None,
) -> None:
    """Saves a checkpoint asynchronously, with the layers in order whatever the layout of the run.

    Trained weights are stored in float32: masters if there are any, from which the weights are cast
    again on restoring. The base weights of adapters are shared by all checkpoints and written once.
    """
    if networks.policy.config.lora is not None:
        # First: a checkpoint of adapters without their base weights could not be restored.
        _save_base(checkpoints, networks, state.policy.weights)
    # Pipeline stages may store layers out of order or with padding, which must not affect a reader
    # with another layout.
    stored = _restack(_without_cast(networks, state), networks, _with_layer_order(networks))
    with phase(CHECKPOINT):
        checkpoints.save(int(state.step), stored, meta)


def restore(checkpoints: Checkpoints, networks: Networks, step: int) -> TrainState[Array]:
    """Restores the state that `save` wrote, on the mesh of `networks`, which may be another."""
    config, in_order = networks.policy.config, _with_layer_order(networks)
    with phase(CHECKPOINT):
        stored, _ = checkpoints.restore(step, _abstract_stored(in_order))
    base = None if config.lora is None else restore_base(checkpoints, config, networks.mesh)

    def complete(learner: Learner[Array], network: Network[Any]) -> Learner[Array]:
        """Inverse of `_without_cast`."""
        if base is not None:
            weights = with_base(base, learner.weights, moe_weights.table(network.config))
            return replace(learner, weights=weights)
        if not keeps_masters(network.config):
            return learner
        weights = weights_of(learner.weights, network.config, network.mesh)
        return replace(learner, weights=weights, masters=learner.weights)

    # Last: the weights are cast from masters that are sharded as in this run.
    return _map_learners(complete, networks, _restack(stored, in_order, networks))


def _save_base(checkpoints: Checkpoints, networks: Networks, weights: Transformer[Array]) -> None:
    """Writes the base weights of a policy with adapters, unless they are stored already.

    They are in ``checkpoints/base``, in the dtypes of computation: a run resumes without the public
    checkpoint that it started from.
    """
    config, mesh = networks.policy.config.without_adapters(), networks.mesh
    base_checkpoints = Checkpoints(checkpoints.directory / BASE)
    if checkpoints.latest_step() is None:
        base_checkpoints.drop_after(-1)  # of a run that was killed before its first checkpoint
    if base_checkpoints.steps():
        return
    in_order, plain = without_adapters(weights), placement.without_chunks(config, mesh)
    # Layers in order, as in every checkpoint: a run on another layout reads them too.
    if mesh != plain:
        in_order = reshard(in_order, config, mesh, plain)
    with phase(CHECKPOINT):
        base_checkpoints.save(0, in_order)
        base_checkpoints.close()


def restore_base(
    checkpoints: Checkpoints, config: ModelConfig, mesh: FoldedMesh
) -> Transformer[Array]:
    """Restores the base weights of a policy with adapters, on a mesh, which may be another.

    Raises:
      ValueError: if they are missing, damaged, or belong to another network.
    """
    config = config.without_adapters()
    plain = placement.without_chunks(config, mesh)
    like = jax.tree.map(
        abstract_array, moe_weights.cast_shapes(config), placement.shardings(config, plain)
    )
    in_order, _ = Checkpoints(checkpoints.directory / BASE).restore(0, like)
    if mesh == plain:
        return in_order
    # `reshard` returns unsharded weights (no FSDP); training may need them sharded.
    resharded = reshard(in_order, config, plain, mesh)
    return jax.device_put(resharded, placement.shardings(config, mesh))


def _without_cast(networks: Networks, state: TrainState[Leaf]) -> TrainState[Leaf]:
    """State with only the float32 weights that are trained."""

    def keep_trained(learner: Learner[Leaf], network: Network[Any]) -> Learner[Leaf]:
        # Neither cast nor frozen weights: both can be restored otherwise, and would double the size
        # of a checkpoint.
        trained_weights = select_trained(learner.float32_weights, moe_weights.table(network.config))
        return replace(learner, weights=trained_weights, masters=None)

    return _map_learners(keep_trained, networks, state)


def _abstract_stored(networks: Networks) -> TrainState[Any]:
    """Shapes, dtypes and shardings of the state as it is stored, layers as on the mesh of
    `networks`."""
    return _without_cast(networks, abstract(networks))


def _map_learners(
    function: Callable[[Learner[Leaf], Network[Any]], Learner[Leaf]],
    networks: Networks,
    state: TrainState[Leaf],
) -> TrainState[Leaf]:
    """Applies `function` to each learner of the state and its network."""
    critic = state.critic
    if critic is not None and networks.critic is not None:
        critic = function(critic, networks.critic)
    return replace(state, policy=function(state.policy, networks.policy), critic=critic)


def reference_of(
    networks: Networks, state: TrainState[Array]
) -> tuple[Networks, Transformer[Array]] | None:
    """Reference model of a KL term, and the networks whose policy it is; None without.

    For a policy with adapters it is the base weights without them: the same arrays.
    """
    if not networks.recipe.uses_reference:
        return None
    if state.reference is not None:
        return networks, state.reference
    return networks.with_adapters(None), without_adapters(state.policy.weights)


def _with_layer_order(networks: Networks) -> Networks:
    """Networks on a mesh that stores weights in the order of their layers."""
    return networks.with_mesh(placement.without_chunks(networks.policy.config, networks.mesh))


def _restack(stored: TrainState[Array], source: Networks, target: Networks) -> TrainState[Array]:
    """Reshapes the weights of a stored state from the stacks of layers on the mesh of `source` to
    the stacks on the mesh of `target`."""
    # Only a pipeline stacks layers differently, and `abstract` takes as long as a step of a small
    # network.
    if source.mesh == target.mesh:
        return stored
    num_layers = moe_weights.axis_sizes(source.policy.config)["layer"]

    def restack(weights: Transformer[Array]) -> Transformer[Array]:
        in_order = placement.in_layer_order(weights, source.mesh, num_layers)
        return placement.in_chunks(in_order, target.mesh)

    # The pool has no stacked layers, and may be on other devices.
    like = replace(_abstract_stored(target), pool=None)
    compiled = jit_sharded(
        lambda state: map_networks(restack, lambda leaf: leaf, state),
        jax.tree.map(lambda leaf: leaf.sharding, like),
    )
    return replace(compiled(replace(stored, pool=None)), pool=stored.pool)
