"""Train state: everything that changes during a run, as one pytree; saved in checkpoints."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import NamedSharding
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
    state_shardings,
    weights_of,
)
from jrl.trainer.learner.networks import Network, Networks
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

    RNG keys need no state: each is derived from the seed, the step and its purpose.

    Attributes:
      step: ``[]`` steps done.
      prompts_seen: ``[]`` training prompts used so far, including those of the warm start.
      policy: the policy and its optimizer.
      critic: the critic and its optimizer, None without one.
      reference: the reference model, the policy that training started from; None without a KL term,
        and for a policy with adapters, whose base weights it is (`reference_of`).
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


@functools.cache
def _initialiser(config: ModelConfig, mesh: FoldedMesh) -> Callable[[Array], Transformer[Array]]:
    """Compiled function of `init_weights`, cached."""
    return jit_sharded(
        lambda key: placement.in_chunks(moe_weights.initialise(config, key), mesh),
        float32_shardings(config, mesh),
    )


def init_adapters(config: ModelConfig, mesh: FoldedMesh, key: Array) -> Transformer[Array]:
    """Initialises adapters, and the value head of a critic, sharded on the mesh; None in the place
    of frozen weights."""
    make = jit_sharded(
        lambda key: placement.in_chunks(moe_weights.initialise_trained(config, key), mesh),
        select_trained(placement.shardings(config, mesh), moe_weights.table(config)),
    )
    return make(key)


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
      critic_key: RNG key of the critic's weights, where there is a critic.
      prompts_seen: training prompts used before, on whose answers the policy was trained.
      adapters: of a policy with adapters, as `init_adapters` returns them. The critic has adapters
        of its own on the same base weights, and a value head that is fully trained.
    """
    config, critic = networks.policy.config, None
    # Frozen weights have no masters: they are cast once, and policy and critic share the arrays.
    if config.lora is not None:
        assert adapters is not None, "a policy with adapters needs initial adapters"
        base_weights = weights_of(policy, config.without_adapters(), networks.mesh)
        policy = with_base(base_weights, adapters, moe_weights.table(config))
        if networks.critic is not None:
            critic_config = networks.critic.config
            critic_adapters = init_adapters(critic_config, networks.mesh, critic_key)
            critic_weights = with_base(
                base_weights, critic_adapters, moe_weights.table(critic_config)
            )
            critic = networks.critic.init(critic_weights)
    elif networks.critic is not None:
        # It starts as the policy with a value head of zeros, so that values start at 0.
        network = networks.critic
        head = init_weights(network.config, network.mesh, critic_key).head
        critic = network.init(replace(policy, head=head))

    # `+ 0` makes a new buffer: `device_put` may return one that another field has.
    def counter(value: int) -> Array:
        return jax.device_put(jnp.asarray(value, jnp.int32), replicated(networks.mesh)) + 0

    learner, reference = networks.policy.init(policy), None
    if networks.recipe.uses_reference and config.lora is None:
        # A copy, as the first update donates the policy's buffers.
        reference = copy_arrays(learner.weights)
    return TrainState(
        step=counter(0),
        prompts_seen=counter(prompts_seen),
        policy=learner,
        critic=critic,
        reference=reference,
        unfinished=_unfinished(networks),
        entropy_statistics=_first_statistics(networks),
        # Empty rather than None where steps will fill it: the state keeps its structure.
        ahead=None
        if networks.ahead_spec is None
        else to_devices(networks.ahead_spec.empty(), replicated(networks.mesh)),
        pool=None if networks.pool_spec is None else empty_pool(*networks.pool_spec),
    )


def _first_statistics(networks: Networks) -> EntropyStatistics[Array] | None:
    """Neutral entropy statistics for the first step, which samples at the base temperature; None
    for a constant temperature."""
    if networks.policy.objective.sampling.adaptive is None:
        return None
    # Distinct buffers, as everywhere in the state.
    sharding = replicated(networks.mesh)
    return jax.tree.map(lambda x: jax.device_put(x, sharding) + 0, EntropyStatistics.neutral())


def _unfinished(networks: Networks) -> Unfinished[Array] | None:
    objective = networks.policy.objective
    if not isinstance(objective.recipe.collection, Windows):
        return None
    empty_rows = none_unfinished(objective.recipe, objective.response_length)
    return to_devices(empty_rows, replicated(networks.mesh))


