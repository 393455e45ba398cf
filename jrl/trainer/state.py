"""Train state: everything that changes during a run, as one pytree; saved in checkpoints."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import NamedSharding
from jaxtyping import Array

from jrl.losses import EntropyStatistics
from jrl.processes.agreement import to_devices
from jrl.recipes.base.collection import Windows
from jrl.rollout.batching import replicated
from jrl.rollout.collection.ahead import Ahead
from jrl.rollout.collection.windows import Unfinished, none_unfinished
from jrl.rollout.decoding.programs.slots import Pool, abstract_pool, empty_pool
from jrl.runs.checkpoints import Checkpoints
from jrl.trainer.adapters import base
from jrl.trainer.learner import masters
from jrl.trainer.learner.learner import Learner, copied, state_shardings
from jrl.trainer.learner.records import described, making
from jrl.trainer.setup.networks import Network, Networks
from jrl.trainer.temperature import first_statistics
from moe import placement
from moe import weights as moe_weights
from moe.adapters import trees
from moe.config import ModelConfig
from moe.weights import Transformer
from sharding.folding import FoldedMesh

Leaf = TypeVar("Leaf")


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
    ahead: Ahead[Leaf] | None = None
    pool: Pool[Leaf] | None = None


def init_weights(config: ModelConfig, mesh: FoldedMesh, key: Array) -> Transformer[Array]:
    """Initialises weights, float32, sharded as `jrl.trainer.learner.masters` defines."""
    return _initialiser(config, mesh)(key)


@functools.cache
def _initialiser(config: ModelConfig, mesh: FoldedMesh) -> Callable[[Array], Transformer[Array]]:
    """Compiled function of `init_weights`, cached."""
    return making(
        lambda key: placement.in_chunks(moe_weights.initialise(config, key), mesh),
        masters.float32_shardings(config, mesh),
    )


def init_adapters(config: ModelConfig, mesh: FoldedMesh, key: Array) -> Transformer[Array]:
    """Initialises adapters, and the value head of a critic, sharded on the mesh; None in the place
    of frozen weights."""
    make = making(
        lambda key: placement.in_chunks(moe_weights.initialise_trained(config, key), mesh),
        trees.select_trained(placement.shardings(config, mesh), moe_weights.table(config)),
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
        assert adapters is not None, "a policy with adapters begins with some"
        fixed = masters.weights_of(policy, config.without_adapters(), networks.mesh)
        policy = trees.with_base(fixed, adapters, moe_weights.table(config))
        if networks.critic is not None:
            own = networks.critic.config
            learned = init_adapters(own, networks.mesh, critic_key)
            whole = trees.with_base(fixed, learned, moe_weights.table(own))
            critic = networks.critic.init(whole)
    elif networks.critic is not None:
        # It starts as the policy with a value head of zeros, so that values start at 0.
        own = networks.critic
        head = init_weights(own.config, own.mesh, critic_key).head
        critic = own.init(replace(policy, head=head))

    # `+ 0` makes a new buffer: `device_put` may return one that another field has.
    def number(value: int) -> Array:
        return jax.device_put(jnp.asarray(value, jnp.int32), replicated(networks.mesh)) + 0

    learner, reference = networks.policy.init(policy), None
    if networks.keeps_reference and config.lora is None:
        # A copy, as the first update donates the policy's buffers.
        reference = copied(learner.weights)
    return TrainState(
        step=number(0),
        prompts_seen=number(prompts_seen),
        policy=learner,
        critic=critic,
        reference=reference,
        unfinished=_unfinished(networks),
        entropy_statistics=first_statistics(networks.policy.objective.sampling, networks.mesh),
        # Empty rather than None where steps will fill it: the state keeps its structure.
        ahead=None
        if networks.ahead_spec is None
        else to_devices(networks.ahead_spec.empty(), replicated(networks.mesh)),
        pool=None if networks.pool_spec is None else empty_pool(*networks.pool_spec),
    )


def _unfinished(networks: Networks) -> Unfinished[Array] | None:
    objective = networks.policy.objective
    if not isinstance(objective.recipe.collection, Windows):
        return None
    nothing = none_unfinished(objective.recipe, objective.response_length)
    return to_devices(nothing, replicated(networks.mesh))


def abstract(networks: Networks) -> TrainState[Any]:
    """Shapes, dtypes and shardings of the state, without allocating it, to restore a checkpoint
    into."""
    policy, critic, mesh = networks.policy, networks.critic, networks.mesh

    def begun(weights: Transformer[Array], key: Array) -> TrainState[Array]:
        adapters = None
        if policy.config.lora is not None:
            adapters = init_adapters(policy.config, mesh, key)
        return init_state(networks, placement.in_chunks(weights, mesh), key, adapters=adapters)

    state = jax.eval_shape(
        begun,
        moe_weights.shapes(policy.config.without_adapters()),
        jax.eval_shape(lambda: jax.random.key(0)),
    )
    weights = placement.shardings(policy.config, mesh)
    apart = "policy", "critic", "pool"
    others = {name: x for name, x in vars(state).items() if name not in apart}
    return replace(
        state,
        **_laid_out(others, weights, mesh),
        policy=_learner_laid_out(state.policy, policy),
        critic=None if critic is None else _learner_laid_out(state.critic, critic),
        pool=None if networks.pool_spec is None else abstract_pool(*networks.pool_spec),
    )


def save(
    checkpoints: Checkpoints,
    networks: Networks,
    state: TrainState[Array],
    meta: Mapping[str, Any] | None = None,
) -> None:
    """Writes a checkpoint, with the layers in order whatever the layout of the run.

    Trained weights are stored in float32: masters where there are any, from which the weights are
    cast again on restoring. The base weights of adapters are shared by all checkpoints and written
    once (`jrl.trainer.adapters.base`).
    """
    if networks.policy.config.lora is not None:
        # First: a checkpoint of adapters without their base weights could not be restored.
        base.save(checkpoints, networks, state.policy.weights)
    # Pipeline stages may store layers out of order or with padding, which must not affect a reader
    # with another layout.
    like = _without_cast(networks, abstract(_in_order(networks)))
    num_layers = moe_weights.axis_sizes(networks.policy.config)["layer"]
    stored = _restacked(
        networks,
        _without_cast(networks, state),
        like,
        lambda weights: placement.in_layer_order(weights, networks.mesh, num_layers),
    )
    checkpoints.save(int(state.step), stored, meta)


def restore(checkpoints: Checkpoints, networks: Networks, step: int) -> TrainState[Array]:
    """Restores the state that `save` wrote, on the mesh of `networks`, which may be another."""
    like = _without_cast(networks, abstract(_in_order(networks)))
    state = checkpoints.restore(step, like)[0]
    like = _without_cast(networks, abstract(networks))
    state = _restacked(
        networks, state, like, lambda weights: placement.in_chunks(weights, networks.mesh)
    )
    if networks.policy.config.lora is not None:
        fixed = base.restore(checkpoints, networks.policy.config, networks.mesh)
        return _over_learners(functools.partial(_with_base, fixed), networks, state)
    # Last: the weights are cast from masters that are sharded as in this run.
    return _over_learners(_with_cast, networks, state)


def _without_cast(networks: Networks, state: TrainState[Leaf]) -> TrainState[Leaf]:
    """State with only the float32 weights that are trained."""

    def of(learner: Learner[Leaf], network: Network[Any]) -> Learner[Leaf]:
        # Neither cast nor frozen weights: both can be restored otherwise, and would double the size
        # of a checkpoint.
        learned = trees.select_trained(learner.float32_weights, moe_weights.table(network.config))
        return replace(learner, weights=learned, masters=None)

    return _over_learners(of, networks, state)


def _with_base(
    fixed: Transformer[Array], learner: Learner[Array], network: Network[Any]
) -> Learner[Array]:
    """Inverse of `_without_cast` for a network with adapters."""
    whole = trees.with_base(fixed, learner.weights, moe_weights.table(network.config))
    return replace(learner, weights=whole)


def _over_learners(
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
    if not networks.keeps_reference:
        return None
    if state.reference is not None:
        return networks, state.reference
    return networks.with_adapters(None), trees.without_adapters(state.policy.weights)


def _with_cast(learner: Learner[Array], network: Network[Any]) -> Learner[Array]:
    """Inverse of `_without_cast`: casts the weights from their masters."""
    if not masters.keeps_masters(network.config):
        return learner
    weights = masters.weights_of(learner.weights, network.config, network.mesh)
    return replace(learner, weights=weights, masters=learner.weights)


def _in_order(networks: Networks) -> Networks:
    """Networks on a mesh that stores weights in the order of their layers."""
    return networks.on(placement.without_chunks(networks.policy.config, networks.mesh))


def _restacked(
    networks: Networks,
    state: TrainState[Array],
    like: TrainState[Any],
    stack: Callable[[Transformer[Array]], Transformer[Array]],
) -> TrainState[Array]:
    """Applies `stack` to all weight trees of the state, with the shapes and shardings of `like`."""
    # Only a pipeline stacks layers differently.
    if networks.mesh == _in_order(networks).mesh:
        return state

    def moved(node: Any) -> Any:
        return stack(node) if isinstance(node, Transformer) else node

    # The pool has no stacked layers, and may be on other devices.
    restack = making(
        lambda state: jax.tree.map(moved, state, is_leaf=_is_network),
        jax.tree.map(lambda leaf: leaf.sharding, replace(like, pool=None)),
    )
    return replace(restack(replace(state, pool=None)), pool=state.pool)


def _learner_laid_out(learner: Learner[Any], network: Network[Any]) -> Learner[Any]:
    """Shapes and shardings of a learner, as of `update.init_learner` and `update.update`."""
    config, mesh = network.config, network.mesh
    # Separately: moments are trees like the weights, and are sharded where weights may be
    # replicated.
    others = replace(learner, opt_state=None)
    whole = _laid_out(others, placement.shardings(config, mesh), mesh)
    of_state = state_shardings(learner.opt_state, config, mesh)
    return replace(
        whole,
        opt_state=jax.tree.map(described, learner.opt_state, of_state),
        masters=_laid_out(learner.masters, placement.shard_shardings(config, mesh), mesh),
    )


def _laid_out(tree: Any, shardings: Transformer[NamedSharding], mesh: FoldedMesh) -> Any:
    """Shapes and shardings of a tree: weights by `shardings`, everything else replicated."""

    def place(node: Any) -> Any:
        if isinstance(node, Transformer):
            return jax.tree.map(described, node, shardings)
        return described(node, replicated(mesh))

    return jax.tree.map(place, tree, is_leaf=_is_network)


def _is_network(node: Any) -> bool:
    return isinstance(node, Transformer)
