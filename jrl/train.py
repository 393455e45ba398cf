"""``python -m jrl.train [RECIPE] [OPTIONS]``: reinforcement learning or fine-tuning of a policy.

Without arguments it is the demonstration: GRPO on sorting digits, in a new folder under ``runs/``.
"""

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from jaxtyping import Array

from jrl.checks import flag
from jrl.command_line import exit_status, start_jax
from jrl.config.files import run_of, to_json
from jrl.config.flags import TrainOptions, drop_idle, parse_arguments
from jrl.config.run import RunConfig
from jrl.config.run_code import code_of
from jrl.config.settings_file import settings_text
from jrl.config.training import AUTO
from jrl.processes.agreement import (
    RaiseInAllProcesses,
    broadcast_from_main,
    check_same,
    connect,
    is_main_process,
    is_multiprocess,
    short_hash,
)
from jrl.processes.coordinator import exit_without_waiting, process_id
from jrl.processes.stopping import DRAINED, INTERRUPTED, UNSUPERVISED, Supervisor
from jrl.processes.watchdog import jax_heartbeat
from jrl.program import program
from jrl.published.base_name import license_in, write_license
from jrl.report.evaluation import summarize_run
from jrl.runs import provenance, records
from jrl.runs.folder import RunFolder, next_run_path
from jrl.runs.json_lines import restoring_streams, start_json_lines
from jrl.runs.trust import remember
from jrl.text.load import load_tokenizer
from jrl.text.tokenizer import Tokenizer
from moe.config import Model

# What builds and runs a network is imported in the functions, once the flags are known to be right.
if TYPE_CHECKING:
    from jrl.report.compilation import CompilationWatch
    from jrl.trainer.setup.setup import Setup
    from moe.weights import Transformer


