"""Compiled functions that an engine will run, with abstract arguments, to compile them ahead."""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any

import jax
import numpy as np

from jrl.recipes.base.batch import replicated
from jrl.rollout.decoding.engine import WINDOW, Engine
from jrl.rollout.decoding.mesh_backend import MeshBackend, StepLimits, advance
from jrl.rollout.decoding.prefill import AdmissionArrays, admit
from jrl.rollout.decoding.requests import Request
from jrl.rollout.decoding.slots import abstract_pool
from jrl.rollout.sampling import Sampling, compiled_sampling
from sharding.sharded_jit import MeshJit, abstract_array

Program = tuple[MeshJit[..., Any], tuple[Any, ...]]
"""A compiled function and its arguments, a `jax.ShapeDtypeStruct` in the place of each array."""


def programs_of(
    engine: Engine, rounds: Sequence[tuple[Sequence[Request], Sampling]]
) -> Iterator[Program]:
    """Programs that `Engine.poll` runs for requests: their prefills, and the steps after each.

    Each round's requests enter an engine in which none is in flight. They are assumed to end all at
    once; rows that end one by one may need further programs. Yields none if the engine is not
    `is_plain`.
    """
    backend, scheduler = engine.backend, deepcopy(engine.scheduler)
    if not engine.is_plain or not isinstance(backend, MeshBackend):
        return

    def of_slots(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, np.int32, sharding=backend.slot_sharding)

    decoder, ranks, max_length = backend.decoder, engine.ranks, engine.max_length
    weights, policy = backend.abstract_policy()
    pool = abstract_pool(decoder, engine.slots, max_length)
    number = jax.ShapeDtypeStruct((), np.int32, sharding=replicated(engine.mesh))
    per_slot = of_slots(engine.slots)
    admission = AdmissionArrays(per_slot, per_slot, per_slot, per_slot, per_slot, per_slot)
    for requests, parameters in rounds:
        sampling = compiled_sampling(parameters)
        state = engine.new_sampler_state(parameters)
        state = jax.tree.map(lambda x: abstract_array(x, x.sharding), state)
        scheduler.waiting.extend(requests)
        while scheduler.waiting:
            for plan in scheduler.schedule():
                width, num_rows = engine.row_shape(plan)
                rows = of_slots(ranks * num_rows, width), of_slots(ranks * num_rows)
                yield admit, (decoder, sampling, weights, pool, *rows, admission, state)
            running = scheduler.running.values()
            lengths = np.array([request.length for request in running])
            limits = np.array([request.limit for request in running])
            sizes, are_waiting = engine.cache_size, bool(scheduler.waiting)
            _, end = sizes.plan_steps(lengths, limits, WINDOW, are_waiting)
            columns, steps = sizes.length_to_read(end), StepLimits(number, number)
            yield advance, (decoder, sampling, columns, policy, pool, state, steps)
            for slot in list(scheduler.running):
                scheduler.free_slot(slot)
