"""``python -m jrl.evaluate RUN``: evaluation of a run's policy on held-out prompts.

It also evaluates a public checkpoint (``hf:DIR``), or either on another task (``--task``). The run
may still be in progress; nothing is written into its folder but, with ``--diagnostics``, the plot
``plots/value_diagnostics.png`` of its critic.
"""

import json
import os
import sys
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtyping import Array

from jrl.checks import flag
from jrl.command_line import exit_status, parse_flags, start_jax
from jrl.config.evaluation import (
    EvaluateOptions,
    choose_num_prompts,
    code_to_evaluate,
    evaluation_configuration,
    training_data_notes,
)
from jrl.config.run import RunConfig
from jrl.processes.agreement import RaiseInAllProcesses, check_same, connect, is_main_process
from jrl.program import program
from jrl.recipes import Recipe
from jrl.report.compilation import CompilationWatch
from jrl.report.evaluation import EvaluationDisplay, print_completions, print_results
from jrl.rollout.sampling import Sampling
from jrl.runs.folder import RunFolder
from jrl.tasks.data.split import parse_heldout
from jrl.text.load import load_tokenizer
from jrl.text.prompt_format import with_template
from moe.config import Model

if TYPE_CHECKING:
    from jrl.rollout.sampler import Sampler
    from jrl.trainer.setup.setup import Setup
    from moe.weights import Transformer


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    return exit_status(lambda: _main(words), "lower --slots or --response-length")


def _main(arguments: list[str]) -> int:
    options = parse_flags(
        EvaluateOptions,
        program("evaluate"),
        arguments,
        "Evaluates the policy of a run or of a public checkpoint: sampled, greedy, pass@k.",
    )
    options.check()
    temperature = 1.0 if options.temperature is None else options.temperature
    Sampling(temperature, options.top_k, options.top_p)
    results = _evaluate(options)
    print_results(results)
    if options.json is not None and is_main_process():
        path = Path(os.path.expanduser(options.json))
        path.write_text(json.dumps(results, indent=2, allow_nan=False) + "\n")
    return 0


def _evaluate(options: EvaluateOptions) -> dict[str, Any]:
    """Runs the evaluation; returns its settings and results, as they are printed and written."""
    folder = None if options.is_checkpoint else RunFolder.read(options.run)
    run, recipe = evaluation_configuration(options, folder)
    start_jax(run.devices, options.processes)
    shared_options = vars(options).keys() - {"json", "samples", "processes"}
    check_same({flag(name): getattr(options, name) for name in shared_options})
    if options.diagnostics and not recipe.uses_critic:
        if folder is None:
            raise ValueError(f"{options.run} is a checkpoint, which has no critic to diagnose.")
        raise ValueError(
            f"run {folder.path} has recipe {recipe.name}, which trains no critic: --diagnostics "
            "needs one, as in ppo and vapo."
        )
    adapted = f" with the adapters of {options.lora}" if options.lora is not None else ""
    _print_line(f"evaluating {options.run}{adapted} on {run.task}")
    for note in training_data_notes(options, folder):
        _print_line(note)
    setup = _build_setup(options, folder, run, recipe)
    # What builds and runs a network is imported once the flags are known to be right.
    from jrl.rollout.collection.collect import sampling_of
    from jrl.trainer.evaluation.evaluate import Completions, evaluate
    from jrl.trainer.setup.fit import evaluation_slots

    watch = CompilationWatch() if is_main_process() else nullcontext()
    path = None
    if options.samples is not None and is_main_process():
        path = os.path.expanduser(options.samples)
    completions = Completions(path, setup.format, options.show)
    with closing(setup.task), watch, completions:
        size = setup.task.heldout_size
        requested_prompts = choose_num_prompts(options, size)
        num_prompts = requested_prompts if size is None else min(requested_prompts, size)
        # As many slots as these completions need and the memory allows.
        slots, line = evaluation_slots(setup, num_prompts * options.k)
        _print_line(line)
        setup = replace(setup, run=replace(setup.run, slots=slots))
        sampler = setup.sampler(options.seed)
        critic, step = _load(options, folder, setup, sampler)
        usage = sampler.engine.usage
        with EvaluationDisplay(tokens=lambda: usage.row_steps + usage.admitted) as display:
            results = evaluate(
                sampler,
                sampling_of(setup.recipe),
                num_prompts=num_prompts,
                k=options.k,
                report=display.update,
                on_completions=completions.add,
            )
            if critic is not None and folder is not None:
                results |= _diagnose(
                    options, num_prompts, folder, setup, sampler, (critic, step), display
                )
    if is_main_process():
        print_completions(completions.shown)
    header = {
        "run": options.run,
        "recipe": "checkpoint" if folder is None else setup.recipe.name,
        "task": run.task,
        "step": step,
        "prompts_there": size,
        "everything": parse_heldout(run.held_out).everything,
        "k": options.k,
        "seed": options.seed,
        **{name: getattr(setup.recipe, name) for name in ("temperature", "top_k", "top_p")},
    }
    if options.lora is not None:
        header["lora"] = options.lora
    if setup.prompts_dropped:
        results["prompts_dropped"] = setup.prompts_dropped
    return {**header, **results}


