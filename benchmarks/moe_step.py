"""Times one training step of small mixtures of experts, and beside it the same in `transformers`.

A step is forward, cross-entropy and load-balancing loss, backward and AdamW on 8 sequences of 512
random tokens, float32, random weights of about 10 M parameters, 16 experts of which each token
takes 2 (the shape of Mixtral) or 4 (that of Qwen3-MoE, without its norms of queries and keys on
either side). The first two steps, which compile, are not counted. With ``--peer PYTHON`` the
interpreter of an environment with torch and transformers runs `peer_moe.py` in turn with ours, on
the same number of threads, with each of its implementations of the experts. ``--huge-pages`` asks
glibc for memory in huge pages, in all of them alike.

    python benchmarks/moe_step.py --threads 2 --huge-pages --peer path/to/peer/bin/python
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from moe.config import Model

SHAPES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_layers": 4, "d_expert": 160, "experts_per_token": 2},
    "qwen3-moe": {"num_layers": 6, "d_expert": 96, "experts_per_token": 4},
}
COMMON: dict[str, Any] = {
    "vocab_size": 2048,
    "d_model": 256,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 32,
    "num_experts": 16,
    "load_balance_coef": 0.01,
}
PEERS = ("eager", "grouped_mm", "batched_mm")


def main() -> None:
    parser = argparse.ArgumentParser(description="Times one training step of small MoE models")
    parser.add_argument("--threads", type=int, default=2, help="CPU cores to use")
    parser.add_argument("--steps", type=int, default=5, help="measured steps per round")
    parser.add_argument("--rounds", type=int, default=2, help="rounds, alternating with the peer")
    parser.add_argument("--batch", type=int, default=8, help="sequences")
    parser.add_argument("--time", type=int, default=512, help="tokens per sequence")
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--peer", help="Python of an environment with torch and transformers")
    parser.add_argument("--peer-experts", nargs="+", choices=PEERS, default=["grouped_mm", "eager"])
    parser.add_argument(
        "--huge-pages", action="store_true", help="memory pages of 2 MiB, not 4 KiB"
    )
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one, arguments)))
        return
    figures = {model: rounds_of(model, arguments) for model in arguments.models}
    for model, rounds in figures.items():
        report(model, rounds)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


def rounds_of(model: str, arguments: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """The figures of every system in every round."""
    figures: dict[str, list[dict[str, Any]]] = {}
    for _ in range(arguments.rounds):
        command = [sys.executable, __file__, "--one", model]
        figures.setdefault("jrl", []).append(in_turn(command, arguments))
        for experts in arguments.peer_experts if arguments.peer else ():
            script = str(Path(__file__).with_name("peer_moe.py"))
            command = [arguments.peer, script, "--model", model, "--experts", experts]
            figures.setdefault(f"transformers {experts}", []).append(in_turn(command, arguments))
    return figures


def in_turn(command: list[str], arguments: argparse.Namespace) -> dict[str, Any]:
    """One measurement in a process of its own, so that every round starts alike."""
    for option in ("threads", "steps", "batch", "time"):
        command += [f"--{option}", str(getattr(arguments, option))]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    if arguments.huge_pages:
        environment["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def measure(model: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds of our steps, in this process."""
    # Before JAX starts: XLA sizes its thread pool by the processors it may use.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])
    import jax
    import numpy as np

    jax.config.update("jax_platforms", "cpu")
    from moe.config import ModelConfig
    from moe.weights import initialise, num_parameters

    config = ModelConfig(**COMMON, **SHAPES[model], router_z_coef=0.0)
    start, step = program(config)
    state = start(initialise(config, jax.random.key(0)))
    draw = np.random.default_rng(0)
    seconds, loss = [], np.zeros(())
    for _ in range(arguments.steps + 2):
        tokens = draw.integers(0, config.vocab_size, (arguments.batch, arguments.time))
        began = time.perf_counter()
        state, loss = step(state, tokens.astype(np.int32))
        jax.block_until_ready((state, loss))
        seconds.append(time.perf_counter() - began)
    return {"seconds": seconds[2:], "parameters": num_parameters(config), "loss": float(loss)}


def program(config: Any) -> tuple[Any, Any]:
    """The start of training, from weights, and one step of it, from its state and tokens."""
    import jax
    import jax.numpy as jnp
    import optax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from moe.head import logprobs_and_entropy
    from moe.model import hidden
    from moe.placement import specs
    from moe.router.balance import router_loss
    from moe.tokens.packing import align_to_tokens, next_tokens
    from sharding.collectives import varying
    from sharding.folding import Layout, fold

    mesh = fold(Layout.parse("dp1"), jax.devices()[:1])

    network = Model(config, mesh)

    def loss_of(weights, tokens):
        valid = jnp.ones(tokens.shape, bool)
        x, stats = hidden(weights, tokens, valid, network)
        after, _ = logprobs_and_entropy(weights, x, next_tokens(tokens, network), network)
        log_probs = align_to_tokens(after, tokens.shape, network)
        loss = router_loss(stats, network, jnp.asarray(tokens.size))
        loss = loss - jnp.sum(log_probs[:, 1:]) / (tokens.size - tokens.shape[0])
        return jax.lax.psum(loss, tuple(varying(loss)))

    loss = jax.shard_map(loss_of, mesh=mesh.mesh, in_specs=(specs(network), P()), out_specs=P())
    optimizer = optax.adamw(1e-3)
    # Stated, or the second step would be compiled anew for arrays that the first one laid out.
    here = NamedSharding(mesh.mesh, P())

    def start(weights):
        return jax.device_put((weights, optimizer.init(weights)), here)

    def step(state, tokens):
        weights, moments = state
        value, gradients = jax.value_and_grad(loss)(weights, tokens)
        updates, moments = optimizer.update(gradients, moments, weights)
        return (optax.apply_updates(weights, updates), moments), value

    return start, jax.jit(step, donate_argnums=0, out_shardings=here)


def report(model: str, rounds: dict[str, list[dict[str, Any]]]) -> None:
    """One line per system: its steps, and how many times as long as ours, round by round."""
    print(f"{model:28}{'parameters':>12}{'least s':>10}{'median s':>10}{'x ours':>9}{'loss':>8}")
    ours = [statistics.median(one["seconds"]) for one in rounds["jrl"]]
    for name, found in rounds.items():
        medians = [statistics.median(one["seconds"]) for one in found]
        ratio = statistics.median(a / b for a, b in zip(medians, ours, strict=True))
        least = min(min(one["seconds"]) for one in found)
        print(
            f"{name:28}{found[0]['parameters']:>12,}{least:>10.3f}"
            f"{statistics.median(medians):>10.3f}{ratio:>9.2f}{found[0]['loss']:>8.3f}"
        )


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
