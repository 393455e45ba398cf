"""``python -m jrl.evaluate RUN``: how good the policy of a run is on prompts it never learned from.

Or that of a public checkpoint (``hf:DIR``), or either on another task (``--task``). The run may
still be going on; nothing is written into its folder but, with ``--diagnostics``, the picture
``plots/value_diagnostics.png`` of what its critic is worth.
"""

import json
import math
import sys
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro
from jaxtyping import Array
from rich import box
from rich.console import Console
from rich.table import Table

from jrl.config.command_line import exit_status, start_jax
from jrl.config.files import configuration_of, flag
from jrl.config.numbers import check_least, check_seed
from jrl.config.rollout import ON_ONE_MESH
from jrl.config.run import OF_DEVICES, RunConfig
from jrl.processes.agreement import FailTogether, check_same, connect, is_main_process
from jrl.processes.coordinator import ALONE, Processes
from jrl.recipes import Recipe
from jrl.recipes.grpo import Grpo
from jrl.report.compilation import CompilationWatch
from jrl.report.evaluation_display import EvaluationDisplay
from jrl.rollout.sampling import Sampling
from jrl.runs.folder import RunFolder
from jrl.text.load import load_tokenizer

if TYPE_CHECKING:
    from jrl.rollout.sampler import Sampler
    from jrl.trainer.setup.setup import Setup
    from moe.weights import Transformer


OF_TASK = ("held_out", "reward", "reward_weights", "prompt_length")
"""Settings of a run that are chosen for its task."""


@dataclass(frozen=True)
class Request:
    """What to evaluate, and how."""

    run: tyro.conf.Positional[str]
    """Folder of the run, whose newest checkpoint is evaluated; or hf:DIR, a public checkpoint."""
    task: str | None = None
    """What to evaluate on, as --task of jrl.train; None takes the run's own task."""
    held_out: str | None = None
    """Which prompts are held out, as --held-out of jrl.train; None takes the run's own choice."""
    answers: Literal["final", "evaluated"] | None = None
    """What answers have to be, as --answers of jrl.train; None takes the run's own."""
    reward: tuple[str, ...] | None = None
    """Rewards, as --reward of jrl.train; None takes the run's own, unless --task is given."""
    reward_weights: tuple[str, ...] | None = None
    """Their weights; None takes the run's own, unless --task is given."""
    prompt_length: int | None = None
    """Tokens of a prompt at most; longer ones of a list are left out. None takes the run's own, or
    fits the longest prompt where --task is given."""
    response_length: int | None = None
    """Limit of a completion in tokens; None takes the run's own."""
    system_prompt: str | None = None
    """The first message of every conversation that has none of its own; None takes the run's."""
    chat_template_kwargs: str | None = None
    """A JSON object of names that the chat template is given, such as {"enable_thinking": false};
    None takes the run's."""
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
    """How the devices are laid out; None takes the run's own layouts, dp1 for a checkpoint."""
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
        description="Evaluates the policy of a run or of a public checkpoint on held-out prompts: "
        "sampled, greedy, pass@k.",
        args=arguments,
    )
    _check(request)
    results = _evaluate(request)
    _print(results)
    if request.json is not None and is_main_process():
        Path(request.json).write_text(json.dumps(results, indent=2, allow_nan=False) + "\n")
    return 0


def _check(request: Request) -> None:
    """Raises ValueError for flags that cannot be, and OSError where the results could not go."""
    check_least(request, ("k", "prompts", "devices"))
    check_seed(request.seed)
    if request.temperature is not None and not math.isfinite(request.temperature):
        raise ValueError(f"temperature={request.temperature} must be a number from 0.")
    temperature = 1.0 if request.temperature is None else request.temperature
    Sampling(temperature, request.top_k, request.top_p)
    if request.json is not None:
        Path(request.json).absolute().parent.mkdir(parents=True, exist_ok=True)


