"""Times a GRPO step of a published chat model with LoRA on a CPU, phase by phase, beside the
machine's ceilings.

The step is the trainer's own, with the settings of ``--config preset:smollm2-laptop`` (another
preset, model or task by its flags). Each phase is a compiled function that runs by itself:

* *prompt pass*: the prompts of a step and the first token of each completion.
* *decoding*: the other tokens.
* *forward*: the scoring pass over the completions, with the LM head. Prompts are shared.
* *backward*: the update without the forward pass, optimizer included.
* *head*: log-probabilities over the vocabulary of all completion tokens, forward and backward: a
  part of the two before.
* *host*: what else a step takes: verifier, advantages, tables of requests.

Ceilings are the rate of a product of the network's own shape, float32, and the rate at which an
array of 256 MiB is read. "least" is the time of a phase at these rates: all multiplications of its
true tokens (shared prompts counted once), and for decoding all weights read once a token.

Processor seconds (user and system, all threads) are what a busy machine leaves comparable.
Compilation is left out.

    python benchmarks/real_model.py --threads 2 --steps 3
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moe.config import Model

PRESET = "preset:smollm2-laptop"
SMOKE = ("grpo", "--model=tiny-dense", "--task=sort", "--prompts=2", "--group-size=2")
READ_BYTES = 2**28


def main() -> None:
    parser = argparse.ArgumentParser(description="Times a GRPO step of a published model by phases")
    parser.add_argument("--threads", type=int, default=2, help="CPU cores to use")
    parser.add_argument("--steps", type=int, default=3, help="measured steps")
    parser.add_argument("--smoke", action="store_true", help="a single step at a tiny size")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("settings", nargs="*", help="flags of jrl.train after --", default=[])
    arguments = parser.parse_args()
    settings: list[str] = (
        [*SMOKE] if arguments.smoke else [f"--config={PRESET}", *arguments.settings]
    )
    # Before JAX starts: XLA sizes its thread pool by the processors it may use.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])
    os.environ["JAX_PLATFORMS"] = "cpu"
    figures = measure(settings, 1 if arguments.smoke else arguments.steps)
    report(figures, arguments.threads)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


@contextmanager
def clock(rows: dict[str, list[tuple[float, float]]], name: str) -> Iterator[None]:
    """Adds wall and processor seconds of what runs inside."""
    wall, processor = time.perf_counter(), time.process_time()
    yield
    pair = time.perf_counter() - wall, time.process_time() - processor
    rows.setdefault(name, []).append(pair)


def started(settings: list[str]) -> tuple[Any, Any]:
    """Setup of a run with these flags, and its train state before the first step."""
    from jrl.config.flags import parse_arguments
    from jrl.trainer.evaluation.saved_policy import load_model
    from jrl.trainer.setup.setup import build_setup
    from jrl.trainer.state import init_adapters, init_state, init_weights

    request = parse_arguments(settings)
    setup = build_setup(request.run, request.recipe)
    key, networks = setup.randomness.key("weights"), setup.networks
    if setup.run.checkpoint is None:
        weights = init_weights(Model(setup.model.without_adapters(), setup.mesh), key)
    else:
        weights, _ = load_model(setup.run.checkpoint, Model(setup.model, setup.mesh), masters=True)
    adapters = None
    if setup.model.lora is not None:
        adapters = init_adapters(Model(setup.model, setup.mesh), key)
    return setup, init_state(networks, weights, key, adapters=adapters)


def measure(settings: list[str], steps: int) -> dict[str, Any]:
    """Seconds of a step and of its phases, and the work in each."""
    from dataclasses import replace

    import jax

    from jrl.rollout.collection.collect import sampling_of
    from jrl.rollout.sampler import lengths_of, numbered
    from jrl.trainer.scoring import logprobs_of
    from jrl.trainer.setup.setup import build_setup
    from jrl.trainer.step import train_step
    from moe.weights import num_active_parameters

    setup, state = started(settings)
    networks, recipe = setup.networks, setup.recipe
    first_token = build_setup(replace(setup.run, response_length=1), recipe)
    sampler, prompts_only = setup.sampler(), first_token.sampler()
    rows: dict[str, list[tuple[float, float]]] = {}
    tokens, kept, result = {"prompt": 0, "response": 0}, {}, None
    for number in range(steps + 1):
        kept = {} if number == 0 else rows  # the first step compiles
        with clock(kept, "step"):
            state, result = train_step(sampler, networks, state, setup.randomness)
            jax.block_until_ready(state)
        batch = result.collected.batch
        examples = numbered(
            [setup.task.train(10_000 * (number + 1) + i) for i in range(recipe.prompts)], 0
        )
        for name, each in (("prompt pass", prompts_only), ("generation", sampler)):
            each.engine.load(state.policy.weights, int(state.step))
            requests = each.requests(examples, recipe.group_size)
            with clock(kept, name):
                each.engine.submit(requests, sampling_of(recipe))
                while each.engine.poll(draining=True):
                    pass
        with clock(kept, "forward"):
            jax.block_until_ready(
                logprobs_of(
                    networks.policy.objective, state.policy.weights, batch.tokens, batch.valid
                )
            )
        learner = jax.tree.map(lambda x: x + 0, state.policy)  # an update donates its buffers
        with clock(kept, "update"):
            jax.block_until_ready(networks.policy.update(learner, with_targets(batch)))
        if number:
            completions = result.collected.completions
            tokens["response"] += int(lengths_of(completions).sum())
            tokens["prompt"] += int(batch.valid[:: recipe.group_size, : setup.prompt_length].sum())
    head = head_of(setup, state.policy.weights, tokens["response"] // steps)
    for number in range(steps + 1):
        with clock({} if number == 0 else rows, "head"):
            jax.block_until_ready(head())
    for task in (setup.task, first_token.task):
        task.close()
    return {
        "seconds": rows,
        "tokens": {name: count / steps for name, count in tokens.items()},
        "rows": recipe.prompts * recipe.group_size,
        "d_model": setup.model.d_model,
        "vocab_size": setup.model.vocab_size,
        "active_parameters": num_active_parameters(setup.model),
        "response_length": setup.response_length,
        **ceilings(setup.model.d_model, setup.model.d_ff),
    }


def with_targets(batch: Any) -> Any:
    """A batch that an update takes, with the sampler's log-probabilities and random advantages."""
    from dataclasses import replace

    import jax.numpy as jnp
    import numpy as np

    advantages = np.random.default_rng(0).normal(size=batch.tokens.shape).astype(np.float32)
    return replace(batch, old_logprobs=batch.behaviour_logprobs, advantages=jnp.asarray(advantages))


