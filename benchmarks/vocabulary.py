"""Memory and time of log-probabilities and entropies, in chunks of the vocabulary and from all
logits.

States ``[2048, 256]`` times a head ``[256, 32768]``, forward and backward: the gradient of a loss
of both numbers with respect to states and head. Values and gradients are compared first; then all
forms run in turn, round after round, and the least time of each is printed. Compilation is left
out. Memory is what the compiled program takes beside its arguments and results.

    python benchmarks/vocabulary.py --threads 2
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moe.config import Model


def main() -> None:
    parser = argparse.ArgumentParser(description="Times the LM head in training")
    parser.add_argument("--threads", type=int, default=2, help="CPU cores to use")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shape", type=int, nargs=3, default=[2048, 256, 32768])
    parser.add_argument("--chunks", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--smoke", action="store_true", help="a single run at a tiny size")
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.rounds, arguments.shape, arguments.chunks = 1, [64, 8, 48], [16, 48]
    # Before JAX starts: XLA sizes its thread pool by the processors it may use.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])
    import jax

    jax.config.update("jax_platforms", "cpu")
    tokens, d_model, vocab = arguments.shape
    print(f"jax {jax.__version__}, [{tokens}, {d_model}] x [{d_model}, {vocab}] ", end="")
    print(f"{arguments.dtype}, {arguments.threads} thread(s); forward and backward")
    print(f"{'form':16}{'MiB':>10}{'least ms':>11}{'x plain':>9}")
    figures = table(arguments.shape, arguments.chunks, arguments.dtype, arguments.rounds)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


def forms(shape: list[int], chunks: list[int]) -> dict[str, Callable[..., Any]]:
    """(head, states, tokens) -> log-probabilities and entropies, in several ways."""
    from dataclasses import replace
    from functools import partial

    import jax
    import jax.numpy as jnp

    from moe.config import ModelConfig
    from moe.execution import Execution
    from moe.head import logits_of, logprobs_and_entropy
    from moe.weights import shapes
    from sharding.folding import Layout, fold

    mesh = fold(Layout(), jax.devices()[:1])
    config = ModelConfig(shape[2], d_model=shape[1], head="untied")

    def on_device(read):
        def local(head, x, tokens):
            # Of the network, the head alone is there.
            return read(replace(shapes(config), head=head), x, tokens)

        nowhere = jax.sharding.PartitionSpec(mesh.axes)
        whole = jax.sharding.PartitionSpec()
        return jax.shard_map(
            local, mesh=mesh.mesh, in_specs=(whole, nowhere, nowhere), out_specs=nowhere
        )

    def plain(weights, x, tokens):
        logits = logits_of(weights, x, Model(config, mesh))
        chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
        total = jax.nn.logsumexp(logits, axis=-1)
        return chosen - total, total - jnp.sum(jax.nn.softmax(logits) * logits, axis=-1)

    def chunked(chunk, weights, x, tokens):
        execution = Execution(vocab_chunk=chunk)
        config = ModelConfig(shape[2], d_model=shape[1], head="untied", execution=execution)
        return logprobs_and_entropy(weights, x, tokens, Model(config, mesh))

    ours = {f"chunks of {chunk}": on_device(partial(chunked, chunk)) for chunk in chunks}
    return {"all logits": on_device(plain), **ours}


def with_gradient(form: Callable[..., Any]) -> Any:
    import jax

    def both(head, x, tokens, pull):
        out, back = jax.vjp(lambda head, x: form(head, x, tokens), head, x)
        return out, back(tuple(pull))

    return jax.jit(both)


def table(shape: list[int], chunks: list[int], dtype: str, rounds: int) -> list[dict[str, Any]]:
    """Compare, time and print the forms."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    num_tokens, d_model, vocab = shape
    draw = np.random.default_rng(0)
    operands = (
        jnp.asarray(draw.normal(size=(d_model, vocab)) / d_model**0.5, jnp.float32),
        jnp.asarray(draw.normal(size=(num_tokens, d_model)), dtype),
        jnp.asarray(draw.integers(0, vocab, num_tokens)),
        jnp.asarray(draw.normal(size=(2, num_tokens)), jnp.float32),
    )
    programs = {
        name: with_gradient(form).lower(*operands).compile()
        for name, form in forms(shape, chunks).items()
    }
    plain, *_ = programs
    expected = jax.tree.leaves(programs[plain](*operands))
    for name, program in programs.items():
        compare(name, jax.tree.leaves(program(*operands)), expected, dtype)
    least = dict.fromkeys(programs, float("inf"))
    for _ in range(rounds):
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program(*operands))
            least[name] = min(least[name], 1e3 * (time.perf_counter() - start))
    return [line(name, program, least, plain) for name, program in programs.items()]


def compare(name: str, out: list[Any], expected: list[Any], dtype: str) -> None:
    """Each array, its differences in units of its largest element."""
    import numpy as np

    # With bfloat16 states, gradients are rounded to 8 bits.
    bound = 1e-5 if dtype == "float32" else 2e-2
    for ours, theirs in zip(out, expected, strict=True):
        ours, theirs = (np.asarray(x, np.float64) for x in (ours, theirs))
        difference = np.max(np.abs(ours - theirs)) / np.max(np.abs(theirs))
        if not difference < bound:
            raise SystemExit(f"{name} differs from all logits by {difference:.2g}")


def line(name: str, program: Any, least: dict[str, float], plain: str) -> dict[str, Any]:
    """Print and return the figures of one form."""
    mebibytes = program.memory_analysis().temp_size_in_bytes / 2**20
    print(
        f"{name:16}{mebibytes:>10.1f}{least[name]:>11.1f}{least[name] / least[plain]:>9.2f}",
        flush=True,
    )
    return {"form": name, "mebibytes": mebibytes, "milliseconds": least[name]}


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
