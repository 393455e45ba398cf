"""What depth costs: seconds to compile and milliseconds to run, layers scanned and unrolled.

Small mixtures of experts, as deep as `--depths` says, float32. "train" is the training step of
`moe_step.py` on 4 sequences of 64 tokens, "decode" the program that gives each of 8 rows one token
after another from a cache of 256 columns, all read. Times are processor time, on which other work
of the machine has little say: of tracing, of XLA, in which nothing that was compiled before helps,
and of a step, the least of `--rounds`. With a wide `--d-model` they show what the loop over layers
costs. `--kinds windows` has a sliding window in every other layer, `--kinds delta` Gated DeltaNet
in three of four.

    python benchmarks/depth.py --threads 1 --depths 4 48 --unrolled 4
    python benchmarks/depth.py --threads 1 --depths 4 48 --unrolled 4 --kinds delta
    python benchmarks/depth.py --threads 1 --depths 12 --unrolled 12 --d-model 256 --rounds 5
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moe_step import program

TRAINED, ROWS, COLUMNS, STEPS = (4, 64), 8, 256, 32


def main() -> None:
    parser = argparse.ArgumentParser(description="Times compilation and steps by number of layers")
    parser.add_argument("--threads", type=int, default=2, help="CPU cores to use")
    parser.add_argument("--rounds", type=int, default=3, help="runs; the fastest counts")
    parser.add_argument(
        "--depths", type=int, nargs="+", default=[4, 48], help="numbers of scanned layers"
    )
    parser.add_argument(
        "--unrolled", type=int, nargs="*", default=[4, 12], help="numbers of unrolled layers"
    )
    parser.add_argument("--d-model", type=int, default=32, help="a multiple of 32")
    parser.add_argument("--kinds", choices=["equal", "windows", "delta"], default="equal")
    parser.add_argument("--programs", nargs="+", choices=list(PROGRAMS), default=list(PROGRAMS))
    parser.add_argument("--smoke", action="store_true", help="a single run at a tiny size")
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.rounds, arguments.depths, arguments.unrolled = 1, [2], [2]
        arguments.kinds = "equal"
    # Before JAX starts: XLA sizes its thread pool by the processors it may use.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)
    print(
        f"jax {jax.__version__}, d_model {arguments.d_model}, {arguments.kinds} layers, "
        f"{arguments.threads} thread(s)"
    )
    print(f"{'program':10}{'layers':>8} {'form':10}{'trace s':>9}{'XLA s':>8}{'step ms':>10}")
    figures = []
    for name in arguments.programs:
        forms = [(depth, False) for depth in arguments.unrolled]
        for depth, scanned in [*forms, *((depth, True) for depth in arguments.depths)]:
            figures.append(measure(name, depth, scanned, arguments))
            one = figures[-1]
            print(
                f"{name:10}{depth:8} {one['form']:10}{one['trace']:9.1f}{one['compile']:8.1f}"
                f"{one['milliseconds']:10.2f}",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


def measure(name: str, depth: int, scanned: bool, arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds to trace and to compile a program, milliseconds of a step."""
    trace, run = PROGRAMS[name](config_of(depth, scanned, arguments.d_model, arguments.kinds))
    # Of the processors: a machine that does other things takes as many.
    began = time.process_time()
    lowered = trace()
    traced = time.process_time()
    compiled = lowered.compile()
    done = time.process_time()
    seconds = min(run(compiled) for _ in range(arguments.rounds + 1))
    return {
        "program": name,
        "layers": depth,
        "form": "scanned" if scanned else "unrolled",
        "trace": traced - began,
        "compile": done - traced,
        "milliseconds": 1e3 * seconds,
    }


def config_of(depth: int, scanned: bool, d_model: int, kinds: str) -> Any:
    from moe.architecture.attention import GatedDeltaNet
    from moe.config import ModelConfig
    from moe.execution import Execution

    of_kinds: dict[str, Any] = {}
    if kinds == "windows":
        of_kinds = {"sliding_window": 16, "full_attention_layers": tuple(range(1, depth, 2))}
    if kinds == "delta":
        layers = tuple(layer for layer in range(depth) if layer % 4 != 3)
        of_kinds["delta"] = GatedDeltaNet(layers, d_model // 32, d_model // 16, 16, 16, 4)
    return ModelConfig(
        vocab_size=64,
        num_layers=depth,
        d_model=d_model,
        num_heads=d_model // 16,
        num_kv_heads=d_model // 32,
        head_dim=16,
        num_experts=8,
        experts_per_token=2,
        d_expert=d_model,
        execution=Execution(scan_layers=scanned),
        **of_kinds,
    )


def training(config: Any) -> tuple[Callable[[], Any], Callable[[Any], float]]:
    """How to trace a training step, and the seconds of one."""
    import jax
    import numpy as np

    from moe.weights import initialise

    start, step = program(config)
    state = [start(initialise(config, jax.random.key(0)))]
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, TRAINED).astype(np.int32)

    def run(compiled: Any) -> float:
        began = time.process_time()
        state[0], loss = compiled(state[0], tokens)
        jax.block_until_ready((state[0], loss))
        return time.process_time() - began

    return lambda: step.lower(state[0], tokens), run


def decoding(config: Any) -> tuple[Callable[[], Any], Callable[[Any], float]]:
    """How to trace the program of decoding steps, and the seconds of one step."""
    from dataclasses import replace

    import jax
    import jax.numpy as jnp

    from jrl.recipes.base.batch import replicated
    from jrl.rollout.decoding.mesh_backend import StepLimits, advance, unstack_policy
    from jrl.rollout.decoding.slots import Decoder, SamplerState, empty_pool
    from jrl.rollout.sampling import Sampling
    from moe.weights import initialise
    from sharding.folding import Layout, fold

    mesh = fold(Layout(), jax.devices()[:1])
    decoder = Decoder(config, mesh, pad_id=0, stop_ids=(config.vocab_size,))
    here = replicated(mesh)
    policy = unstack_policy(decoder, jax.device_put(initialise(config, jax.random.key(0)), here))
    key, version, steps, none = jax.device_put(
        (jax.random.key_data(jax.random.key(1)), *(jnp.asarray(n) for n in (0, STEPS, 0))), here
    )
    limits = StepLimits(steps, none)
    pool = [empty_pool(decoder, ROWS, COLUMNS)]
    fixed = decoder, Sampling(), COLUMNS

    def begun(pool: Any) -> Any:
        """All rows live, with one token each."""
        ones = jax.device_put(jnp.ones(ROWS, jnp.int32), pool.rows.lengths.sharding)
        rows = replace(pool.rows, lengths=ones)
        return replace(pool, rows=rows, live=ones > 0, limits=ones * COLUMNS)

    def run(compiled: Any) -> float:
        given = jax.block_until_ready(begun(pool[0]))
        began = time.process_time()
        pool[0], advanced = compiled(policy, given, SamplerState(key, version), limits)
        jax.block_until_ready(pool[0])
        seconds = time.process_time() - began
        assert int(advanced.steps) == STEPS, "a row ended early"
        return seconds / STEPS

    return (
        lambda: advance.lower(*fixed, policy, pool[0], SamplerState(key, version), limits),
        run,
    )


PROGRAMS = {"train": training, "decode": decoding}

if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
