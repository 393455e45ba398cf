"""``python -m jrl.evaluate RUN``: how good the policy of a run is on prompts it never learned from.

The run may still be going on; nothing is written into its folder but, with ``--diagnostics``, the
picture ``plots/value_diagnostics.png`` of what its critic is worth.
"""

import errno
import json
import math
import os
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro
from jaxtyping import Array
from rich import box
from rich.console import Console
from rich.table import Table

from jrl.config.command_line import exit_status, start_jax
from jrl.config.files import configuration_of, flag
from jrl.config.run import OF_DEVICES
from jrl.config.seeds import check_seed
from jrl.processes.agreement import FailTogether, check_same, connect, is_main_process
from jrl.processes.coordinator import ALONE, Processes
from jrl.report.evaluation_display import EvaluationDisplay
from jrl.rollout.sampling import Sampling
from jrl.runs.folder import RunFolder
from jrl.text.load import load_tokenizer

if TYPE_CHECKING:
    from jrl.rollout.sampler import Sampler
    from jrl.trainer.setup.setup import Setup
    from moe.weights import Transformer


@dataclass(frozen=True)
class Request:
    """What to evaluate, and how."""

    run: tyro.conf.Positional[str]
    """Folder of the run; its newest checkpoint is evaluated."""
    k: int = 8
    """Completions sampled per prompt; pass@k is given for 1, 2, 4, ... and k."""
    prompts: int = 256
    """Held-out prompts, or all there are if they are fewer."""
    temperature: float | None = None
    """Of sampling; None takes the run's own."""
    top_k: int | None = None
    """Sample among this many likeliest tokens; None takes the run's own setting."""
    top_p: float | None = None
    """Sample from the smallest set of likeliest tokens with this probability; None takes the run's
    own setting."""
    seed: int = 0
    """Of sampling. The same seed gives the same completions."""
    layout: str | None = None
    """How the devices are laid out; None takes the run's own layouts."""
    rollout_layout: str | None = None
    """How they are laid out to sample completions; None derives it from --layout, if given."""
    devices: int | None = None
    """Number of fake CPU devices; None does as the run did."""
    diagnostics: bool = False
    """Measure the critic of the run as well, and draw plots/value_diagnostics.png in its folder."""
    json: str | None = None
    """A file that the results are written to as well."""
    processes: tyro.conf.OmitArgPrefixes[Processes] = ALONE


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    return exit_status(lambda: _main(sys.argv[1:] if arguments is None else list(arguments)))


def _main(arguments: list[str]) -> int:
    request = tyro.cli(
        Request,
        prog="python -m jrl.evaluate",
        description="Evaluates the policy of a run on held-out prompts: sampled, greedy, pass@k.",
        args=arguments,
    )
    _check(request)
    results = _evaluate(request, RunFolder.read(request.run))
    _print(results)
    if request.json is not None and is_main_process():
        Path(request.json).write_text(json.dumps(results, indent=2, allow_nan=False) + "\n")
    return 0


def _check(request: Request) -> None:
    """Raises ValueError for flags that cannot be, and OSError where the results could not go."""
    for name in ("k", "prompts", "devices"):
        value = getattr(request, name)
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1.")
    check_seed(request.seed)
    if request.temperature is not None and not math.isfinite(request.temperature):
        raise ValueError(f"temperature={request.temperature} must be a number from 0.")
    temperature = 1.0 if request.temperature is None else request.temperature
    Sampling(temperature, request.top_k, request.top_p)
    if request.json is not None and not Path(request.json).absolute().parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), request.json)