def head_of(setup: Any, weights: Any, tokens: int) -> Callable[[], Any]:
    """Log-probabilities of random states by the LM head, and their gradient by the states."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec

    from moe.head import logprobs_and_entropy
    from moe.placement import specs

    config, mesh = setup.model, setup.mesh
    model = Model(config, mesh)
    states = jax.random.normal(jax.random.key(0), (tokens, config.d_model))
    ids = jnp.zeros(tokens, jnp.int32)
    rows = PartitionSpec(mesh.axes)

    def local(weights: Any, x: jax.Array, ids: jax.Array) -> jax.Array:
        return logprobs_and_entropy(weights, x, ids, model)[0]

    scores = jax.shard_map(
        local, mesh=mesh.mesh, in_specs=(specs(model), rows, rows), out_specs=rows
    )
    function = jax.jit(jax.grad(lambda x, weights: scores(weights, x, ids).sum()))
    return lambda: function(states, weights)


def ceilings(d_model: int, d_ff: int) -> dict[str, float]:
    """Rates of a product and of reading memory: per second, and per second of one processor."""
    import jax
    import jax.numpy as jnp

    x, matrix = jnp.ones((2048, d_model)), jnp.ones((d_model, max(d_ff, d_model)))
    numbers = jnp.ones(READ_BYTES // 4)
    found: dict[str, float] = {}
    rows: dict[str, list[tuple[float, float]]] = {}
    for name, function, inputs, work in (
        ("product", jax.jit(jnp.dot), (x, matrix), 2.0 * x.size * matrix.shape[1]),
        ("read", jax.jit(jnp.sum), (numbers,), float(READ_BYTES)),
    ):
        jax.block_until_ready(function(*inputs))  # compiles
        repeats = max(1, int(4e9 / work))
        for _ in range(5):
            with clock(rows, name):
                for _ in range(repeats):
                    jax.block_until_ready(function(*inputs))
        for column, kind in enumerate(("wall", "processor")):
            found[f"{name} per {kind} second"] = max(
                work * repeats / pair[column] for pair in rows[name]
            )
    return found


def phases(figures: dict[str, Any], column: int) -> dict[str, float]:
    """Median seconds of each phase: of the clock (0) or of processors (1)."""
    found = {
        name: statistics.median(pair[column] for pair in pairs)
        for name, pairs in figures["seconds"].items()
    }
    return {
        "step": found["step"],
        "prompt pass": found["prompt pass"],
        "decoding": found["generation"] - found["prompt pass"],
        "forward": found["forward"],
        "backward": found["update"] - found["forward"],
        "head": found["head"],
        "host": found["step"] - found["generation"] - found["update"],
    }


def least(figures: dict[str, Any]) -> dict[str, float]:
    """Processor seconds of the work of each phase at the ceilings."""
    product, read = (figures[f"{name} per processor second"] for name in ("product", "read"))
    layers = figures["active_parameters"] - figures["d_model"] * figures["vocab_size"]
    head = 2.0 * figures["d_model"] * figures["vocab_size"]
    prompts, responses = figures["tokens"]["prompt"], figures["tokens"]["response"]
    over_rows = (prompts + responses) * 2.0 * layers + responses * head
    read_bytes = 4.0 * figures["active_parameters"] * figures["response_length"]
    return {
        "prompt pass": (prompts * 2.0 * layers + figures["rows"] * head) / product,
        "decoding": max(responses * (2.0 * layers + head) / product, read_bytes / read),
        "forward": over_rows / product,
        # Frozen weights have no gradient: only that of the states, and logits once more.
        "backward": (over_rows + responses * head) / product,
        "head": 3 * responses * head / product,
    }


def report(figures: dict[str, Any], threads: int) -> None:
    """A line per phase."""
    tokens, lowest = figures["tokens"], least(figures)
    wall, processor = phases(figures, 0), phases(figures, 1)
    print(
        f"one GRPO step, {figures['rows']} completions, {tokens['prompt']:,.0f} prompt tokens, "
        f"{tokens['response']:,.0f} sampled, {threads} thread(s)"
    )
    print(
        f"products {figures['product per processor second'] / 1e9:.1f} GFLOP and reads "
        f"{figures['read per processor second'] / 1e9:.1f} GB per processor second"
    )
    print(f"{'phase':14}{'wall s':>9}{'processor s':>13}{'least':>9}{'x least':>9}")
    for name in wall:
        line = f"{name:14}{wall[name]:>9.2f}{processor[name]:>13.2f}"
        if name in lowest:
            line += f"{lowest[name]:>9.2f}{processor[name] / lowest[name]:>9.1f}"
        print(line)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
