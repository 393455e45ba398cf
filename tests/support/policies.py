"""A small policy with prompts, and its decoding and scoring as plain calls."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jrl.recipes.base.batch import Batch
from jrl.rollout.collection.collect import batch_of
from jrl.rollout.decoding.engine import Engine
from jrl.rollout.decoding.mesh_backend import MeshBackend
from jrl.rollout.decoding.requests import Request, Trajectory
from jrl.rollout.decoding.slots import Decoder
from jrl.rollout.sampling import Sampling
from jrl.trainer.scoring import PromptLayout, Scorer, Scores, mark_replicated
from moe.config import Model, ModelConfig
from moe.placement import specs
from moe.weights import Transformer, axis_sizes, shapes, table
from sharding.folding import FoldedMesh, Layout, fold

# Without the code generator's optimisations a compilation takes half the time.
FAST_COMPILE: dict[str, str | bool] = {"xla_backend_optimization_level": "0"}
PAD, EOS = 0, 2
STOPS = EOS, 5
CONFIG = ModelConfig(
    vocab_size=11,
    num_layers=1,
    d_model=10,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    num_experts=4,
    experts_per_token=3,
    d_expert=7,
)
NUM_PROMPTS, PROMPT, COPIES = 4, 6, 3
COLUMNS = PROMPT + 23
"""Room in the slots, whatever the limit of a response: one size of programs."""
SAMPLING = Sampling(temperature=1.3, top_p=0.9)
"""What the policy gives a token and what the distribution drawn from gives it differ, and both from
the logits; rows differ too, and end early and late."""


@functools.cache
def weights(config: ModelConfig = CONFIG) -> Transformer[jax.Array]:
    draw = np.random.default_rng(0)
    sizes = axis_sizes(config)

    def values(shape, weight):
        fan_in = math.prod(sizes[axis] for axis in weight.fan_in.split())
        return jnp.asarray(draw.normal(size=shape.shape) / fan_in**0.5, jnp.float32)

    return jax.tree.map(values, shapes(config), table(config))


def prompts() -> tuple[jax.Array, jax.Array]:
    """Left-padded prompts of 1, 3, 5 and 6 tokens, with rubbish under the padding."""
    tokens = np.random.default_rng(1).integers(3, CONFIG.vocab_size, (NUM_PROMPTS, PROMPT))
    length = np.array([1, 3, 5, 6])
    return jnp.asarray(tokens), jnp.asarray(np.arange(PROMPT)[None] >= PROMPT - length[:, None])


@dataclass(frozen=True)
class Asked:
    """Settings of completions. Other `sampling`, `layout`, `stops`, `config`, `slots`, `columns` or
    `records_choices` are decoded by other programs.

    With this seed some rows end at once, some within `response`, and some would after it.
    """

    sampling: Sampling = SAMPLING
    layout: str = "dp1"
    response: int = 7
    stops: tuple[int, ...] = STOPS
    config: ModelConfig = CONFIG
    slots: int = NUM_PROMPTS * COPIES
    seed: int = 3
    records_choices: bool = True
    columns: int = COLUMNS

    @property
    def mesh(self) -> FoldedMesh:
        layout = Layout.parse(self.layout)
        return fold(layout, jax.devices()[: layout.num_devices])

    @property
    def requests(self) -> list[Request]:
        tokens, valid = prompts()
        return [
            Request(number, sample, np.asarray(ids[there], np.int32), self.response)
            for number, (ids, there) in enumerate(zip(tokens, valid, strict=True))
            for sample in range(COPIES)
        ]

    def decoder(self, mesh: FoldedMesh | None = None) -> Decoder:
        """Decoder on a mesh, its own mesh by default."""
        return Decoder(self.config, mesh or self.mesh, PAD, self.stops, self.records_choices)

    def engine(self) -> Engine:
        engine = Engine(
            MeshBackend(self.decoder(), self.mesh),
            slots=self.slots,
            max_length=self.columns,
            key=jax.random.key(self.seed),
        )
        engine.load(weights(self.config), 5)
        return engine


def answers(engine: Engine, requests: Sequence[Request], sampling: Sampling) -> list[Trajectory]:
    """Trajectories in the order of the requests."""
    engine.submit(requests, sampling)
    done = {}
    while trajectories := engine.poll():
        done |= {(t.request.prompt, t.request.sample): t for t in trajectories}
    assert len(done) == len(requests)
    return [done[request.prompt, request.sample] for request in requests]


@functools.cache
def decode(asked: Asked) -> Batch[np.ndarray]:
    """The completions of a prompt in a row, as a batch."""
    inputs = answers(asked.engine(), asked.requests, asked.sampling)
    everything = np.ones(len(inputs), bool)
    batch = batch_of(inputs, everything, asked.mesh, PROMPT, asked.response)
    return jax.tree.map(np.asarray, batch)


def scores(decoder: Asked, weights, tokens, valid) -> Scores:
    """Scores of completions, inside the `jax.shard_map`."""
    layout = PromptLayout(PROMPT, COPIES)
    scorer = Scorer(decoder.config, decoder.mesh, layout, sampling=decoder.sampling)
    return scorer.score(weights, tokens, valid)


def scored(decoder: Asked, rollout: Batch[np.ndarray]) -> list[np.ndarray]:
    """Log-probabilities, those in the distribution drawn from, and entropies of the tokens."""
    mesh, config = decoder.mesh, decoder.config
    spec = specs(Model(config, mesh))

    def local(*given):
        out = scores(decoder, *given)
        return mark_replicated([out.logprobs, out.behaviour_logprobs, out.entropy], mesh)

    rows = P(mesh.dp)
    step = jax.jit(
        jax.shard_map(local, mesh=mesh.mesh, in_specs=(spec, rows, rows), out_specs=rows),
        compiler_options=FAST_COMPILE,
    )
    given = jnp.asarray(rollout.tokens), jnp.asarray(rollout.valid)
    return [np.asarray(x) for x in step(weights(config), *given)]
