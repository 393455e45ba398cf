"""What a run computes: an update of each network, scoring and decoding, as arrays on the host."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path
from programs import random_weights

from jrl.processes.agreement import to_host
from jrl.recipes.base.batch import Batch, over_rows
from jrl.recipes.base.recipe import Windows
from jrl.rollout.decoding.requests import Request, move_to_host
from jrl.rollout.packing import clear_idle_rows, counts_of
from jrl.trainer.learner.learner import Learner
from jrl.trainer.learner.networks import Networks
from jrl.trainer.learner.update import Network, statistics_of
from jrl.trainer.scoring import logprobs_and_choices_of, logprobs_of, packed_scores, values_of
from jrl.trainer.setup.setup import Setup
from jrl.trainer.step import update_rows
from moe import placement
from moe.config import ModelConfig
from moe.router.routing import choices_dtype

Observed = dict[str, dict[str, np.ndarray]]
"""What was found, by the part of the run and by name."""
Weights = Callable[[Network[Any], int], Any]
"""(network, seed) -> its weights, laid out as it is stored."""

SECOND_MOMENT = 1e-3
"""The part of a squared gradient that is Adam's second moment after one step."""
OF_THE_LAYOUT = "padded_fraction"
"""A metric that says how the devices shared the work, not what came of it."""


