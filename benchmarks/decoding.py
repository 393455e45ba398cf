"""Rows in decoding slots, to be timed."""

from collections.abc import Callable, Sequence

import jax
import numpy as np

from jrl.rollout.decoding.engine import SlotEngine
from jrl.rollout.decoding.requests import Request
from jrl.rollout.sampling import Sampling
from moe.config import ModelConfig
from moe.weights import Transformer
from sharding.folding import Layout, fold


def rollout(
    config: ModelConfig,
    weights: Transformer[jax.Array],
    slots: int,
    prompt: int,
    limits: Sequence[int],
) -> tuple[Callable[[], int], Callable[[float], dict[str, float]]]:
    """A call that decodes a row of each limit, and what its seconds mean.

    Every row has a prompt of its own, and none ends before its limit.

    Args:
      prompt: tokens of a prompt.
      limits: tokens of the responses.
    """
    mesh = fold(Layout(), jax.devices()[:1])
    engine = SlotEngine(
        config,
        mesh,
        mesh,
        slots=slots,
        columns=prompt + max(limits),
        pad_id=0,
        stop_ids=(config.vocab_size,),
        key=jax.random.key(4),
    )
    engine.load(weights, 0)
    ids = np.random.default_rng(3).integers(0, config.vocab_size, (len(limits), prompt), np.int32)
    asked = [0]

    def call() -> int:
        # Numbers that the slots have not seen: a prompt that stands in one is not run again.
        rows = enumerate(zip(ids, limits, strict=True), asked[0])
        asked[0] += len(limits)
        requests = [Request(number, 0, tokens, limit) for number, (tokens, limit) in rows]
        engine.submit(requests, Sampling())
        done = 0
        while trajectories := engine.poll():
            done += sum(len(trajectory.tokens) for trajectory in trajectories)
        assert done == sum(limits), "a row ended before its limit"
        return done

    def meaning(seconds: float) -> dict[str, float]:
        used = engine.usage.utilisation
        return {"tokens_per_s": sum(limits) / seconds, "slot_utilisation": used}

    return call, meaning