def abstract(networks: Networks) -> TrainState[Any]:
    """Shapes, dtypes and shardings of the state, without allocating it, to restore a checkpoint
    into."""
    policy, critic, mesh = networks.policy, networks.critic, networks.mesh

    def initial_state(weights: Transformer[Array], key: Array) -> TrainState[Array]:
        adapters = None
        if policy.config.lora is not None:
            adapters = init_adapters(policy.config, mesh, key)
        return init_state(networks, placement.in_chunks(weights, mesh), key, adapters=adapters)

    state = jax.eval_shape(
        initial_state,
        moe_weights.shapes(policy.config.without_adapters()),
        jax.eval_shape(lambda: jax.random.key(0)),
    )
    weights = placement.shardings(policy.config, mesh)
    separate_fields = "policy", "critic", "pool"
    other_fields = {name: x for name, x in vars(state).items() if name not in separate_fields}
    return replace(
        state,
        **_abstract_tree(other_fields, weights, mesh),
        policy=_abstract_learner(state.policy, policy),
        critic=None if critic is None else _abstract_learner(state.critic, critic),
        pool=None if networks.pool_spec is None else abstract_pool(*networks.pool_spec),
    )


def save(
    checkpoints: Checkpoints,
    networks: Networks,
    state: TrainState[Array],
    meta: Mapping[str, Any] | None = None,
) -> None:
    """Saves a checkpoint asynchronously, with the layers in order whatever the layout of the run.

    Trained weights are stored in float32: masters where there are any, from which the weights are
    cast again on restoring. The base weights of adapters are shared by all checkpoints and written
    once.
    """
    if networks.policy.config.lora is not None:
        # First: a checkpoint of adapters without their base weights could not be restored.
        _save_base(checkpoints, networks, state.policy.weights)
    # Pipeline stages may store layers out of order or with padding, which must not affect a reader
    # with another layout.
    num_layers = moe_weights.axis_sizes(networks.policy.config)["layer"]
    saved_state = _restack(
        networks,
        _without_cast(networks, state),
        lambda: _without_cast(networks, abstract(_with_layer_order(networks))),
        lambda weights: placement.in_layer_order(weights, networks.mesh, num_layers),
    )
    with phase(CHECKPOINT):
        checkpoints.save(int(state.step), saved_state, meta)


def restore(checkpoints: Checkpoints, networks: Networks, step: int) -> TrainState[Array]:
    """Restores the state that `save` wrote, on the mesh of `networks`, which may be another."""
    like = _without_cast(networks, abstract(_with_layer_order(networks)))
    with phase(CHECKPOINT):
        state = checkpoints.restore(step, like)[0]
    state = _restack(
        networks,
        state,
        lambda: _without_cast(networks, abstract(networks)),
        lambda weights: placement.in_chunks(weights, networks.mesh),
    )
    if networks.policy.config.lora is not None:
        base_weights = restore_base(checkpoints, networks.policy.config, networks.mesh)
        return _map_learners(functools.partial(_with_base, base_weights), networks, state)
    # Last: the weights are cast from masters that are sharded as in this run.
    return _map_learners(_with_cast, networks, state)


def _save_base(checkpoints: Checkpoints, networks: Networks, weights: Transformer[Array]) -> None:
    """Writes the base weights of a policy with adapters, unless they are stored already.

    They are written once, next to the checkpoints in ``checkpoints/base``, in the dtypes of
    computation and with the layers in order: a run resumes without the public checkpoint that it
    started from.
    """
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
    with phase(CHECKPOINT):
        base_checkpoints.save(0, in_order)
        base_checkpoints.close()


def restore_base(
    checkpoints: Checkpoints, config: ModelConfig, mesh: FoldedMesh
) -> Transformer[Array]:
    """Restores the base weights of a policy with adapters, on a mesh, which may be another.

    Args:
      config: of the policy.

    Raises:
      ValueError: where they are missing, damaged, or those of another network.
    """
    config = config.without_adapters()
    plain = placement.without_chunks(config, mesh)
    like = jax.tree.map(
        abstract_array, moe_weights.cast_shapes(config), placement.shardings(config, plain)
    )
    in_order, _ = _base_checkpoints(checkpoints).restore(0, like)
    if mesh == plain:
        return in_order
    # `reshard` returns unsharded weights (no FSDP); training may need them sharded.
    resharded = reshard(in_order, config, plain, mesh)
    return jax.device_put(resharded, placement.shardings(config, mesh))


