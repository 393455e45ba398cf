"""Train state: everything that changes during a run, as one pytree; saved in checkpoints."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Any, Generic, Literal, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array

from jrl.processes.agreement import to_devices, to_host
from jrl.processes.progress import CHECKPOINT, phase
from jrl.recipes.base.batch import CRITIC, replicated
from jrl.recipes.base.recipe import POLICY
from jrl.rollout.collection.async_collector import AsyncBuffer
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
from jrl.trainer.learner.networks import Frozen, Networks
from jrl.trainer.learner.update import Network
from moe import placement
from moe import weights as moe_weights
from moe.adapters import select_trained, with_base, without_adapters
from moe.config import Model, ModelConfig
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
      networks: by role, a `Learner` of each trained network and the weights of frozen ones. A
        frozen policy with adapters is its base weights, and not among them (`frozen_weights`).
      algorithm: state of the algorithm (`jrl.recipes.Recipe.init_state`).
      ahead: rows sampled for later steps, None where steps are on-policy.
      pool: the slots of the engine, where rows in flight keep their KV cache; else None. A step
        donates it.
    """

    step: Leaf
    prompts_seen: Leaf
    networks: dict[str, Any]
    algorithm: dict[str, Any]
    ahead: AsyncBuffer[Leaf] | None = None
    pool: SlotPool[Leaf] | None = None

    @property
    def policy(self) -> Learner[Leaf]:
        return self.networks[POLICY]

    @property
    def critic(self) -> Learner[Leaf] | None:
        """The critic; None if the recipe has none."""
        return self.networks.get(CRITIC)

    def with_network(self, role: str, network: Any) -> "TrainState[Leaf]":
        """Copy with another network in a role."""
        return replace(self, networks={**self.networks, role: network})


RESERVED = ("step", "prompts_seen", "ahead", "pool")
"""Names of a stored state beside the roles of networks and the names of the algorithm's state."""


def init_weights(model: Model, key: Array) -> Transformer[Array]:
    """Initialises weights, float32, sharded as `jrl.trainer.learner.learner` defines."""
    return _initialiser(model)(key)


@cache
def _initialiser(model: Model) -> Callable[[Array], Transformer[Array]]:
    """Compiled function of `init_weights`, cached."""
    return jit_sharded(
        lambda key: placement.in_chunks(moe_weights.initialise(model.config, key), model.mesh),
        float32_shardings(model),
    )


def init_adapters(model: Model, key: Array) -> Transformer[Array]:
    """Initialises adapters, and the value head of a critic, sharded on the mesh; None in the place
    of frozen weights."""
    return jit_sharded(
        lambda key: placement.in_chunks(
            moe_weights.initialise_trained(model.config, key), model.mesh
        ),
        select_trained(placement.shardings(model), moe_weights.table(model.config)),
    )(key)


def init_state(
    networks: Networks,
    policy: Transformer[Array],
    critic_key: Array,
    prompts_seen: int = 0,
    adapters: Transformer[Array] | None = None,
    loaded: Mapping[str, Transformer[Array]] = MappingProxyType({}),
) -> TrainState[Array]:
    """Train state before the first step.

    Args:
      policy: that training starts from, float32, without adapters.
      critic_key: RNG key of the critic's weights, if there is a critic.
      prompts_seen: training prompts used before, on whose answers the policy was trained.
      adapters: of a policy with adapters, as `init_adapters` returns them. The critic has adapters
        of its own on the same base weights, and a value head that is fully trained.
      loaded: weights of networks from files, by role: of the critic float32.
    """
    model, mesh, critic = networks.policy.model, networks.mesh, networks.critic
    trunk, learners = loaded.get(CRITIC, policy), dict[str, Any]()
    # Frozen weights have no masters: they are cast once, and policy and critic share the arrays.
    if model.config.lora is not None:
        assert adapters is not None, "a policy with adapters needs initial adapters"
        base_weights = weights_of(policy, model.without_adapters())
        policy = with_base(base_weights, adapters, moe_weights.table(model.config))
        trunk = loaded.get(CRITIC, base_weights)
    if critic is not None:
        if critic.config.lora is not None:
            critic_adapters = init_adapters(critic.model, critic_key)
            trunk = with_base(trunk, critic_adapters, moe_weights.table(critic.config))
        else:
            # A value head of zeros, so that values start at 0.
            trunk = replace(trunk, head=init_weights(critic.model, critic_key).head)
        learners[CRITIC] = critic.init(trunk)
    learner = networks.policy.init(policy)
    # Copies, as the first update donates the policy's buffers.
    policy_snapshots = {role: copy_arrays(learner.weights) for role in networks.copied}
    frozen = {role: weights for role, weights in loaded.items() if role in networks.frozen}
    everywhere = replicated(mesh)
    ahead = None if networks.ahead_spec is None else networks.ahead_spec.empty()
    return TrainState(
        step=replicate(jnp.zeros((), jnp.int32), mesh),
        prompts_seen=replicate(jnp.asarray(prompts_seen, jnp.int32), mesh),
        networks={POLICY: learner, **learners, **policy_snapshots, **frozen},
        # In memory of their own, as a network's donated buffers are.
        algorithm=to_devices(to_host(init_algorithm(networks)), everywhere),
        ahead=None if ahead is None else to_devices(ahead, everywhere),
        pool=None if networks.pool_spec is None else empty_pool(*networks.pool_spec),
    )