def _evaluate(request: Request, folder: RunFolder) -> dict[str, Any]:
    """What was evaluated and the numbers, as they are printed and written."""
    run, recipe = configuration_of(folder)
    if request.devices is not None:
        run = replace(run, devices=request.devices)
    if run.rollout_devices is not None:
        # Nothing learns here: the layout's own devices sample.
        run = replace(run, rollout_devices=None, rollout_layout=None)
    if run.rollout_engine != "slots":
        run = replace(run, rollout_engine="slots", rollout_split=None)
    # Implementations were chosen for the devices that learned; here the best that applies will do.
    run = replace(run, **dict.fromkeys(OF_DEVICES))
    if request.layout is not None:
        run = replace(run, layout=request.layout, rollout_layout=None)
    if request.rollout_layout is not None:
        run = replace(run, rollout_layout=request.rollout_layout)
    given = {name: getattr(request, name) for name in ("temperature", "top_k", "top_p")}
    recipe = replace(recipe, **{name: value for name, value in given.items() if value is not None})
    start_jax(run.devices, request.processes)
    own = ("json", "processes")
    names = [field.name for field in fields(request) if field.name not in own]
    check_same({flag(name): getattr(request, name) for name in names})

    # What builds and runs a network is imported once the flags are known to be right.
    from jrl.rollout.collection.collect import sampling_of
    from jrl.trainer.evaluation.evaluate import evaluate
    from jrl.trainer.evaluation.saved_policy import load_both, load_model, load_policy
    from jrl.trainer.setup.setup import build_setup

    if request.diagnostics and not recipe.uses_critic:
        raise ValueError(
            f"run {folder.path} is one of recipe {recipe.name}, which trains no critic: "
            "--diagnostics needs one, as ppo and vapo have it."
        )

    with FailTogether():
        tokenizer = load_tokenizer(folder.tokenizer_path)
        setup = build_setup(run, recipe, tokenizer, load_model(folder))
    connect(setup.mesh)
    connect(setup.rollout_mesh)
    with closing(setup.task), EvaluationDisplay() as display:
        critic, sampler = None, setup.sampler(request.seed)
        if request.diagnostics:
            policy, critic, step = load_both(folder, setup.networks)
        else:
            policy, step = load_policy(folder, setup.networks)
        sampler.engine.load(policy, step)
        numbers = evaluate(
            sampler,
            sampling_of(recipe),
            num_prompts=request.prompts,
            k=request.k,
            report=display.update,
        )
        if critic is not None:
            numbers |= _diagnose(request, folder, setup, sampler, (critic, step), display)
    about = {"run": str(folder.path), "recipe": recipe.name, "task": run.task, "step": step}
    how = {"k": request.k, "seed": request.seed}
    how |= {name: getattr(recipe, name) for name in given}
    return {**about, **how, **numbers}


def _diagnose(
    request: Request,
    folder: RunFolder,
    setup: "Setup",
    sampler: "Sampler",
    critic: "tuple[Transformer[Array], int]",
    display: EvaluationDisplay,
) -> dict[str, float]:
    """Draws the picture and returns the numbers behind it.

    Args:
      sampler: with the policy loaded.
      critic: its weights, and the step both are of.
    """
    from jrl.report.critic import critic_diagnostics
    from jrl.report.critic_plots import plot_diagnostics
    from jrl.rollout.collection.collect import sampling_of
    from jrl.trainer.evaluation.critic import evaluate_critic

    weights, step = critic
    network = setup.networks.critic
    assert network is not None
    rollout = evaluate_critic(
        sampler,
        network,
        weights,
        sampling_of(setup.recipe),
        num_prompts=request.prompts,
        k=request.k,
        report=display.update,
    )
    report = critic_diagnostics(rollout)
    title = (
        f"{folder.path.name}: the critic of {setup.recipe.name} on {setup.run.task}, step {step}"
    )
    if is_main_process():
        plot_diagnostics(rollout, folder.plots_path / "value_diagnostics.png", title, report)
    return {f"critic/{name}": value for name, value in report.summary().items()}


def _print(results: dict[str, Any]) -> None:
    print("{run}: {recipe} on {task}, step {step}".format(**results))
    print(
        "{prompts} held-out prompts, {k} completions each at temperature {temperature}".format(
            **results
        )
    )
    table = Table(box=box.SIMPLE_HEAD, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("sampled accuracy", f"{results['accuracy/sampled']:.3f}")
    table.add_row("its standard error", f"{results['accuracy/sampled/standard_error']:.3f}")
    table.add_row("greedy accuracy", f"{results['accuracy/greedy']:.3f}")
    for name in results:
        if name.startswith("pass@"):
            table.add_row(name, f"{results[name]:.3f}")
    table.add_row("mean length", f"{results['response_length/mean']:.2f} tokens")
    table.add_row("cut by the length limit", f"{results['response_length/clip_ratio']:.1%}")
    total = results["prompts"] * results["k"]
    for name in results:
        if name.startswith("verifier/") and results[name]:
            reason = f"verdict: {name.removeprefix('verifier/')}"
            table.add_row(reason, f"{results[name] / total:.1%}")
    for name in results:
        if name.startswith("critic/"):
            table.add_row(name.removeprefix("critic/"), f"{results[name]:.3f}")
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
