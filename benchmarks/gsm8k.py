"""Trains a chat model on GSM8K for some minutes and evaluates it greedily on the test problems.

GRPO with the settings of ``--config preset:gsm8k`` on the train split; flags of `jrl.train` after
``--`` override them. The policy completes the test problems greedily before the first step, every
few minutes and at the end. A point has the accuracy with its standard error, the minutes of
training (compilation included, evaluations left out), the minutes of everything, and the tokens
sampled for training. Results, written after every point, are ``NAME.json``, ``NAME.png`` with the
accuracy over minutes and over sampled tokens, and ``NAME-samples.jsonl`` with the first completions
of each evaluation.

    python -m benchmarks.gsm8k --model DIR --minutes 15 --seeds 0 1 2
    python -m benchmarks.gsm8k --model DIR --minutes 5 --eval-problems 32 -- --lora-rank 16
    python -m benchmarks.gsm8k --config preset:smollm2-laptop --eval-problems 64
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

NUM_TEST = 1319
NUM_SAMPLES = 20
"""Completions of an evaluation that are written to the samples."""
LEAST_TOP = 10
"""Least upper end of the accuracy axis, percent."""
CONTROL_KEYS = ("config", "model", "minutes", "eval_minutes", "eval_problems", "seeds", "flags")


@dataclass(frozen=True)
class Point:
    """Evaluation of the policy after a step.

    Attributes:
      minutes: of training, compilation included and evaluations left out.
      wall_minutes: of training and evaluations.
      sampled_tokens: tokens of the completions trained on so far.
      standard_error: of the accuracy, ``sqrt(p (1 - p) / n)`` with ``p = (correct + 1) / (n + 2)``,
        so that it is not 0 if no problem is solved.
      cut: share of completions that reached the maximum length.
      length: mean tokens of a completion.
      reward: mean training reward since the last point; None before the first step.
    """

    step: int
    minutes: float
    wall_minutes: float
    sampled_tokens: int
    accuracy: float
    standard_error: float
    cut: float
    length: float
    reward: float | None


def main() -> None:
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    arguments = parser().parse_args(words[:end])
    arguments.flags = words[end + 1 :]
    results: dict[str, Any] = {
        "settings": {name: getattr(arguments, name) for name in CONTROL_KEYS},
        "machine": {},
        "runs": [],
    }
    for seed in arguments.seeds:
        results["runs"].append({"seed": seed, "points": [], "steps": []})
        run_seed(arguments, seed, results)
    print(f"results: {arguments.out}.json, {arguments.out}.png, {arguments.out}-samples.jsonl")


def parser() -> argparse.ArgumentParser:
    """The command line up to ``--``."""
    parser = argparse.ArgumentParser(description="Accuracy on GSM8K over minutes of training")
    parser.add_argument("--model", help="checkpoint, as for jrl.train; none is the preset's")
    parser.add_argument("--config", default="preset:gsm8k", help="settings, as for jrl.train")
    parser.add_argument("--data", type=Path, help="folder with train.jsonl and test.jsonl")
    parser.add_argument("--minutes", type=float, default=15, help="minutes of training")
    parser.add_argument("--eval-minutes", type=float, default=3, help="between two evaluations")
    parser.add_argument(
        "--eval-problems", type=int, default=NUM_TEST, help="evaluate on the first N test problems"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="one run for each")
    parser.add_argument("--out", type=Path, default=Path("gsm8k"), help="results without suffix")
    return parser


def train_flags(arguments: argparse.Namespace, seed: int) -> list[str]:
    """Flags of `jrl.train` for a seed."""
    flags = [f"--config={arguments.config}", f"--seed={seed}"]
    if arguments.model is not None:
        flags.append(f"--model={arguments.model}")
    if arguments.data is not None:
        flags.append(f"--task=jsonl:{arguments.data / 'train.jsonl'}")
        flags.append(f"--held-out={arguments.data / 'test.jsonl'}")
    return [*flags, *arguments.flags]


def run_seed(arguments: argparse.Namespace, seed: int, results: dict[str, Any]) -> None:
    """Trains and evaluates one seed; adds its points and steps to the last run of the results."""
    import jax

    from jrl.config.flags import parse_arguments
    from jrl.rollout.sampler import lengths_of, numbered_heldout, scores_of
    from jrl.trainer.evaluation.evaluate import heldout_examples
    from jrl.trainer.evaluation.saved_policy import load_model
    from jrl.trainer.setup.fit import fit
    from jrl.trainer.setup.setup import build_setup
    from jrl.trainer.state import init_adapters, init_state
    from jrl.trainer.step import train_step
    from moe.config import Model

    request = parse_arguments(train_flags(arguments, seed))
    if request.run.checkpoint is None:
        raise SystemExit(f"--model {request.run.model} has random weights: give a checkpoint.")
    fitted = fit(build_setup(request.run, request.recipe), request.recipe)
    setup, run = fitted.setup, results["runs"][-1]
    print(fitted.line or "memory: the settings fit", flush=True)
    results["machine"] = machine() | {"chosen_to_fit": dict(fitted.chosen)}
    examples = numbered_heldout(heldout_examples(setup.task, arguments.eval_problems))
    total = setup.task.heldout_size
    print(
        f"seed {seed}: evaluates greedily on "
        + (f"all {total:,}" if len(examples) == total else f"the first {len(examples)} of {total}")
        + " test problems",
        flush=True,
    )
    key, networks, sampler = setup.randomness.key("weights"), setup.networks, setup.sampler()
    checkpoint = setup.run.checkpoint
    assert checkpoint is not None
    model = Model(setup.model, setup.mesh)
    weights, _ = load_model(checkpoint, model, masters=True)
    adapters = None
    if setup.model.lora is not None:
        adapters = init_adapters(model, key)
    state = init_state(networks, weights, key, adapters=adapters)
    training_seconds, sampled, rewards, evaluated_at = 0.0, 0, list[float](), 0.0
    began = time.perf_counter()

    def evaluate() -> None:
        completions = greedy_completions(sampler, state, examples)
        point = point_of(completions, int(state.step), sampled, rewards)
        minutes, wall = training_seconds / 60, (time.perf_counter() - began) / 60
        run["points"].append(asdict(replace(point, minutes=minutes, wall_minutes=wall)))
        rewards.clear()
        print(line_of(run["points"][-1]), flush=True)
        write(arguments.out, results, seed, completions[:NUM_SAMPLES], setup.format)

    evaluate()
    while training_seconds < arguments.minutes * 60:
        started = time.perf_counter()
        state, result = train_step(sampler, networks, state, setup.randomness)
        jax.block_until_ready(state)
        seconds = time.perf_counter() - started
        training_seconds += seconds
        completions = result.collected.completions
        sampled += int(lengths_of(completions).sum())
        rewards.append(float(scores_of(completions).mean()))
        run["steps"].append({"step": int(state.step), "seconds": seconds, "reward": rewards[-1]})
        print(f"step {int(state.step)}: {seconds:.1f} s, reward {rewards[-1]:.3f}", flush=True)
        is_last = training_seconds >= arguments.minutes * 60
        if is_last or training_seconds - evaluated_at >= arguments.eval_minutes * 60:
            evaluate()
            evaluated_at = training_seconds
    if not any(step["reward"] for step in run["steps"]):
        print("no completion in training had a reward, so that nothing was learned from them")
    setup.task.close()


def greedy_completions(sampler: Any, state: Any, examples: Mapping[int, Any]) -> list[Any]:
    """The policy's greedy completion of each problem, with its verdict."""
    from jrl.rollout.sampling import GREEDY

    sampler.engine.load(state.policy.weights, int(state.step))
    return sampler.sample(examples, GREEDY, 1)