def init_algorithm(networks: Networks) -> dict[str, Any]:
    """State of the algorithm before the first step."""
    state = networks.recipe.init_state(networks.policy.objective.response_length)
    return jax.tree.map(jnp.asarray, state)


def abstract(networks: Networks) -> TrainState[Any]:
    """Shapes, dtypes and shardings of the state, without allocating it, to restore a checkpoint
    into; without networks from files."""
    everywhere, count = replicated(networks.mesh), jax.ShapeDtypeStruct((), jnp.int32)

    def put(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: abstract_array(leaf, everywhere), tree)

    ahead, pool = networks.ahead_spec, networks.pool_spec
    return TrainState(
        step=put(count),
        prompts_seen=put(count),
        networks={
            **{role: abstract_learner(network) for role, network in networks.trained.items()},
            **{role: _abstract_weights(each) for role, each in networks.copied.items()},
        },
        algorithm=put(init_algorithm(networks)),
        ahead=None if ahead is None else put(ahead.empty()),
        pool=None if pool is None else abstract_pool(*pool),
    )


def abstract_learner(network: Network[Any]) -> Learner[Any]:
    """Shapes, dtypes and shardings of a learner, as of `update.init_learner` and
    `update.update`."""
    model, mesh = network.model, network.mesh

    def initial_learner() -> Learner[Array]:
        key, plain = jax.random.key(0), model.without_adapters()
        weights = init_weights(plain, key)
        if model.config.lora is not None:
            adapters, table = init_adapters(model, key), moe_weights.table(model.config)
            weights = with_base(weights_of(weights, plain), adapters, table)
        return network.init(weights)

    learner = jax.eval_shape(initial_learner)
    # Moments are trees like the weights, and are sharded where weights may be replicated.
    shardings = replace(
        jax.tree.map(lambda _: replicated(mesh), replace(learner, opt_state=None, masters=None)),
        weights=placement.shardings(model),
        opt_state=state_shardings(learner.opt_state, model),
        masters=None if learner.masters is None else placement.shard_shardings(model),
    )
    return jax.tree.map(abstract_array, learner, shardings)


def _abstract_weights(network: Frozen) -> Transformer[Any]:
    """Shapes, dtypes and shardings of the weights of a frozen network."""
    config, mesh = network.config, network.mesh
    shapes = jax.eval_shape(
        lambda weights: placement.in_chunks(weights, mesh), moe_weights.cast_shapes(config)
    )
    return jax.tree.map(abstract_array, shapes, placement.shardings(network.model))


def save(
    checkpoints: Checkpoints,
    networks: Networks,
    state: TrainState[Array],
    meta: Mapping[str, Any] | None = None,
) -> None:
    """Saves a checkpoint asynchronously, with the layers in order whatever the layout of the run.

    Trained weights are stored in float32: masters if there are any, from which the weights are cast
    again on restoring. The base weights of adapters are shared by all checkpoints and written once.
    Networks from files are not stored: `meta` says where they are.
    """
    if networks.policy.config.lora is not None:
        # First: a checkpoint of adapters without their base weights could not be restored.
        _save_base(checkpoints, networks, state.policy.weights)
    # Pipeline stages may store layers out of order or with padding, which must not affect a reader
    # with another layout.
    stored = _restack(_stored(networks, state), networks, _with_layer_order(networks))
    with phase(CHECKPOINT):
        checkpoints.save(int(state.step), stored, meta)


def restore(
    checkpoints: Checkpoints,
    networks: Networks,
    step: int,
    loaded: Mapping[str, Transformer[Array]] = MappingProxyType({}),
) -> TrainState[Array]:
    """Restores the state that `save` wrote, on the mesh of `networks`, which may be another.

    Args:
      loaded: weights of frozen networks from files, by role.
    """
    in_order = _with_layer_order(networks)
    with phase(CHECKPOINT):
        stored, _ = checkpoints.restore(step, _stored(in_order, abstract(in_order)))
    # Last: the weights are cast from masters that are sharded as in this run.
    stored = _restack(stored, in_order, networks)
    policy, base = networks.policy.model, None
    if policy.config.lora is not None:
        base = restore_base(checkpoints, policy)
    restored: dict[str, Any] = {role: stored[role] for role in networks.copied}
    for role, network in networks.trained.items():
        learner: Learner[Array] = stored[role]
        if base is not None and network.config.lora is not None:
            weights = with_base(base, learner.weights, moe_weights.table(network.config))
            learner = replace(learner, weights=weights)
        elif keeps_masters(network.config):
            weights = weights_of(learner.weights, network.model)
            learner = replace(learner, weights=weights, masters=learner.weights)
        restored[role] = learner
    return TrainState(
        **{name: stored[name] for name in RESERVED},
        networks={**restored, **loaded},
        algorithm={name: stored[name] for name in init_algorithm(networks)},
    )


