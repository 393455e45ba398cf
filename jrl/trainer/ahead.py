"""Compilation of a run's programs in threads, while its first programs run."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jrl.processes.agreement import is_multiprocess
from jrl.recipes.base.batch import Batch, over_rows
from jrl.rollout.collection.collect import sampling_of
from jrl.rollout.decoding.engine import Engine
from jrl.rollout.decoding.programs import Program, programs_of
from jrl.rollout.decoding.requests import Request
from jrl.rollout.sampler import Sampler, numbered, numbered_heldout
from jrl.rollout.sampling import GREEDY, Sampling
from jrl.tasks.mixture import has_environments
from jrl.trainer.evaluation.evaluate import heldout_examples
from jrl.trainer.learner.update import update
from jrl.trainer.setup.setup import Setup
from jrl.trainer.state import abstract_learner
from jrl.trainer.step import with_targets
from jrl.trainer.supervised import unseen_prompts

THREADS = 2
"""Programs that are compiled at a time: XLA compiles one with little more than a core."""


@contextmanager
def compile_ahead(setup: Setup, sampler: Sampler, imitates: bool, begins: bool) -> Iterator[None]:
    """Compiles programs of a run in threads, while the context is active; at its end those that
    have not begun are cancelled.

    Each is the program that its first call runs, with the same bits. A program whose shapes depend
    on data, for example of packed rows, is compiled by its first call. So are all programs of a run
    of multiple processes, which compile in the same order, and of accelerators: their compilers
    time candidates on the device, which must be idle.

    Args:
      imitates: true if the run begins with a warm start.
      begins: true if it begins with an evaluation, false if it is resumed.
    """
    if is_multiprocess() or setup.mesh.platform != "cpu" or setup.rollout_mesh.platform != "cpu":
        yield
        return
    executor = ThreadPoolExecutor(THREADS, "jrl compilation")
    programs, futures = list[Any](), list[Future[Any]]()
    try:
        for program, args in _programs(setup, sampler, imitates, begins):
            programs.append(program)
            futures.append(program.compile_ahead(executor, *args))
        yield
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
        # Python cannot interrupt a compilation, nor end before it.
        if any(future.running() for future in futures):
            print("a program is being compiled: the run ends when it is", flush=True)
        executor.shutdown()
        for program in programs:
            program.forget_ahead()


def _programs(setup: Setup, sampler: Sampler, imitates: bool, begins: bool) -> Iterator[Program]:
    """Programs of a run in about the order of their first calls."""
    if imitates:
        yield _imitation(setup)
    if setup.recipe.supervised:
        return
    # Not of conversations, whose engine is another.
    if isinstance(sampler.engine, Engine):
        yield from programs_of(sampler.engine, _rounds(setup, sampler, imitates, begins))
    if setup.run.steps:
        yield from _updates(setup)


def _rounds(
    setup: Setup, sampler: Sampler, imitates: bool, begins: bool
) -> list[tuple[list[Request], Sampling]]:
    """Requests that are sampled first: of a check of the warm start, an evaluation and a step."""
    run, recipe, sampling = setup.run, setup.recipe, sampling_of(setup.recipe)
    checked = sampler.requests(unseen_prompts(setup, 0), 1) if imitates else []
    heldout = numbered_heldout(heldout_examples(setup.task, run.eval_prompts))
    evaluated = sampler.requests(heldout, 1)
    rounds = [(checked, sampling), (evaluated, sampling), (evaluated, GREEDY)]
    if run.steps:
        prompts = numbered([setup.task.train(index) for index in range(recipe.prompts)])
        step = sampler.requests(prompts, recipe.group_size), sampling
        rounds.insert(len(rounds) if begins else 0, step)
    return rounds


def _imitation(setup: Setup) -> Program:
    """Update of the warm start."""
    network, rows = setup.imitator, setup.geometry.supervised_rows(setup.run.warm_start_batch)
    batch = _rows_of(setup, rows)
    return update, network.update_args(abstract_learner(network), batch)


def _updates(setup: Setup) -> Iterator[Program]:
    """Update of a step of a run that trains the policy alone, if its shapes do not depend on the
    completions."""
    networks, recipe = setup.networks, setup.recipe
    depends = networks.packs or has_environments(setup.task) or recipe.uses_statistics
    depends |= recipe.uses_teacher or not recipe.has_complete_groups
    if networks.critic is not None or recipe.router_replay is not None:
        return
    if depends or networks.ahead_spec is not None:
        return
    batch = _prepared(setup)
    rows = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            (recipe.mini_batch_size, *x.shape[1:]),
            x.dtype,
            sharding=over_rows(setup.mesh),
            weak_type=x.weak_type,
        ),
        batch,
    )
    yield update, networks.policy.update_args(abstract_learner(networks.policy), rows)


def _prepared(setup: Setup) -> Batch[Any]:
    """Shapes and dtypes of the batch of a step that `jrl.trainer.step.prepare` returns."""
    recipe, networks = setup.recipe, setup.networks
    batch = _rows_of(setup, recipe.completions)
    tokens = batch.tokens.shape
    per_token = jax.ShapeDtypeStruct(tokens, jnp.float32)
    flag = jax.ShapeDtypeStruct(tokens[:1], jnp.bool_)
    number = jax.ShapeDtypeStruct(tokens[:1], jnp.int32)
    batch = replace(
        batch,
        behaviour_logprobs=per_token,
        old_logprobs=per_token,
        old_entropy=per_token if recipe.uses_entropy else None,
        truncated=flag,
        groups=number,
        lengths=number,
        rewards=jax.ShapeDtypeStruct(tokens[:1], jnp.float32),
        correct=flag,
        logprobs=dict.fromkeys(networks.frozen, per_token),
    )
    rescored = per_token if recipe.rescores else None
    return jax.eval_shape(lambda *args: with_targets(recipe, *args)[0], batch, rescored)


def _rows_of(setup: Setup, rows: int) -> Batch[Any]:
    """Tokens and masks of a batch, with a sharding."""
    shape = rows, setup.prompt_length + setup.response_length
    tokens, mask = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=over_rows(setup.mesh))
        for dtype in (jnp.int32, jnp.bool_)
    )
    return Batch(tokens, mask, mask)
