"""Everything that changes during a run, as one pytree: what a checkpoint holds."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import NamedSharding
from jaxtyping import Array

from jrl.runs.checkpoints import Checkpoints
from jrl.trainer.learner import Learner, start, state_shardings
from jrl.trainer.setup import Setup
from moe import placement
from moe import weights as moe_weights
from moe.config import ModelConfig
from moe.weights import Transformer

Leaf = TypeVar("Leaf")


@struct.dataclass
class TrainState(Generic[Leaf]):
    """The state between two steps.

    Randomness needs no state: every key is made from the seed, the step and what it is for.

    Attributes:
      step: ``[]`` steps done.
      cursor: ``[]`` training prompts drawn so far, those of the warm start included.
      policy: the policy and its optimiser.
      critic: the critic and its optimiser, None without one.
      reference: the policy that training started from, None unless a KL term needs it.
    """

    step: Leaf
    cursor: Leaf
    policy: Learner[Leaf]
    critic: Learner[Leaf] | None
    reference: Transformer[Leaf] | None


def initial_weights(setup: Setup, config: ModelConfig, stream: str) -> Transformer[Array]:
    """Fresh weights, laid out on the mesh."""
    # As a list: JAX would fill the fields that are None with a marker, which no record can hold.
    shardings, structure = jax.tree.flatten(placement.shardings(config, setup.mesh))
    make = jax.jit(
        lambda key: jax.tree.leaves(
            placement.in_chunks(moe_weights.initialise(config, key), setup.mesh)
        ),
        out_shardings=shardings,
    )
    return structure.unflatten(make(setup.key(stream, 0)))


def begin(setup: Setup, policy: Transformer[Array], cursor: int = 0) -> TrainState[Array]:
    """The state before the first step.

    Args:
      policy: that training starts from.
      cursor: training prompts drawn before, whose answers it imitated.
    """
    critic = None
    if setup.recipe.uses_critic:
        weights, config = critic_from(setup, policy), setup.critic_objective.config
        critic = start(setup.critic_optimiser, weights, config, setup.mesh)

    def number(value: int) -> Array:
        return jax.device_put(jnp.asarray(value, jnp.int32), setup.whole) + 0

    return TrainState(
        step=number(0),
        cursor=number(cursor),
        policy=start(setup.policy_optimiser, policy, setup.model, setup.mesh),
        critic=critic,
        reference=jax.tree.map(jnp.copy, policy) if setup.recipe.uses_reference else None,
    )


def critic_from(setup: Setup, policy: Transformer[Array]) -> Transformer[Array]:
    """A critic that starts as the policy with a value head of zeros, so that values start at 0."""
    fresh = initial_weights(setup, setup.critic_objective.config, "critic")
    return replace(policy, head=fresh.head)


def abstract(setup: Setup) -> TrainState[Any]:
    """Shapes, dtypes and shardings of the state, without making it: what a checkpoint is read
    into."""
    state = jax.eval_shape(
        lambda weights: begin(setup, placement.in_chunks(weights, setup.mesh)),
        moe_weights.shapes(setup.model),
    )
    policy = placement.shardings(setup.model, setup.mesh)
    critic = placement.shardings(setup.model.as_critic(), setup.mesh)
    return TrainState(
        step=_laid_out(state.step, policy, setup),
        cursor=_laid_out(state.cursor, policy, setup),
        policy=_learner_laid_out(state.policy, policy, setup.model, setup),
        critic=(
            None
            if state.critic is None
            else _learner_laid_out(state.critic, critic, setup.model.as_critic(), setup)
        ),
        reference=_laid_out(state.reference, policy, setup),
    )


def save(
    checkpoints: Checkpoints,
    setup: Setup,
    step: int,
    state: TrainState[Array],
    meta: Mapping[str, Any] | None = None,
) -> None:
    """Writes a checkpoint, the layers in order whatever the layout of the run."""
    checkpoints.save(step, _reshaped(setup, state, abstract(_in_order(setup))), meta)


def restore(checkpoints: Checkpoints, setup: Setup, step: int) -> TrainState[Array]:
    """The state that `save` wrote, on the mesh of `setup`, which may be another."""
    state = checkpoints.restore(step, abstract(_in_order(setup)))[0]
    return _reshaped(setup, state, abstract(setup))


def _in_order(setup: Setup) -> Setup:
    """The setup without interleaved chunks: pipeline stages hold consecutive layers."""
    layout = replace(setup.mesh.layout, vpp=1)
    return replace(setup, mesh=replace(setup.mesh, layout=layout))


def _reshaped(setup: Setup, state: TrainState[Array], like: TrainState[Any]) -> TrainState[Array]:
    """The state in the shapes and on the shardings of `like`: `moe.placement.in_chunks` and
    `in_layer_order` are reshapes of every leaf."""
    if setup.mesh.layout.vpp == 1:
        return state
    leaves, structure = jax.tree.flatten(state)
    wanted = jax.tree.leaves(like)
    reshape = jax.jit(
        lambda leaves: [x.reshape(y.shape) for x, y in zip(leaves, wanted, strict=True)],
        out_shardings=[y.sharding for y in wanted],
    )
    return structure.unflatten(reshape(leaves))


def _learner_laid_out(
    learner: Learner[Any],
    shardings: Transformer[NamedSharding],
    config: ModelConfig,
    setup: Setup,
) -> Learner[Any]:
    """As `learner.start` and `learner.update` lay it out."""
    whole = _laid_out(learner, shardings, setup)
    of_state = state_shardings(learner.opt_state, config, setup.mesh)
    return replace(whole, opt_state=jax.tree.map(_with_sharding, learner.opt_state, of_state))


def _laid_out(tree: Any, shardings: Transformer[NamedSharding], setup: Setup) -> Any:
    """Weights laid out by `shardings`, everything else whole on every device."""

    def place(node: Any) -> Any:
        if isinstance(node, Transformer):
            return jax.tree.map(_with_sharding, node, shardings)
        return _with_sharding(node, setup.whole)

    return jax.tree.map(place, tree, is_leaf=lambda node: isinstance(node, Transformer))


def _with_sharding(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