def _build_setup(
    options: EvaluateOptions, folder: RunFolder | None, run: RunConfig, recipe: Recipe
) -> "Setup":
    """Builds task, tokenizer and network; an error in one process is raised in all.

    The caller closes the task.
    """
    from jrl.trainer.evaluation.saved_policy import read_model_config
    from jrl.trainer.setup.dry_run import turn_ends
    from jrl.trainer.setup.lengths import describe_lists, response_origin
    from jrl.trainer.setup.setup import build_setup

    with RaiseInAllProcesses():
        if folder is None:
            setup = build_setup(run, recipe)
        else:
            tokenizer = load_tokenizer(folder.tokenizer_path)
            if options.chat_template is not None:
                tokenizer = with_template(run, tokenizer)
            code = code_to_evaluate(options, folder)
            setup = build_setup(run, recipe, tokenizer, read_model_config(folder), code)
    connect(setup.mesh)
    connect(setup.rollout_mesh)
    for line in describe_lists(setup.task, setup.prompts_dropped, setup.prompt_length):
        _print_line(line)
    if folder is None and (ends := turn_ends(setup)) is not None:
        _print_line(ends)
    if folder is None and run.response_length is None:
        length = setup.response_length
        _print_line(f"completions of at most {length:,} tokens: {response_origin(run, length)}")
    return setup


def _load(
    options: EvaluateOptions, folder: RunFolder | None, setup: "Setup", sampler: "Sampler"
) -> "tuple[Transformer[Array] | None, int]":
    """Loads the policy into the sampler; returns the critic, if requested, and the step of both."""
    from jrl.trainer.evaluation.saved_policy import load_model, load_networks

    # The characters of another task may be none of the tokenizer's.
    setup.tokenizer.encode(setup.task.characters)
    _print_line("loading the weights")
    critic = None
    if folder is None:
        checkpoint = setup.run.checkpoint or ""
        policy, step = load_model(checkpoint, Model(setup.model, setup.mesh), adapters=options.lora)
    elif options.diagnostics:
        networks = {"policy": setup.model, "critic": setup.model.as_critic()}
        (policy, critic), step = load_networks(folder, networks, setup.mesh)
    else:
        policy, step = load_model(folder, Model(setup.model, setup.mesh))
    sampler.engine.load(policy, step)
    return critic, step


def _print_line(line: str) -> None:
    if is_main_process():
        print(line, flush=True)


def _diagnose(
    options: EvaluateOptions,
    num_prompts: int,
    folder: RunFolder,
    setup: "Setup",
    sampler: "Sampler",
    critic: "tuple[Transformer[Array], int]",
    display: EvaluationDisplay,
) -> dict[str, float]:
    """Evaluates the critic, given as weights and step, with the policy that the sampler has loaded;
    plots its diagnostics into the run's folder, and returns its metrics."""
    from jrl.report.critic import critic_diagnostics
    from jrl.report.critic_plots import plot_diagnostics
    from jrl.rollout.collection.collect import sampling_of
    from jrl.trainer.evaluation.evaluate import evaluate_critic

    weights, step = critic
    network = setup.trained["critic"]
    rollout = evaluate_critic(
        sampler,
        network,
        weights,
        sampling_of(setup.recipe),
        num_prompts=num_prompts,
        k=options.k,
        report=display.update,
    )
    report = critic_diagnostics(rollout)
    title = (
        f"{folder.path.name}: the critic of {setup.recipe.name} on {setup.run.task}, step {step}"
    )
    if is_main_process():
        plot_diagnostics(rollout, folder.plots_path / "value_diagnostics.png", title, report)
    return {f"critic/{name}": value for name, value in report.summary().items()}


if __name__ == "__main__":
    sys.exit(main())