def point_of(
    completions: Sequence[Any], step: int, sampled: int, rewards: Sequence[float]
) -> Point:
    """Statistics of an evaluation, with no times."""
    from jrl.rollout.sampler import correct_of, lengths_of

    correct, count = correct_of(completions), len(completions)
    rate = (float(correct.sum()) + 1) / (count + 2)
    return Point(
        step=step,
        minutes=0.0,
        wall_minutes=0.0,
        sampled_tokens=sampled,
        accuracy=float(correct.mean()),
        standard_error=(rate * (1 - rate) / count) ** 0.5,
        cut=sum(each.truncated for each in completions) / count,
        length=float(lengths_of(completions).mean()),
        reward=sum(rewards) / len(rewards) if rewards else None,
    )


def line_of(point: Mapping[str, Any]) -> str:
    """Printed line of a point."""
    return (
        f"step {point['step']}: accuracy {point['accuracy']:.4f} +- {point['standard_error']:.4f} "
        f"after {point['minutes']:.1f} minutes and {point['sampled_tokens']:,} sampled tokens; "
        f"{point['cut']:.2f} cut, {point['length']:.0f} tokens a completion"
    )


def machine() -> dict[str, Any]:
    """Devices and versions of this process."""
    import os

    import jax

    device = jax.devices()[0]
    return {
        "device": f"{len(jax.devices())} x {device.device_kind}",
        "processors": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "python": platform.python_version(),
        "jax": version("jax"),
        "jrl": version("jrl-reasoning"),
    }


def write(
    out: Path, results: Mapping[str, Any], seed: int, completions: Sequence[Any], format: Any
) -> None:
    """Writes the results and the plot, and appends the samples of an evaluation."""
    run, is_first = results["runs"][-1], len(results["runs"]) == 1
    out.parent.mkdir(parents=True, exist_ok=True)
    Path(f"{out}.json").write_text(json.dumps(results, indent=1) + "\n")
    mode = "w" if is_first and len(run["points"]) == 1 else "a"
    with Path(f"{out}-samples.jsonl").open(mode, encoding="utf-8") as file:
        for completion in completions:
            record = {"seed": seed, "step": run["points"][-1]["step"]}
            record |= completion.record(format)
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
    plot(Path(f"{out}.png"), results)


def plot(path: Path, results: Mapping[str, Any]) -> None:
    """Plots the accuracy with its standard error over minutes and over sampled tokens."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    from jrl.report.plots import BLUE, GREEN, GRID, ORANGE, PURPLE

    colours = (BLUE, ORANGE, GREEN, PURPLE)
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    axes_of = {"minutes": "minutes of training", "sampled_tokens": "sampled tokens"}
    for panel, (name, label) in zip(panels, axes_of.items(), strict=True):
        for index, run in enumerate(results["runs"]):
            points = run["points"]
            panel.errorbar(
                [point[name] for point in points],
                [100 * point["accuracy"] for point in points],
                yerr=[100 * point["standard_error"] for point in points],
                color=colours[index % len(colours)],
                marker="o",
                capsize=2,
                label=f"seed {run['seed']}",
            )
        panel.set_xlabel(label)
        panel.grid(color=GRID)
        panel.set_ylim(bottom=0, top=max(panel.get_ylim()[1], LEAST_TOP))
    panels[0].set_ylabel("greedy test accuracy, %")
    panels[0].legend(frameon=False)
    model = results["settings"]["model"] or results["settings"]["config"]
    figure.suptitle(f"{model}, {results['settings']['eval_problems']:,} problems")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