def _base_checkpoints(checkpoints: Checkpoints) -> Checkpoints:
    return Checkpoints(checkpoints.directory / BASE)


def _without_cast(networks: Networks, state: TrainState[Leaf]) -> TrainState[Leaf]:
    """State with only the float32 weights that are trained."""

    def keep_trained(learner: Learner[Leaf], network: Network[Any]) -> Learner[Leaf]:
        # Neither cast nor frozen weights: both can be restored otherwise, and would double the size
        # of a checkpoint.
        trained_weights = select_trained(learner.float32_weights, moe_weights.table(network.config))
        return replace(learner, weights=trained_weights, masters=None)

    return _map_learners(keep_trained, networks, state)


def _with_base(
    base_weights: Transformer[Array], learner: Learner[Array], network: Network[Any]
) -> Learner[Array]:
    """Inverse of `_without_cast` for a network with adapters."""
    weights = with_base(base_weights, learner.weights, moe_weights.table(network.config))
    return replace(learner, weights=weights)


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


def _with_cast(learner: Learner[Array], network: Network[Any]) -> Learner[Array]:
    """Inverse of `_without_cast`: casts the weights from their masters."""
    if not keeps_masters(network.config):
        return learner
    weights = weights_of(learner.weights, network.config, network.mesh)
    return replace(learner, weights=weights, masters=learner.weights)


def _with_layer_order(networks: Networks) -> Networks:
    """Networks on a mesh that stores weights in the order of their layers."""
    return networks.with_mesh(placement.without_chunks(networks.policy.config, networks.mesh))


def _restack(
    networks: Networks,
    state: TrainState[Array],
    like: Callable[[], TrainState[Any]],
    stack: Callable[[Transformer[Array]], Transformer[Array]],
) -> TrainState[Array]:
    """Applies `stack` to all weight trees of the state, with the shapes and shardings that `like`
    returns."""
    # Only a pipeline stacks layers differently; `like` takes as long as a step of a small network.
    if networks.mesh == _with_layer_order(networks).mesh:
        return state

    def stack_node(node: Any) -> Any:
        return stack(node) if isinstance(node, Transformer) else node

    # The pool has no stacked layers, and may be on other devices.
    restack = jit_sharded(
        lambda state: jax.tree.map(stack_node, state, is_leaf=_is_network),
        jax.tree.map(lambda leaf: leaf.sharding, replace(like(), pool=None)),
    )
    return replace(restack(replace(state, pool=None)), pool=state.pool)


def _abstract_learner(learner: Learner[Any], network: Network[Any]) -> Learner[Any]:
    """Shapes and shardings of a learner, as of `update.init_learner` and `update.update`."""
    config, mesh = network.config, network.mesh
    # Separately: moments are trees like the weights, and are sharded where weights may be
    # replicated.
    others = replace(learner, opt_state=None)
    abstract_learner = _abstract_tree(others, placement.shardings(config, mesh), mesh)
    opt_shardings = state_shardings(learner.opt_state, config, mesh)
    return replace(
        abstract_learner,
        opt_state=jax.tree.map(abstract_array, learner.opt_state, opt_shardings),
        masters=_abstract_tree(learner.masters, placement.shard_shardings(config, mesh), mesh),
    )


def _abstract_tree(tree: Any, shardings: Transformer[NamedSharding], mesh: FoldedMesh) -> Any:
    """Shapes and shardings of a tree: weights by `shardings`, everything else replicated."""

    def abstract_node(node: Any) -> Any:
        if isinstance(node, Transformer):
            return jax.tree.map(abstract_array, node, shardings)
        return abstract_array(node, replicated(mesh))

    return jax.tree.map(abstract_node, tree, is_leaf=_is_network)


def _is_network(node: Any) -> bool:
    return isinstance(node, Transformer)
