"""Prefill and decoding by the engine of a rollout, weights and cache in bfloat16.

What compiles is left out. Decoding is set beside the bandwidth bound: a step has to read every
weight that its rows meet, and the keys and values of every row so far, once. Another way to decode
is another entry of `FORMS`.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

from benchmarks.gpu.networks import network, one_device, peak_gibibytes, weights_of
from benchmarks.gpu.rows import Figures, Row, Settings, Work
from benchmarks.gpu.shapes import QWEN3_06B, QWEN3_A3B_OF_32, SMALL_DENSE, SMALL_MOE

FORMS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "scanned": {"scan_layers": True},
    "unrolled": {"scan_layers": False},
    "plain": {"experts": "batched", "router": "plain", "decode_attention": "plain"},
}
"""Fields of `moe.execution.Execution`; `moe.implementations` chooses what is not named."""
NETWORKS = {"0.6b dense": (QWEN3_06B, SMALL_DENSE), "3b active": (QWEN3_A3B_OF_32, SMALL_MOE)}


class Rollout(NamedTuple):
    """Rows that are decoded at a time.

    Attributes:
      rows: all of one length.
      prompt: tokens.
      before: tokens of each response that were sampled before, and are run as the prompt is.
      response: tokens that are sampled.
    """

    rows: int
    prompt: int
    before: int
    response: int

    @property
    def what(self) -> str:
        last = self.before + self.response
        return f"{self.rows} rows, tokens {self.before + 1} to {last}"


PREFILL = Rollout(64, 1024, 0, 1)
ROLLOUTS = (
    Rollout(256, 128, 0, 1000),
    Rollout(64, 128, 3744, 256),
    Rollout(1, 128, 0, 256),
)
"""Responses of 1,000 tokens, the end of responses of 4,000, of which a cache of 256 is larger than
80 GB, and one response by itself."""
SMALL_PREFILL = Rollout(4, 6, 0, 1)
SMALL_ROLLOUTS = (Rollout(4, 4, 0, 6), Rollout(2, 4, 8, 6), Rollout(1, 4, 0, 6))


def rows(settings: Settings) -> Iterator[Row]:
    """Decoding of each network, then prefill."""
    prefill = SMALL_PREFILL if settings.small else PREFILL
    rollouts = SMALL_ROLLOUTS if settings.small else ROLLOUTS
    weights = {
        name: cache(partial(weights_of, network(sizes[settings.small]), settings.seed, True))
        for name, sizes in NETWORKS.items()
    }
    for rollout, (form, execution), (name, sizes) in product(
        rollouts, FORMS.items(), NETWORKS.items()
    ):
        given = network(sizes[settings.small], **execution)
        run = partial(_decode, settings, given, weights[name], rollout)
        yield Row(f"decode/{name}/{rollout.what}", form, run)
    for name, sizes in NETWORKS.items():
        config, what = network(sizes[settings.small]), f"{prefill.rows} x {prefill.prompt}"
        run = partial(_prefill, settings, config, weights[name], prefill)
        yield Row(f"decode/{name}/prefill {what}", "as it is", run)


def _served(config: Any, weights: Any, rollout: Rollout, rounds: int, seed: int) -> Any:
    """The backend of an engine that has served as many rows so many times."""
    import jax
    import numpy as np

    from benchmarks.gpu.timed_backend import TimedBackend
    from jrl.rollout.decoding.engine import Engine
    from jrl.rollout.decoding.requests import Request
    from jrl.rollout.decoding.slots import Decoder
    from jrl.rollout.sampling import Sampling

    mesh, number, prompt, before, response = one_device(), *rollout
    # A stop token that there is not: no row ends before its limit.
    backend = TimedBackend(Decoder(config, mesh, pad_id=0, stop_ids=(config.vocab_size,)), mesh)
    length = prompt + before + response
    engine = Engine(backend, slots=number, max_length=length, key=jax.random.key(seed))
    engine.load(weights, 0)
    draw = np.random.default_rng(seed)
    # Numbers that the slots have not seen: a prompt that stands in one is not run again.
    for first in range(0, rounds * number, number):
        ids = draw.integers(1, config.vocab_size, (number, prompt + before), np.int32)
        requests = [
            Request(first + row, 0, one[:prompt], before + response, one[prompt:])
            for row, one in enumerate(ids)
        ]
        engine.submit(requests, Sampling())
        ended = 0
        while trajectories := engine.poll():
            ended += sum(len(trajectory.tokens) for trajectory in trajectories)
        assert ended == number * response, "a row ended before its limit"
    return backend


def _prefill(
    settings: Settings, config: Any, weights: Callable[[], Any], rollout: Rollout
) -> Figures:
    from benchmarks.gpu.timed_backend import together
    from moe.config import training_flops

    served = _served(config, weights(), rollout, 3, settings.seed)
    span = together(served.admissions)
    # A third of training, and the head sees the last tokens alone.
    forward = training_flops(config, rollout.prompt) / 3 - 2 * config.d_model * config.vocab_size
    return {
        "milliseconds": 1e3 * span.seconds,
        **Work(span.tokens * forward, "operations").rate(span.seconds, settings),
        "tokens_per_s": span.tokens / span.seconds,
        "compiled": span.compiled,
        **peak_gibibytes(),
    }


def _decode(
    settings: Settings, config: Any, weights: Callable[[], Any], rollout: Rollout
) -> Figures:
    from benchmarks.gpu.timed_backend import together

    served = _served(config, weights(), rollout, 1, settings.seed)
    span = together(served.windows)
    least = span.steps * bytes_of_step(config, weights(), rollout.rows)
    least += span.read * bytes_of_column(config)
    return {
        "milliseconds": 1e3 * span.seconds / span.steps,
        **Work(least, "bytes").rate(span.seconds, settings),
        "tokens_per_s": span.tokens / span.seconds,
        "steps": span.steps,
        "compiled": span.compiled,
        **peak_gibibytes(),
    }


def bytes_of_step(config: Any, weights: Any, rows: int) -> float:
    """Weights that a step has to read: all but the embedding, where that is not the head too, and
    but the experts that none of the rows is expected to choose."""
    import jax

    total = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(weights))
    if config.head != "tied":
        total -= weights.embedding.size * weights.embedding.dtype.itemsize
    if not config.num_experts:
        return total
    idle = (1 - config.experts_per_token / config.num_experts) ** rows
    experts = config.num_expert_layers * config.num_experts * 3 * config.d_model * config.d_expert
    return total - idle * experts * weights.embedding.dtype.itemsize


def bytes_of_column(config: Any) -> int:
    """Keys and values of one token, in bfloat16."""
    return config.num_layers * 2 * config.num_kv_heads * config.head_dim * 2
