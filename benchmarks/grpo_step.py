"""Times one full GRPO step and decoding alone, and beside it the same step in TRL.

The step is the trainer's own: 32 prompts of the sort task, 8 completions each of at most 10 tokens,
verification, advantages and one optimizer step, float32, random weights of about 0.45 M parameters.
Compilation is left out: the first two steps are not counted. With ``--peer PYTHON`` the
interpreter of an environment with the `peer` extra runs `peer_trl.py` in turn with ours, on the
same number of threads.

    python benchmarks/grpo_step.py --threads 1 --peer path/to/peer/bin/python
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from moe.config import Model


def main() -> None:
    parser = argparse.ArgumentParser(description="Times one full GRPO step")
    parser.add_argument("--threads", type=int, default=1, help="CPU cores to use")
    parser.add_argument("--steps", type=int, default=30, help="measured steps per round")
    parser.add_argument("--rounds", type=int, default=3, help="rounds, alternating with the peer")
    parser.add_argument("--models", nargs="+", default=["tiny", "tiny-dense"])
    parser.add_argument("--peer", help="Python of an environment with the peer extra")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one, arguments.threads, arguments.steps)))
        return

    figures: dict[str, list[dict[str, float]]] = {}
    for _ in range(arguments.rounds):
        for model in arguments.models:
            figures.setdefault(f"jrl {model}", []).append(ours(model, arguments))
        if arguments.peer:
            figures.setdefault("TRL", []).append(peer(arguments))
    report(figures, arguments.threads)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


def measure(model: str, threads: int, steps: int) -> dict[str, float]:
    """Median seconds of a step and of its phases, in this process."""
    # Before JAX starts: XLA sizes its thread pool by the processors it may use.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    import jax

    jax.config.update("jax_platforms", "cpu")
    from jrl.config.run import RunConfig
    from jrl.recipes import Grpo
    from jrl.rollout.collection.collect import sampling_of
    from jrl.rollout.sampler import lengths_of, numbered
    from jrl.trainer.setup.setup import build_setup
    from jrl.trainer.state import init_state, init_weights
    from jrl.trainer.step import train_step
    from moe.weights import num_active_parameters, num_parameters

    setup = build_setup(
        RunConfig(task="sort", model=model, response_length=10), Grpo(prompts=32, mini_batch=256)
    )
    weights = init_weights(Model(setup.model, setup.mesh), setup.randomness.key("weights"))
    state = init_state(setup.networks, weights, setup.randomness.key("critic"))
    sampler = setup.sampler()
    seconds: dict[str, list[float]] = {"step": [], "gen": [], "update": [], "decode": []}
    tokens = {"gen": 0.0, "update": 0.0}
    for number in range(steps + 2):
        started = time.perf_counter()
        state, done = train_step(sampler, setup.networks, state, setup.randomness)
        jax.block_until_ready(state)
        if number < 2:
            continue
        seconds["step"].append(time.perf_counter() - started)
        seconds["gen"].append(done.metrics["timing_s/gen"])
        seconds["update"].append(done.metrics["timing_s/update_actor"])
        tokens["gen"] += float(lengths_of(done.collected.completions).sum())
        tokens["update"] += done.metrics["training/tokens"]

    prompts = setup.recipe.prompts
    sampler.engine.load(state.policy.weights, int(state.step))
    for number in range(steps):
        # Other prompts each time: the slots still hold those that were run before.
        first = number * prompts
        examples = numbered([setup.task.train(first + i) for i in range(prompts)], first)
        requests = sampler.requests(examples, setup.recipe.group_size)
        started = time.perf_counter()
        sampler.engine.submit(requests, sampling_of(setup.recipe))
        while sampler.engine.poll(draining=True):
            pass
        seconds["decode"].append(time.perf_counter() - started)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        **median,
        "step_minimum": min(seconds["step"]),
        "gen_tokens_per_second": tokens["gen"] / sum(seconds["gen"]),
        "update_tokens_per_second": tokens["update"] / sum(seconds["update"]),
        "parameters": num_parameters(setup.model),
        "active_parameters": num_active_parameters(setup.model),
    }


def ours(model: str, arguments: argparse.Namespace) -> dict[str, float]:
    """`measure` in a process of its own, so that every round starts alike."""
    command = [sys.executable, __file__, "--one", model]
    command += ["--threads", str(arguments.threads), "--steps", str(arguments.steps)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def peer(arguments: argparse.Namespace) -> dict[str, float]:
    """The same figures of TRL, as `peer_trl.py` measures them."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "peer.json"
        command = [arguments.peer, str(Path(__file__).with_name("peer_trl.py"))]
        command += ["--threads", str(arguments.threads), "--steps", str(arguments.steps)]
        done = subprocess.run([*command, "--json", str(out)], capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr or done.stdout)
        found = json.loads(out.read_text())
    summary = found["summary"]
    return {
        "step": summary["step"]["median"],
        "gen": summary["generation"]["median"],
        "update": summary["update"]["median"],
        "step_minimum": summary["step"]["minimum"],
        "gen_tokens_per_second": summary["generation"]["tokens_per_second"],
        "update_tokens_per_second": summary["update"]["tokens_per_second"],
        "parameters": found["parameters"],
        "active_parameters": found["parameters"],
    }


def report(figures: dict[str, list[dict[str, float]]], threads: int) -> None:
    """One line per system: medians over rounds, and the peer's step over ours, round by round."""
    print(f"one GRPO step, 256 completions of at most 10 tokens, {threads} thread(s)")
    print(
        f"{'':16}{'parameters':>12}{'active':>10}{'step s':>9}{'min s':>9}{'gen s':>9}"
        f"{'update s':>9}{'gen tok/s':>11}{'update tok/s':>13}{'TRL / this':>12}"
    )
    for name, rounds in figures.items():
        m = {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
        ratio = ""
        if "TRL" in figures:
            pairs = zip(figures["TRL"], rounds, strict=True)
            ratio = f"{statistics.median(t['step'] / r['step'] for t, r in pairs):.2f}"
        print(
            f"{name:16}{m['parameters']:>12,.0f}{m['active_parameters']:>10,.0f}{m['step']:>9.3f}"
            f"{m['step_minimum']:>9.3f}{m['gen']:>9.3f}{m['update']:>9.3f}"
            f"{m['gen_tokens_per_second']:>11,.0f}{m['update_tokens_per_second']:>13,.0f}{ratio:>12}"
        )
        if "decode" in m:
            print(f"{'':16}decoding only {m['decode']:.3f} s")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
