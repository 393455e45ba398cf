"""Times an optimizer step of adapters and of all weights side by side, and counts their bytes.

A step is the trainer's own update of the policy by GRPO on a mini-batch of random tokens, of a
preset or of a larger mixture; the two ways take turns, round after round, in one process. Bytes are
those that one device holds between steps: weights, masters, moments. The first step of each, which
compiles, is not counted.

    python benchmarks/lora.py --model small --rank 16 --dtype bfloat16
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jrl.config.run import RunConfig
from jrl.recipes import Grpo
from jrl.recipes.base.batch import Batch, over_rows
from jrl.trainer.setup.setup import Setup, build_setup
from jrl.trainer.state import init_adapters, init_state, init_weights
from moe.config import Model
from moe.weights import num_parameters, num_trained_parameters


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Times training steps of adapters and of all weights"
    )
    parser.add_argument("--model", default="small", help="a preset")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--targets", help="value of --lora-targets")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--layout", default="dp1")
    parser.add_argument("--rows", type=int, default=16, help="completions per mini-batch")
    parser.add_argument("--time", type=int, default=128, help="tokens per completion")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments = parser.parse_args()
    figures = compared(arguments)
    full = figures["all weights"]
    print(f"{'':14}{'learn':>12}{'weights':>14}{'masters':>14}{'moments':>14}{'step s':>10}")
    for name, found in figures.items():
        sizes = "".join(f"{found[part]:>14,}" for part in ("weights", "masters", "moments"))
        print(f"{name:14}{found['learn']:>12,}{sizes}{statistics.median(found['seconds']):>10.3f}")
    ratios = [a / b for a, b in zip(figures["adapters"]["seconds"], full["seconds"], strict=True)]
    print(f"step time, adapters / all weights: {statistics.median(ratios):.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


def compared(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Bytes and seconds of both."""
    setups = {
        "all weights": _setup(arguments),
        "adapters": _setup(arguments, lora_rank=arguments.rank, lora_targets=arguments.targets),
    }
    learners = {name: _learner(setup) for name, setup in setups.items()}
    batch = _batch(setups["adapters"], arguments)
    figures: dict[str, dict[str, Any]] = {
        name: {
            "parameters": num_parameters(setup.model),
            "learn": num_trained_parameters(setup.model),
            "weights": _bytes(learners[name].weights),
            "masters": _bytes(learners[name].masters),
            "moments": _bytes(learners[name].opt_state),
            "seconds": [],
        }
        for name, setup in setups.items()
    }
    for number in range(arguments.rounds + 1):
        for name, setup in setups.items():
            began = time.perf_counter()
            learners[name], metrics = setup.networks.policy.update(learners[name], batch)
            jax.block_until_ready((learners[name], metrics))
            if number:
                figures[name]["seconds"].append(time.perf_counter() - began)
    for setup in setups.values():
        setup.task.close()
    return figures


def _setup(arguments: argparse.Namespace, **adapters: Any) -> Setup:
    run = RunConfig(
        task="sort",
        model=arguments.model,
        layout=arguments.layout,
        dtype=arguments.dtype,
        response_length=arguments.time,
        **adapters,
    )
    rows = arguments.rows
    recipe = Grpo(prompts=rows // 2, group_size=2, mini_batch=rows, micro_batch=rows)
    return build_setup(run, recipe)


def _learner(setup: Setup) -> Any:
    key, adapters = setup.randomness.key("weights"), None
    if setup.model.lora is not None:
        adapters = init_adapters(Model(setup.model, setup.mesh), setup.randomness.key("adapters"))
    weights = init_weights(Model(setup.model.without_adapters(), setup.mesh), key)
    return init_state(setup.networks, weights, key, adapters=adapters).policy


def _batch(setup: Setup, arguments: argparse.Namespace) -> Batch[jax.Array]:
    random, prompt = np.random.default_rng(0), setup.prompt_length
    shape = (arguments.rows, prompt + arguments.time)
    tokens = random.integers(0, setup.model.vocab_size, shape).astype(np.int32)
    tokens[1::2, :prompt] = tokens[::2, :prompt]  # rows that share a prompt
    mask = np.broadcast_to(np.arange(shape[1]) >= prompt, shape)
    logprobs = random.uniform(-3, -1, shape).astype(np.float32)
    batch = Batch(
        tokens=tokens,
        valid=np.ones(shape, bool),
        mask=mask,
        old_logprobs=logprobs,
        behaviour_logprobs=logprobs,
        advantages=random.normal(size=shape).astype(np.float32),
    )
    return jax.device_put(batch, over_rows(setup.mesh))


def _bytes(tree: Any) -> int:
    """On the first device."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