def batch_of(setup: Setup, rows: int) -> Batch[np.ndarray]:
    """Random completions of prompts that the rows of a group share, with all that the recipe asks
    for: of unequal lengths, with a hole in the mask, and a row of which nothing is learned."""
    draw, recipe, model = np.random.default_rng(5), setup.recipe, setup.model
    prompt, response = setup.prompt_length, setup.response_length
    # Supervised learning shares no prompt. The same tokens in two rows would have equal scores up
    # to rounding, and which of them an expert drops would be up to the order of sums.
    group = recipe.group_size if setup.run.steps else 1
    time = np.arange(prompt + response)[None, :]
    shape = (rows, time.shape[1])
    tokens = draw.integers(0, model.vocab_size, shape).astype(np.int32)
    before = tokens[:, :prompt].reshape(-1, group, prompt)
    before[:] = before[:, :1]
    prompts = np.repeat(np.arange(rows // group) * 3 % prompt + 1, group)[:, None]
    lengths = np.arange(rows) * 3 % response + 1
    valid = (time >= prompt - prompts) & (time < prompt + lengths[:, None])
    finished = np.arange(rows) % 3 != 1
    sampled = valid & (time >= prompt)
    mask = sampled & ~((time == prompt + 1) & (np.arange(rows) % 5 == 3)[:, None])
    mask[rows // 2 - 1] = False
    critic_mask = None
    if isinstance(recipe.collection, Windows):
        critic_mask = sampled & finished[:, None]

    def numbers(low: float, high: float, wanted: object = True) -> np.ndarray | None:
        found = draw.uniform(low, high, shape).astype(np.float32)
        return found if wanted else None

    critic = recipe.uses_critic
    return Batch(
        tokens=tokens,
        valid=valid,
        mask=mask,
        behaviour_logprobs=numbers(-3, -1),
        old_logprobs=numbers(-3, -1),
        advantages=numbers(-2, 2),
        returns=numbers(-1, 1, critic),
        old_values=numbers(-1, 1, critic),
        reference_logprobs=numbers(-3, -1, recipe.kl_coef is not None),
        importance_weights=numbers(0.5, 1.5, recipe.mismatch),
        correct=finished & (np.arange(rows) % 2 == 0),
        finished=finished,
        lengths=lengths.astype(np.int32),
        critic_mask=critic_mask,
        choices=_choices(draw, model, valid, prompt, group) if recipe.router_replay else None,
    )


def _choices(
    draw: np.random.Generator, model: ModelConfig, valid: np.ndarray, prompt: int, group: int
) -> np.ndarray:
    """Of each token's experts, those of a prompt the same in all rows that share it; there is no
    record of the last token of a row, nor of padding."""
    sizes = (*valid.shape, model.num_expert_layers, model.num_experts)
    chosen = np.argsort(draw.random(sizes), axis=-1)[..., : model.experts_per_token]
    shared = chosen[:, :prompt].reshape(-1, group, prompt, *chosen.shape[2:])
    chosen[:, :prompt] = np.repeat(shared[:, :1], group, axis=1).reshape(chosen[:, :prompt].shape)
    recorded = valid & (np.cumsum(valid[:, ::-1], axis=1)[:, ::-1] > 1)
    chosen = np.where(recorded[..., None, None], chosen, model.num_experts)
    return chosen.astype(choices_dtype(model.num_experts))


def weights_of(network: Network[Any], seed: int) -> Any:
    """Random weights, laid out as the network is stored."""
    config, mesh = network.config, network.mesh
    places = placement.shardings(network.model)
    return jax.device_put(placement.in_chunks(random_weights(config, seed), mesh), places)


def observe(
    setup: Setup,
    batch: Batch[np.ndarray],
    as_it_runs: Callable[[Network[Any]], Network[Any]] = lambda network: network,
    weights: Weights = weights_of,
) -> Observed:
    """What a run of these settings computes of a batch that is there.

    Args:
      as_it_runs: what is changed of each network.
      weights: of each network.
    """
    networks, found = setup.networks, Observed()
    critic = None if networks.critic is None else as_it_runs(networks.critic)
    networks = replace(networks, policy=as_it_runs(networks.policy), critic=critic)
    device_batch = jax.device_put(batch, over_rows(setup.mesh))
    if setup.run.steps == 0:
        imitator = as_it_runs(setup.imitator)
        learner = imitator.init(weights(imitator, setup.run.seed))
        found |= _updated("policy", imitator, learner, device_batch, None, None)
        return found
    policy = networks.policy
    learner = policy.init(weights(policy, setup.run.seed))
    found["scores"] = _scores(networks, learner.weights, device_batch)
    rows = device_batch if setup.recipe.has_complete_groups else clear_idle_rows(device_batch)
    counts = counts_of(device_batch) if networks.packs else None
    everything = np.arange(batch.tokens.shape[0])

    def counted(name: str) -> Any:
        return (
            None
            if counts is None
            else counts.for_network(name, everything, setup.recipe.has_complete_groups)
        )

    statistics = None
    if setup.recipe.uses_statistics:
        statistics = statistics_of(policy.objective, learner.weights, rows)
        found["statistics"] = {key: np.asarray(x) for key, x in vars(to_host(statistics)).items()}
    found |= _updated("policy", policy, learner, rows, counted("actor"), statistics)
    if critic is not None:
        learner = critic.init(weights(critic, setup.run.seed + 1))
        found["values"] = {"values": _values(networks, learner.weights, device_batch)}
        if rows.critic_mask is not None:
            rows = clear_idle_rows(replace(device_batch, mask=device_batch.critic_mask))
        found |= _updated("critic", critic, learner, rows, counted("critic"), None)
    return found


def _updated(
    name: str,
    network: Network[Any],
    learner: Learner[Any],
    rows: Batch[Any],
    counted: Any,
    statistics: Any,
) -> Observed:
    """The loss, the gradient, what became of the weights, and metrics, layers in order."""
    learner, metrics = update_rows(network, learner, rows, counted, statistics)
    learner, metrics = to_host(learner), to_host(metrics)
    config, mesh = network.config, network.mesh
    stacked = config.num_layers - config.num_dense_layers
    leaves = jax.tree.leaves(learner.opt_state, is_leaf=lambda x: hasattr(x, "nu"))
    (moments,) = (leaf for leaf in leaves if hasattr(leaf, "nu"))

    def by_name(tree: Any) -> dict[str, np.ndarray]:
        in_order = placement.in_layer_order(tree, mesh, stacked)
        return {
            keystr(path, simple=True, separator="."): np.asarray(leaf, np.float32)
            for path, leaf in tree_leaves_with_path(in_order)
        }

    # The first moment may be kept in half the digits, and has the sign all the same.
    gradient = jax.tree.map(
        lambda mu, nu: np.sign(np.asarray(mu, np.float32)) * np.sqrt(nu / SECOND_MOMENT),
        moments.mu,
        moments.nu,
    )
    loss, norm = metrics.pop("loss"), metrics.pop("grad_norm")
    others = {
        keystr(path, simple=True, separator="."): np.asarray(leaf)
        for path, leaf in tree_leaves_with_path(metrics)
    }
    left_out = ("overflow", OF_THE_LAYOUT)
    return {
        f"{name} loss": {"loss": np.asarray(loss)},
        f"{name} norm": {"norm": np.asarray(norm)},
        f"{name} gradient": by_name(gradient),
        f"{name} weights": by_name(learner.float32_weights),
        f"{name} metrics": {
            key: value for key, value in others.items() if not any(x in key for x in left_out)
        },
    }


def _scores(networks: Networks, weights: Any, batch: Batch[Any]) -> dict[str, np.ndarray]:
    """Log-probabilities, and the experts that the routers chose."""
    policy = networks.policy.objective
    recipe = policy.recipe
    where, found = np.asarray(batch.mask), dict[str, Any]()
    # The pass whose choices are replayed runs rows as they are, packed or not.
    if recipe.router_replay == "R2":
        found["logprobs"], choices = logprobs_and_choices_of(
            policy, weights, batch.tokens, batch.valid
        )
        found["choices"] = np.where(np.asarray(batch.valid)[..., None, None], choices, 0)
    elif networks.packs:
        found["logprobs"], found["sampled"] = packed_scores(
            policy, weights, batch, networks.policy.bins
        )
    else:
        given = batch.tokens, batch.valid, policy.replayed(batch)
        found["logprobs"], found["sampled"] = logprobs_of(policy, weights, *given)
    for name in ("logprobs", "sampled"):
        if name in found:
            found[name] = np.where(where, np.asarray(found[name]), 0)
    return {name: np.asarray(value) for name, value in found.items()}


def _values(networks: Networks, weights: Any, batch: Batch[Any]) -> np.ndarray:
    critic = networks.critic
    assert critic is not None
    if networks.packs:
        (values,) = packed_scores(critic.objective, weights, batch, critic.bins)
    else:
        values = values_of(critic.objective, weights, batch.tokens, batch.valid)
    return np.where(np.asarray(batch.mask), np.asarray(values), 0)


def decoded(setup: Setup, batch: Batch[np.ndarray]) -> Observed:
    """Completions of the batch's prompts: tokens, and their log-probabilities."""
    policy, sampler, prompt = setup.networks.policy, setup.sampler(), setup.prompt_length
    weights = policy.init(weights_of(policy, setup.run.seed)).weights
    engine, sampling = sampler.engine, setup.networks.policy.objective.sampling
    engine.load(weights, 0)
    group = setup.recipe.group_size
    requests = [
        Request(
            row // group,
            row % group,
            batch.tokens[row, :prompt][batch.valid[row, :prompt]],
            # Limits differ, so that rows come and go.
            setup.response_length - row % 3,
        )
        for row in range(batch.tokens.shape[0])
    ]
    engine.submit(requests, sampling)
    done = {}
    while trajectories := engine.poll(draining=True):
        done |= {(t.request.prompt, t.request.sample): t for t in move_to_host(trajectories)}
    assert len(done) == len(requests), "some requests were not answered"
    rows = [done[request.prompt, request.sample].sampled for request in requests]
    engine.release()

    def padded(name: str) -> np.ndarray:
        room = np.zeros((len(rows), setup.response_length), np.float32)
        for place, row in zip(room, rows, strict=True):
            column = getattr(row, name)
            place[: len(column)] = column
        return room

    found = {name: padded(name) for name in ("behaviour_logprobs", "old_logprobs")}
    found["tokens"] = padded("tokens")
    found["lengths"] = np.array([len(row.tokens) for row in rows])
    if rows[0].choices is not None:
        # Of a row's last token there is no record: it was never read.
        chosen = [row.choices[:-1] for row in rows]
        found["choices"] = np.concatenate([x.reshape(x.shape[0], -1) for x in chosen])
    return {"decoding": found}