def _save_base(checkpoints: Checkpoints, networks: Networks, weights: Transformer[Array]) -> None:
    """Writes the base weights of a policy with adapters, unless they are stored already.

    They are in ``checkpoints/base``, in the dtypes of computation: a run resumes without the public
    checkpoint that it started from.
    """
    model = networks.policy.model.without_adapters()
    base_checkpoints = Checkpoints(checkpoints.directory / BASE)
    if checkpoints.latest_step() is None:
        base_checkpoints.drop_after(-1)  # of a run that was killed before its first checkpoint
    if base_checkpoints.steps():
        return
    in_order, plain = without_adapters(weights), placement.without_chunks(model)
    # Layers in order, as in every checkpoint: a run on another layout reads them too.
    if model != plain:
        in_order = reshard(in_order, model, plain.mesh)
    with phase(CHECKPOINT):
        base_checkpoints.save(0, in_order, copy_arrays=False)  # they are frozen
        base_checkpoints.close()


def restore_base(checkpoints: Checkpoints, model: Model) -> Transformer[Array]:
    """Restores the base weights of a policy with adapters, on a mesh, which may be another.

    Raises:
      ValueError: if they are missing, damaged, or belong to another network.
    """
    model = model.without_adapters()
    plain = placement.without_chunks(model)
    shapes = moe_weights.cast_shapes(plain.config)
    like = jax.tree.map(abstract_array, shapes, placement.shardings(plain))
    in_order, _ = Checkpoints(checkpoints.directory / BASE).restore(0, like)
    if model == plain:
        return in_order
    # `reshard` returns unsharded weights (no FSDP); training may need them sharded.
    resharded = reshard(in_order, plain, model.mesh)
    return jax.device_put(resharded, placement.shardings(model))


def _stored(networks: Networks, state: TrainState[Any]) -> dict[str, Any]:
    """Content of a checkpoint by name: of trained networks only the float32 weights that are
    trained, and of frozen ones those that can be read nowhere else."""

    def keep_trained(learner: Learner[Any], network: Network[Any]) -> Learner[Any]:
        # Neither cast nor frozen weights: both can be restored otherwise, and would double the size
        # of a checkpoint.
        trained_weights = select_trained(learner.float32_weights, moe_weights.table(network.config))
        return replace(learner, weights=trained_weights, masters=None)

    return {
        **{name: getattr(state, name) for name in RESERVED},
        **{
            role: keep_trained(state.networks[role], each)
            for role, each in networks.trained.items()
        },
        **{role: state.networks[role] for role in networks.copied},
        **state.algorithm,
    }


def frozen_weights(networks: Networks, state: TrainState[Array], role: str) -> Transformer[Array]:
    """Weights of a frozen network. The policy that training started from, if it has adapters, is
    the same arrays without them."""
    if role in state.networks:
        return state.networks[role]
    return without_adapters(state.policy.weights)


def _with_layer_order(networks: Networks) -> Networks:
    """Networks on a mesh that stores weights in the order of their layers."""

    def in_order(config: ModelConfig) -> FoldedMesh:
        return placement.without_chunks(Model(config, networks.mesh)).mesh

    return replace(
        networks,
        trained={n: each.with_mesh(in_order(each.config)) for n, each in networks.trained.items()},
        frozen={
            name: replace(each, scorer=replace(each.scorer, mesh=in_order(each.config)))
            for name, each in networks.copied.items()
        },
    )


def _restack(stored: dict[str, Any], source: Networks, target: Networks) -> dict[str, Any]:
    """Reshapes the weights of a stored state from the stacks of layers on the mesh of `source` to
    the stacks on the mesh of `target`."""
    sources, targets = ({**each.trained, **each.copied} for each in (source, target))
    # Only a pipeline stacks layers differently, and `abstract` takes as long as a step of a small
    # network.
    if all(sources[role].mesh == targets[role].mesh for role in sources):
        return stored

    def restack(name: str, tree: Any) -> Any:
        if name not in sources:
            return tree
        num_layers = moe_weights.axis_sizes(sources[name].config)["layer"]

        def chunked(weights: Transformer[Array]) -> Transformer[Array]:
            in_order = placement.in_layer_order(weights, sources[name].mesh, num_layers)
            return placement.in_chunks(in_order, targets[name].mesh)

        return map_networks(chunked, lambda leaf: leaf, tree)

    # The pool has no stacked layers, and may be on other devices.
    like = _stored(target, abstract(target)) | {"pool": None}
    compiled = jit_sharded(
        lambda stored: {name: restack(name, tree) for name, tree in stored.items()},
        jax.tree.map(lambda leaf: leaf.sharding, like),
    )
    return compiled(stored | {"pool": None}) | {"pool": stored["pool"]}