def main(arguments: Sequence[str] | None = None, supervisor: Supervisor = UNSUPERVISED) -> int:
    """Runs the command line and returns its exit status."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    with restoring_streams():
        return exit_status(lambda: _main(words, supervisor))


def _main(arguments: list[str], supervisor: Supervisor) -> int:
    options = parse_arguments(arguments)
    options.check_data()
    if options.command.log_json:
        start_json_lines("stderr", process_id)
    start_jax(options.run.devices, options.processes, jax_heartbeat(options.run.hang_deadline))
    if options.command.log_json:
        start_json_lines("stdout", process_id)  # which `start_jax` may replace
    check_same(_shared_settings(options))
    if options.run.lora_from is not None and not options.command.resume:
        from jrl.trainer.setup.adapters import resolve_adapter_settings

        options = replace(options, run=resolve_adapter_settings(options.run))
    if options.run.layout == AUTO:
        options = _with_chosen_layout(options)
    if options.command.dry_run:
        return _dry_run(options)
    if options.command.resume:
        return _resume(options, supervisor)
    return _start_run(options, supervisor)


def _with_chosen_layout(options: TrainOptions) -> TrainOptions:
    """With the layout that the planner chooses, which the run has from here on.

    Task, network and lengths are made for it on a layout of one device, and again for the run.
    """
    from jrl.trainer.setup.network import network_of
    from jrl.trainer.setup.planner import choose_layout

    run, recipe = options.run, options.recipe
    if is_multiprocess():
        raise ValueError(
            f"layout={AUTO!r} is chosen in one process: run one with --dry-run and as many "
            "--devices, and give all processes the layout that it prints."
        )
    no_rollout_layout = dict.fromkeys(("rollout_layout", "rollout_devices", "slots"))
    single_device = replace(run.on_one_mesh(), layout="dp1", **no_rollout_layout)
    # Settings of communication are rejected on one device.
    single_device = replace(single_device, activation_wire=None, overlap_grad_reduce=False)
    on_policy_layout = replace(recipe.divided(1), teacher_layout=None)
    single_device_options = replace(options, run=single_device, recipe=on_policy_layout)
    setup = _build(single_device_options, _open_resumed(options))
    with closing(setup.task):
        devices = jax.device_count() - (run.rollout_devices or 0)
        setup = replace(setup, run=run, model=network_of(setup.model, run))
        layout, reason_line = choose_layout(setup, recipe, devices)
    print(reason_line)
    return replace(options, run=replace(run, layout=str(layout)), recipe=recipe.divided(layout.dp))


def _start_run(options: TrainOptions, supervisor: Supervisor) -> int:
    """A new run. Its folder is made when all that can be seen to be wrong has been looked at."""
    setup = _build_in_all_processes(options)
    with closing(setup.task):
        setup, options = _fit(setup, options)
        weights = [_load_initial_weights(setup)]
        options = replace(options, run=setup.run)  # with the steps that its epochs take
        remember(code_of(options.run, options.recipe).parts)
        with _open(lambda: _create(options)) as folder:
            _save_inputs(setup, folder)
            _print_lengths(setup)
            return _train(setup, folder, weights.pop, supervisor, begins=True)


def _resume(options: TrainOptions, supervisor: Supervisor) -> int:
    """An old run from its last checkpoint; from its beginning if it was killed before the first."""
    from jrl.report.page import write_page
    from jrl.report.plots import plot_run
    from jrl.runs.checkpoints import Checkpoints

    run, config = options.run, to_json(options.run, options.recipe)
    with _open(lambda: RunFolder.resume(options.command.run_dir or "")) as folder:
        folder.set_checkpoint_dir(run.checkpoint_dir)
        checkpoints = Checkpoints(folder.checkpoints_path)
        step = checkpoints.latest_step()
        if step is not None and step >= run.steps and step == checkpoints.latest_valid_step()[0]:
            # It may have been killed between its last checkpoint and its end.
            if is_main_process() and not folder.plots_path.is_dir():
                title = f"{run.task}, {options.recipe.name}"
                plot_run(folder.metrics_path, folder.plots_path, title)
            # The page comes after the plots.
            if is_main_process() and not folder.report_path.is_file():
                write_page([folder], folder.report_path)
            print(f"{folder.path} is finished after {step} steps; --steps may be raised.")
            return 0
        setup = _build_in_all_processes(options, folder)
        with closing(setup.task):
            _fit(setup, options, chooses=False)
            if is_main_process() and folder.config() != config:
                folder.change_config(config)
            _save_inputs(setup, folder)
            weights = [_load_initial_weights(setup) if step is None else None]
            return _train(setup, folder, weights.pop, supervisor, begins=step is None)


def _shared_settings(options: TrainOptions) -> dict[str, Any]:
    """Settings that all processes of a run must have in common."""
    config = to_json(options.run, options.recipe)
    fields = {**config["run"], **config["hyperparameters"]}
    code = options.code or code_of(options.run, options.recipe)
    return {
        "the recipe": config["recipe"],
        "the recipe's file": None if code.recipe is None else short_hash(code.recipe),
        "the files of task and rewards": {
            name: short_hash(content) for name, content in code.files.items()
        },
        "--resume": options.command.resume,
        "--dry-run": options.command.dry_run,
        **{flag(name): value for name, value in fields.items()},
    }


def _dry_run(options: TrainOptions) -> int:
    from jrl.trainer.evaluation.saved_policy import latest_description
    from jrl.trainer.setup.dry_run import print_dry_run

    folder = _open_resumed(options)
    setup = _build_in_all_processes(options, folder)
    with closing(setup.task):
        with RaiseInAllProcesses():
            step, saved = (None, {}) if folder is None else latest_description(folder)
            if folder is not None and step is not None and is_main_process():
                provenance.check_data(setup.data, folder, step, saved)
        # The tables come first, also those of a run that does not fit.
        try:
            setup, _ = _fit(setup, options, chooses=folder is None)
        finally:
            print_dry_run(setup)
    return 0


def _fit(
    setup: "Setup", options: TrainOptions, chooses: bool = True
) -> "tuple[Setup, TrainOptions]":
    """The run with sizes that fit the memory that is free, and its options, which record them;
    raises ValueError if none do."""
    from jrl.trainer.setup.fit import fit, with_settings

    fitted = fit(setup, options.recipe, chooses=chooses)
    if fitted.line and is_main_process():
        print(fitted.line)
    recipe = with_settings(options.recipe, fitted.chosen)
    run = with_settings(options.run, fitted.chosen)
    return fitted.setup, replace(options, recipe=recipe, run=run)


def _open_resumed(options: TrainOptions) -> RunFolder | None:
    """The run to resume, opened for reading; None for a new one."""
    return RunFolder.read(options.command.run_dir or "") if options.command.resume else None


def _build_in_all_processes(options: TrainOptions, folder: RunFolder | None = None) -> "Setup":
    """`_build` in all processes or in none, which are then connected."""
    with RaiseInAllProcesses():
        setup = _build(options, folder)
    connect(setup.mesh)
    connect(setup.rollout_mesh)
    return setup


def _build(options: TrainOptions, folder: RunFolder | None = None) -> "Setup":
    """The fixed parts of the run, looked over; `folder` is that of a run that is being resumed.
    Close its task at the end."""
    from jrl.faults.collect.sampler import import_client, import_psutil
    from jrl.report import exporter
    from jrl.runs.loggers import check_installed
    from jrl.trainer.evaluation.network_files import notes_on_teacher
    from jrl.trainer.evaluation.saved_policy import read_model_config
    from jrl.trainer.setup.elastic import build_elastic_setup
    from moe.placement import specs

    for destination in options.run.log_to:
        check_installed(destination)
    if options.run.faults:
        import_psutil()
    if options.run.faults_port is not None:
        import_client()
    if options.run.metrics_port is not None:
        exporter.import_client()
    model = None if folder is None else read_model_config(folder)
    code = None if options.code is None else options.code.files
    tokenizer = _tokenizer(options.run, folder)
    setup = build_elastic_setup(options.run, options.recipe, tokenizer, model, code)
    try:
        setup.tokenizer.encode(setup.task.characters)
        specs(Model(setup.model, setup.mesh))
        # Files and layouts of the networks are read before the run has a folder; evaluations do
        # not need them.
        _ = setup.critic, setup.frozen
        notes_on_teacher(setup.recipe, setup.run, setup.named_files, setup.tokenizer)
    except BaseException:
        setup.task.close()
        raise
    return setup


def _tokenizer(run: RunConfig, folder: RunFolder | None) -> Tokenizer | None:
    """The tokenizer of the run that is resumed or started from; None makes one as configured."""
    # One that was killed while its folder was being made has none yet.
    if folder is not None and folder.tokenizer_path.exists():
        return load_tokenizer(folder.tokenizer_path)
    if folder is not None and folder.metrics_path.exists():
        raise ValueError(
            f"{folder.tokenizer_path} is missing, which has the token ids of the run: restore it "
            "from a copy of this run or from another run of the same task and tokenizer."
        )
    if run.weights is None:
        return None
    if run.tokenizer is not None:
        raise ValueError(
            f"tokenizer={run.tokenizer!r} cannot be combined with weights={run.weights!r}, which "
            "come with a tokenizer: leave out --tokenizer."
        )
    from jrl.text.prompt_format import with_template

    return with_template(run, load_tokenizer(RunFolder.read(run.weights).tokenizer_path))


def _load_initial_weights(setup: "Setup") -> "Transformer[Array] | None":
    """The policy that --weights asks for, or that of a public checkpoint; None without."""
    from jrl.trainer.evaluation.saved_policy import load_model
    from jrl.trainer.setup.network import lora_of

    if setup.run.weights is None:
        if (directory := setup.run.checkpoint) is None:
            return None
        weights, _ = load_model(directory, Model(setup.model, setup.mesh), masters=True)
        print(f"starting from the checkpoint in {directory}")
        return weights
    folder = RunFolder.read(setup.run.weights)
    lora = None  # the adapters of that run
    if folder.config().get("run", {}).get("lora_rank") is not None:
        lora = lora_of(setup.model, run_of(folder))
    model = replace(setup.model, lora=lora)
    weights, step = load_model(folder, Model(model, setup.mesh), masters=True)
    print(f"starting from {setup.run.weights} after step {step}")
    return weights


def _count_prompts_seen(setup: "Setup") -> int:
    """Training prompts that the policy of --weights has met, where its run drew from the same
    stream: this one goes on after them, or it would ask again what a warm start imitated."""
    from jrl.trainer.evaluation.saved_policy import latest_description, prompts_seen_by

    run = setup.run
    if run.weights is None:
        return 0
    folder = RunFolder.read(run.weights)
    source_run = folder.config().get("run", {})
    same_stream = (source_run.get("task"), source_run.get("seed")) == (run.task, run.seed)
    if not same_stream:
        return 0
    if not provenance.same_records(setup.data, latest_description(folder)[1]):
        print(f"the records of {run.task} are not those of {run.weights}: a new pass begins")
        return 0
    return prompts_seen_by(folder)


def _open(make: Callable[[], RunFolder]) -> RunFolder:
    """The folder of the run, made and locked by the first process; the others only read it."""
    folder = None
    with RaiseInAllProcesses():
        if is_main_process():
            folder = make()
    path = broadcast_from_main(None if folder is None else str(folder.path.absolute()))
    return RunFolder(path) if folder is None else folder


def _save_inputs(setup: "Setup", folder: RunFolder) -> None:
    """Saves the tokenizer, and copies a checkpoint's description of its network: the run can resume
    after the checkpoint was moved."""
    with RaiseInAllProcesses():
        if not is_main_process():
            return
        checkpoint = setup.run.checkpoint
        if checkpoint is not None and not folder.model_path.exists():
            # Tokenizer and license are those of the weights.
            source = setup.run.weights
            origin = Path(checkpoint) if source is None else RunFolder(source).origin_path
            folder.origin_path.mkdir(exist_ok=True)
            if setup.run.tokenizer is None:
                from jrl.text.checkpoint_files import copy_checkpoint_files

                copy_checkpoint_files(origin, folder.origin_path)
            write_license(folder.origin_path, license_in(origin))
            options = (Path(checkpoint) / "config.json").read_bytes()
            if ignored := setup.run.ignore_options:
                named = json.loads(options)
                options = json.dumps({k: v for k, v in named.items() if k not in ignored}).encode()
            records.replace(folder.model_path, options)
        setup.tokenizer.save(folder.tokenizer_path)
        path = shlex.quote(str(folder.settings_path))
        comment = f"repeats this run: {program('train')} --config {path}"
        config = drop_idle(folder.config(), type(setup.recipe))
        records.replace(folder.settings_path, settings_text(config, comment).encode())


def _print_lengths(setup: "Setup") -> None:
    """Prints the size of a fine-tuning dataset, the prompts that were left out and the tokens that
    end a turn, where there are any; and the maximum completion length, where the user set none and
    answers do not tell how long reasoning is."""
    from jrl.tasks.data.files import KINDS
    from jrl.trainer.evaluation.network_files import notes_on_teacher
    from jrl.trainer.setup.dry_run import turn_ends
    from jrl.trainer.setup.lengths import describe_lists, response_origin

    if not is_main_process():
        return
    run, length = setup.run, setup.response_length
    if setup.rows is not None:
        print("\n".join(setup.rows.describe(setup.task)))
    for line in describe_lists(setup.task, setup.prompts_dropped, setup.prompt_length):
        print(line)
    if (ends := turn_ends(setup)) is not None:
        print(ends)
    notes = notes_on_teacher(setup.recipe, setup.run, setup.named_files, setup.tokenizer)
    for line in notes:
        print(line)
    answers_are_results = run.checkpoint is not None or run.task.partition(":")[0] in KINDS
    if setup.rows is None and run.response_length is None and answers_are_results:
        print(f"completions of at most {length:,} tokens: {response_origin(run, length)}")


def _create(options: TrainOptions) -> RunFolder:
    """The requested folder, or the next with a number."""
    config, code = to_json(options.run, options.recipe), code_of(options.run, options.recipe)
    path = options.command.run_dir or next_run_path(options.recipe.name, options.run.task)
    return RunFolder.create(path, config, code.recipe, code.files)


def _train(
    setup: "Setup",
    folder: RunFolder,
    weights: "Callable[[], Transformer[Array] | None]",
    supervisor: Supervisor,
    begins: bool,
) -> int:
    """Trains to the end from weights that no caller keeps; `begins` is false for a run that
    continues from a checkpoint."""
    from jrl.trainer.loop import train
    from jrl.trainer.setup.adapters import load_initial_adapters
    from jrl.trainer.setup.network import buffers_explained, dispatch_explained
    from moe.implementations import explain_selections

    adapters, prompts_seen = None, 0
    if begins:
        adapters, prompts_seen = load_initial_adapters(setup), _count_prompts_seen(setup)
    resume = f"{program('train')} --resume --run-dir {shlex.quote(str(folder.path))}"
    explanation = dispatch_explained(Model(setup.model, setup.mesh), setup.run)
    if is_main_process():
        # Of experts on other devices, if the user chose none.
        if explanation is not None:
            print(f"dispatch {explanation}")
        if (buffers := buffers_explained(setup.model, setup.run)) is not None:
            print(f"buffer_factor {buffers}")
        for line in explain_selections(Model(setup.model, setup.mesh)):
            print(line)
    print(f"run folder: {folder.path}", flush=True)
    try:
        with _compilation_watch(setup) if is_main_process() else nullcontext():
            outcome = train(setup, folder, weights, adapters, prompts_seen, supervisor)
    except KeyboardInterrupt:
        exit_without_waiting(INTERRUPTED)
        print(f"interrupted; resume from the last checkpoint with: {resume}", file=sys.stderr)
        return INTERRUPTED
    if outcome.drained is not None:
        print(f"{outcome.drained}; resume without that machine with: {resume}")
        return DRAINED
    if outcome.saved and is_main_process():
        print(summarize_run(folder))
    if not outcome.saved:
        print(f"stopped in the warm start, before the first checkpoint; restart with: {resume}")
    elif outcome.stopped:
        print(f"stopped after step {outcome.step} of {setup.run.steps}; resume with: {resume}")
    return INTERRUPTED if outcome.interrupted else 0


def _compilation_watch(setup: "Setup") -> "CompilationWatch":
    """Watch with the durations of the last run with these networks, sizes and devices."""
    from jrl.report.compilation import CompilationWatch, Durations

    recipe, device = setup.recipe, jax.devices()[0].device_kind
    names = None if recipe.uses_critic else {"update": "the policy update"}
    sizes = (setup.prompt_length, setup.response_length, recipe.prompts, recipe.group_size)
    batches = (recipe.mini_batch, recipe.micro_batch, setup.run.slots)
    kind = f"{setup.model} {sizes} {batches} {recipe.name} {setup.run.layout} {device}"
    return CompilationWatch(durations=Durations(short_hash(kind.encode())), names=names)


if __name__ == "__main__":
    sys.exit(main())