def _configuration(request: Request, folder: RunFolder | None) -> tuple[RunConfig, Recipe]:
    """Of the run or the checkpoint, with what the flags change of task and lengths.

    Args:
      folder: of the run, None for a checkpoint.
    """
    if folder is None:
        if request.task is None:
            raise ValueError(f"{request.run} is a checkpoint, which has no task: give --task.")
        run, recipe = RunConfig(model=request.run, steps=0), Grpo()
    else:
        run, recipe = configuration_of(folder)
    if request.task is not None:
        # What was chosen for the run's own task need not fit another. Prompts have no answers to
        # imitate here, and need none.
        fresh = RunConfig()
        if recipe.supervised:
            recipe = Grpo()  # tasks have rewards, and not conversations
        fields_of_task = ("prompt_field", "answer_field", "messages_field")
        names = (*OF_TASK, *fields_of_task, "max_turns", "turn_length")
        run = replace(
            run,
            task=request.task,
            warm_start_steps=0,
            **{name: getattr(fresh, name) for name in names},
        )
    names = (*OF_TASK, "answers", "response_length", "system_prompt", "chat_template_kwargs")
    given = {name: getattr(request, name) for name in names}
    return replace(run, **{name: v for name, v in given.items() if v is not None}), recipe


def _evaluate(request: Request) -> dict[str, Any]:
    """What was evaluated and the numbers, as they are printed and written."""
    folder = None if request.run.startswith("hf:") else RunFolder.read(request.run)
    run, recipe = _configuration(request, folder)
    if request.devices is not None:
        run = replace(run, devices=request.devices)
    if run.rollout_devices is not None:
        # Nothing learns here: the layout's own devices sample.
        run = replace(run, rollout_devices=None, rollout_layout=None)
    # Implementations were chosen for the devices that learned; here the best that applies will do.
    run = replace(run, **ON_ONE_MESH, **dict.fromkeys(OF_DEVICES))
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
    from jrl.trainer.evaluation.saved_policy import (
        load_both,
        load_checkpoint,
        load_model,
        load_policy,
    )
    from jrl.trainer.setup.setup import build_setup

    if request.diagnostics and not recipe.uses_critic:
        if folder is None:
            raise ValueError(f"{request.run} is a checkpoint, which has no critic to diagnose.")
        raise ValueError(
            f"run {folder.path} is one of recipe {recipe.name}, which trains no critic: "
            "--diagnostics needs one, as ppo and vapo have it."
        )

    with FailTogether():
        if folder is None:
            setup = build_setup(run, recipe)
        else:
            tokenizer = load_tokenizer(folder.tokenizer_path)
            code_path = folder.code_path if request.task is None else None
            setup = build_setup(run, recipe, tokenizer, load_model(folder), code_path)
    connect(setup.mesh)
    connect(setup.rollout_mesh)
    watch = CompilationWatch() if is_main_process() else nullcontext()
    with closing(setup.task), watch, EvaluationDisplay() as display:
        critic, sampler = None, setup.sampler(request.seed)
        # The characters of another task may be none of the tokenizer's.
        setup.tokenizer.encode(setup.task.characters)
        if folder is None:
            policy, step = load_checkpoint(run.checkpoint or "", setup.networks), 0
        elif request.diagnostics:
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
        if critic is not None and folder is not None:
            numbers |= _diagnose(request, folder, setup, sampler, (critic, step), display)
    name = "checkpoint" if folder is None else recipe.name
    about = {"run": request.run, "recipe": name, "task": run.task, "step": step}
    if setup.prompts_dropped:
        numbers["prompts_dropped"] = setup.prompts_dropped
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
    for name in results:
        if name.startswith("task/") and "/completions/" not in name:
            table.add_row(name.removeprefix("task/"), f"{results[name]:.3f}")
        if name.startswith("reward/"):
            table.add_row(f"reward: {name.removeprefix('reward/')}", f"{results[name]:.3f}")
    if "prompts_dropped" in results:
        table.add_row("prompts left out as too long", f"{results['prompts_dropped']}")
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
