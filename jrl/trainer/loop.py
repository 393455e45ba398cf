"""Training loop of a run: warm start, steps, evaluation, checkpoints and logs."""

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import jax
from jaxtyping import Array

from jrl.config.run import RunConfig
from jrl.faults.collect.sampler import local_gpus
from jrl.faults.guard import (
    DETECTION_INTERVAL,
    Attachment,
    Drainer,
    Guard,
    machine_name,
    metrics_of,
)
from jrl.faults.settings import DRAIN
from jrl.faults.standard import StandardDetector
from jrl.faults.watcher import Hook, command_hook
from jrl.processes.agreement import (
    RaiseInAllProcesses,
    any_of,
    broadcast_from_main,
    gather,
    is_main_process,
    is_multiprocess,
)
from jrl.processes.allocator import return_free_memory
from jrl.processes.coordinator import KeyValueStore, exit_after, exit_now
from jrl.processes.progress import begin_step, phase
from jrl.processes.stopping import UNSUPERVISED, Stop, Supervisor
from jrl.processes.watchdog import Watchdog, WatchdogSettings
from jrl.program import program
from jrl.report.display import WarmStartDisplay
from jrl.report.evaluation import first_evaluation
from jrl.report.exporter import RunExporter
from jrl.report.metrics import check_defined
from jrl.report.page import LivePage, write_page
from jrl.report.warnings import FewWarnings
from jrl.rollout.collection.collect import sampling_of
from jrl.rollout.sampler import Completion, Sampler
from jrl.runs import provenance
from jrl.runs.checkpoints import Checkpoints, CheckpointSchedule
from jrl.runs.folder import RunFolder
from jrl.runs.loggers import Logger
from jrl.trainer.ahead import compile_ahead
from jrl.trainer.evaluation.evaluate import heldout_examples, heldout_metrics
from jrl.trainer.evaluation.network_files import load_network_files
from jrl.trainer.learner.learner import Learner
from jrl.trainer.outputs import (
    NUM_SHOWN,
    Outputs,
    appender,
    finish,
    open_outputs,
    save_nonfinite,
    write_heldout_samples,
)
from jrl.trainer.profiler import Profiler
from jrl.trainer.resources import Resources
from jrl.trainer.setup.adapters import write_adapters, write_card
from jrl.trainer.setup.elastic import restart_without
from jrl.trainer.setup.setup import Setup
from jrl.trainer.state import TrainState, init_adapters, init_state, init_weights, restore, save
from jrl.trainer.step import SAMPLES_TIMING, RolloutStepResult, StepResult, train_step
from jrl.trainer.summary import drift_alarm
from jrl.trainer.supervised import (
    Supervised,
    WarmStartStopped,
    prompts_imitated,
    shortfall,
    warm_start,
)
from jrl.trainer.token_records import TokenLogConfig
from moe.config import Model
from moe.disaggregated.split import devices_of
from moe.weights import Transformer

END_SECONDS = 20.0
"""Most seconds for the cleanup of a process that the watchdog ends."""
InitialWeights = Transformer[Array] | Callable[[], Transformer[Array] | None] | None
"""Policy to start from, or a function that hands it over: the state has a copy of what it trains,
and a caller that keeps the weights has them in memory for the whole run."""
OnStep = Callable[[int, Mapping[str, float]], None]
"""Callback with a step and its metrics."""


class NonFiniteRun(RuntimeError):
    """Raised when too many updates in a row had a loss or gradient that was not finite."""


@dataclass(frozen=True)
class Outcome:
    """Result of a run.

    Attributes:
      step: steps done.
      stopped: true if a signal or an alarm ended it early.
      saved: true if there is a checkpoint; false for a run that was stopped in its warm start.
      interrupted: true if a person stopped it, by Ctrl-C.
      drained: the alarm that ended it, in a line; None if none did.
    """

    step: int
    stopped: bool
    saved: bool = True
    interrupted: bool = False
    drained: str | None = None


def train(
    setup: Setup,
    folder: RunFolder,
    weights: InitialWeights = None,
    adapters: Transformer[Array] | None = None,
    prompts_seen: int = 0,
    supervisor: Supervisor = UNSUPERVISED,
    on_fault: Hook | None = None,
    on_step: OnStep = lambda step, metrics: None,
) -> Outcome:
    """Trains from the last checkpoint in `folder`, or from the start if there is none.

    Args:
      setup: the constant parts of the run.
      folder: run folder for all outputs; locked by the caller.
      weights: a policy to start from; None starts fresh, with the warm start.
      adapters: of a policy with adapters, to start from; None starts with fresh ones.
      prompts_seen: training prompts that the policy in `weights` was trained on; the run starts
        after them.
      supervisor: of the run's processes; it may ask for a checkpoint after a step.
      on_fault: called with each alarm of a run with `faults`, in the watcher's thread, before the
        run's own command.
      on_step: called with each step and its metrics when they are written, in the first process;
        in a new run also with step 0, the warm start and the first evaluation.

    Raises:
      NonFiniteRun: when updates keep being skipped.
    """
    return_free_memory()  # of the tokenizer and of the checkpoint's files
    resources, warnings = Resources(), FewWarnings()
    run, sampler, networks = setup.run, setup.sampler(), setup.networks
    # Two stages with the same methods.
    stage = Supervised(setup, sampler) if setup.recipe.supervised else Reinforcement(setup, sampler)
    if is_main_process():
        folder.write_versions(f"{jax.device_count()} x {jax.devices()[0].device_kind}")

    def description(files: Mapping[str, Any]) -> dict[str, Any]:
        described = provenance.describe(setup.settings, setup.data, folder)
        return described | ({"networks": files} if files and described else {})

    with ExitStack() as stack:
        watchdog = stack.enter_context(_watchdog(setup, folder))
        stop = stack.enter_context(Stop(setup.task.close))
        profiler = stack.enter_context(
            Profiler(folder.profiles_path, run.profiled_steps, run.profile_steps)
        )
        guard = stack.enter_context(Guard(_attachment(setup.run, folder, on_fault)))
        drainer = _drainer(setup, folder)
        monitors = _monitors(setup, folder, watchdog, stack)
        # Within the watchdog and the signals: a save in flight is completed while both are there.
        checkpoints = stack.enter_context(
            Checkpoints(folder.checkpoints_path, run.keep_checkpoints)
        )
        state, files = _restored_state(setup, folder, checkpoints)
        begins = state is None
        imitates = begins and weights is None and run.warm_start_steps > 0
        stack.enter_context(compile_ahead(setup, sampler, imitates, begins))
        if state is not None:
            resources.resume(folder.metrics_path)
        else:
            _discard_unsaved(folder)
        page = stack.enter_context(LivePage(partial(_draw_page, folder), warnings))
        if state is None:
            loaded, files = load_network_files(networks, setup.network_files)
            try:
                state, metrics = _first_state(
                    setup, sampler, weights, adapters, prompts_seen, stop, loaded
                )
            except WarmStartStopped:
                return Outcome(0, stopped=True, saved=False, interrupted=_interrupted(stop))
            if is_main_process():
                print("evaluating the policy before the first step ...", flush=True)
            with phase("evaluation"):
                metrics |= stage.evaluate(state) | stage.data_metrics()
            with appender(folder.metrics_path) as lines:
                metrics |= resources.metrics()
                check_defined(metrics)
                lines.append(0, metrics)
            if is_main_process():
                print(first_evaluation(metrics), flush=True)
                on_step(0, metrics)
            with appender(folder.samples_path) as lines, phase("evaluation"):
                write_heldout_samples(setup, sampler, state, lines, stage.evaluated)
            page.step_ended(evaluated=True)
            # A run killed in its first steps need not repeat its warm start.
            save(checkpoints, networks, state, description(files))
            # Before the first line of a step: a run killed without checkpoint would begin again.
            checkpoints.wait()
        # After the folder was reset to the checkpoint: totals continue from its last line.
        outputs = stack.enter_context(open_outputs(run, setup.recipe, folder, int(state.step)))
        outputs.loggers.extend(monitors)
        schedule = CheckpointSchedule(run.checkpoint_every, run.checkpoint_minutes)
        # Processes stop together: one that left alone would block the others in a collective.
        while int(state.step) < run.steps and not any_of(bool(stop) or drainer.requested):
            # A signal ends the run after this step, never during an update.
            stop.doing = f"finishing step {int(state.step) + 1} and saving it"
            begin_step(int(state.step) + 1)
            profiler.begin_step(int(state.step) + 1)
            started = time.perf_counter()
            state, result = stage.step(state)
            step, metrics = int(state.step), result.metrics
            # Samples for people and evaluation are not part of the step's time.
            seconds = time.perf_counter() - started - metrics.get(SAMPLES_TIMING, 0.0)
            metrics |= _throughput_metrics(setup, metrics["training/tokens"], seconds)
            if is_evaluated := _is_evaluated(run, step):
                with phase("evaluation"):
                    metrics |= stage.evaluate(state)
            metrics |= resources.metrics()
            guard.step_ended(seconds)
            alarms = guard.alarms()
            metrics |= metrics_of(alarms) | drift_alarm(metrics, run.drift_alarm)
            outputs.warn(alarms)
            if run.on_fault == DRAIN and step < run.steps:
                refusal = drainer.consider(alarms, guard.fleet)
                if refusal is not None:
                    outputs.display.alarm(refusal)
            outputs.warn_of_drift(step, metrics)
            if outputs.warn_of_suspicion(step, metrics) and isinstance(result, RolloutStepResult):
                outputs.write_suspicious(setup.format, step, result)
            if step % run.samples_every == 0:
                stage.write_samples(outputs, state, result)
            # Lines are written before the checkpoint that records them: after a kill in between,
            # resuming drops them and writes them again, bitwise identical.
            outputs.log(step, metrics)
            page.step_ended(is_evaluated)
            if is_main_process():
                on_step(step, metrics)
            for index, skipped_update in enumerate(result.nonfinite):
                save_nonfinite(folder, f"{step}-{index}-{skipped_update.network}", skipped_update)
            # Before the last checkpoint, like all lines: it records the offsets of all files.
            if step == run.steps:
                with phase("evaluation"):
                    write_heldout_samples(setup, sampler, state, outputs.samples, stage.evaluated)
            is_preempted = supervisor.step_ended(step, metrics)
            if schedule.is_due(step) or step == run.steps or is_preempted:
                save(checkpoints, networks, state, description(files))
                schedule.saved()
                if is_preempted:
                    checkpoints.wait()  # this process may end at any time from here on
            # After the checkpoint: a run resumed with a larger --max-nonfinite continues from here.
            _check_finite(state, run.max_nonfinite, folder, checkpoints)
        profiler.close()
        step = int(state.step)
        checkpoints.wait()
        # A signal may end the run between two checkpoints.
        if checkpoints.latest_step() != step:
            save(checkpoints, networks, state, description(files))
            checkpoints.wait()
        drained = _drained(run, drainer, stop, step)
        write_adapters(setup, folder, state.policy.weights, step)
        interrupted = _interrupted(stop)
        if step < run.steps and not _is_evaluated(run, step):
            _evaluate_stopped(stage, state, folder, stop, interrupted)
            write_card(setup, folder, step)  # with that evaluation
        outputs.warn(guard.alarms())  # since the last step: shown, but no line of metrics is left
        watchdog.close()  # loggers may take their time to send the rest
    if is_main_process():
        finish(folder, f"{run.task}, {setup.recipe.name}", step < run.steps, warnings)
    stopped = step < run.steps
    return Outcome(step, stopped, interrupted=stopped and interrupted, drained=drained)


def _is_evaluated(run: RunConfig, step: int) -> bool:
    """True if the line of a step has an evaluation."""
    return step % run.eval_every == 0 or step == run.steps


def _interrupted(stop: Stop) -> bool:
    """True in all processes if one of them was interrupted by Ctrl-C."""
    return any_of(stop.is_interrupted)


def _draw_page(folder: RunFolder) -> None:
    """Draws the page of a run in progress, in the first process."""
    if is_main_process():
        write_page([folder], folder.report_path, running=True)


def _evaluate_stopped(
    stage: "Supervised | Reinforcement",
    state: TrainState[Array],
    folder: RunFolder,
    stop: Stop,
    interrupted: bool,
) -> None:
    """Evaluates a saved policy whose run a person stopped; a machine that ends its programs gives
    them seconds. Says so if the policy is not evaluated."""
    step = int(state.step)
    unknown = f"step {step}, the last one, was not evaluated: {program('evaluate')} RUN does it"
    if not interrupted:
        if is_main_process():
            print(unknown, flush=True)
        return
    stop.doing = f"evaluating step {step}, which is saved"
    if is_main_process():
        print(f"step {step} is saved and evaluated now; Ctrl-C ends the run without", flush=True)
    try:
        with phase("evaluation"):
            metrics = stage.evaluate(state)
    except KeyboardInterrupt:
        print(unknown, flush=True)
        raise
    if is_main_process():
        folder.write_stopped(step, metrics)


class Reinforcement:
    """Reinforcement learning stage: samples completions and trains on their rewards.

    Attributes:
      evaluated: records of completions of the first held-out prompts in the last evaluation.
    """

    def __init__(self, setup: Setup, sampler: Sampler):
        self._setup, self._sampler, self._networks = setup, sampler, setup.networks
        self._heldout = heldout_examples(setup.task, setup.run.eval_prompts)
        self.evaluated = list[dict[str, Any]]()

    def step(self, state: TrainState[Array]) -> tuple[TrainState[Array], StepResult]:
        """Runs one training step."""
        setup, run = self._setup, self._setup.run
        to_show = (int(state.step) + 1) % run.samples_every == 0 and run.sample_tokens > 0
        return train_step(
            self._sampler,
            self._networks,
            state,
            setup.randomness,
            shuffle_rewards=run.shuffle_rewards,
            token_log=TokenLogConfig(NUM_SHOWN, run.sample_tokens) if to_show else None,
        )

    def evaluate(self, state: TrainState[Array]) -> dict[str, float]:
        """Held-out metrics of the policy."""
        # Without statistics of a step: an adaptive temperature stays at its base.
        self._sampler.engine.load(state.policy.weights, int(state.step))

        # Records, which hold no arrays of the engine.
        def keep(completions: list[Completion]) -> None:
            self.evaluated = [c.record(self._setup.format) for c in completions[:NUM_SHOWN]]

        sampling = sampling_of(self._setup.recipe)
        metrics = heldout_metrics(self._sampler, sampling, self._heldout, keep)
        self._sampler.engine.release()  # before a checkpoint copies the state
        return_free_memory()
        return metrics

    def data_metrics(self) -> dict[str, float]:
        """Metrics of the data, once in a run."""
        dropped = self._setup.prompts_dropped
        return {"data/prompts_dropped": float(dropped)} if dropped else {}

    def write_samples(self, outputs: Outputs, state: TrainState[Array], result: StepResult) -> None:
        """Writes samples of a step to samples.jsonl."""
        assert isinstance(result, RolloutStepResult)
        outputs.write_samples(self._setup.format, int(state.step), result)


def _watchdog(setup: Setup, folder: RunFolder) -> Watchdog:
    """Watchdog of this process, which ends it without its main thread."""

    def end(line: str, silent: int) -> None:
        exit_after(END_SECONDS, 1)  # whatever hangs below too
        print(line, file=sys.stderr, flush=True)
        setup.task.close()
        exit_now(1, silent)

    settings = WatchdogSettings(
        process=jax.process_index(),
        num_processes=jax.process_count(),
        host=socket.gethostname(),
        stacks=folder.stacks_path,
        deadline=setup.run.hang_deadline,
    )
    store = KeyValueStore(f"progress/{next(_watched)}") if is_multiprocess() else None
    return Watchdog(settings, store, end)


_watched = count()
"""Runs of this process so far; heartbeats of another run are none of this one."""


def _monitors(
    setup: Setup, folder: RunFolder, watchdog: Watchdog, stack: ExitStack
) -> list[Logger]:
    """Endpoint of this process, which is there before the run has compiled anything."""
    run, process = setup.run, jax.process_index()
    if run.metrics_port is None:
        return []
    hosts = gather(socket.gethostname())
    port = run.metrics_port + hosts[:process].count(hosts[process])
    with RaiseInAllProcesses():
        labels = {
            "run": folder.path.name,
            "recipe": setup.recipe.name,
            "task": run.task,
            "process": str(process),
            "devices": str(jax.device_count()),
            **{name.replace("-", "_"): version for name, version in folder.versions().items()},
        }
        monitor = RunExporter(
            port,
            labels,
            run.steps,
            run.step_deadline,
            watchdog.status,
            address=run.metrics_address,
        )
        stack.callback(monitor.close)
        return [monitor]


def _restored_state(
    setup: Setup, folder: RunFolder, checkpoints: Checkpoints
) -> tuple[TrainState[Array] | None, dict[str, Any]]:
    """State of the latest valid checkpoint, to which the run folder is reset, None if there is
    none; and the records of networks from files."""
    step = provenance.find_resume_step(checkpoints)
    if step is None:
        return None, {}
    meta = checkpoints.meta(step)
    loaded, files = load_network_files(
        setup.networks, setup.network_files, meta.get("networks", {})
    )
    state = restore(checkpoints, setup.networks, step, loaded)
    provenance.rewind(setup.settings, setup.data, folder, step, meta)
    return state, files


def _discard_unsaved(folder: RunFolder) -> None:
    """Drops the lines of a run that was killed before its first checkpoint and starts again, with
    the same result. The first process handles files, and an error there stops all others."""
    with RaiseInAllProcesses():
        if is_main_process():
            folder.discard_unsaved()


def _first_state(
    setup: Setup,
    sampler: Sampler,
    initial: InitialWeights,
    adapters: Transformer[Array] | None,
    prompts_seen: int,
    stop: Stop,
    loaded: Mapping[str, Transformer[Array]],
) -> tuple[TrainState[Array], dict[str, float]]:
    """State of a new run, and metrics of its warm start; for the arguments see `train`."""
    metrics: dict[str, float] = {}
    weights = initial() if callable(initial) else initial
    # If no weights are passed, supervised learning makes a policy that is sometimes correct.
    if weights is None:
        # Adapters are added to the weights of the warm start.
        plain = setup.model.without_adapters()
        weights = init_weights(Model(plain, setup.mesh), setup.randomness.key("weights"))
        if setup.run.warm_start_steps:
            stop.doing = "stopping the warm start, whose progress is discarded"
            display = WarmStartDisplay(setup.run.warm_start_steps, setup.run.warm_start_accuracy)
            with phase("warm start"), display:
                weights, metrics = warm_start(
                    setup, sampler, weights, display.update, lambda: any_of(bool(stop))
                )
            if (line := shortfall(setup.run, metrics)) is not None:
                print(line, flush=True)
            # Reinforcement on prompts whose answers were imitated would reward remembering.
            prompts_seen = prompts_imitated(setup.run, int(metrics["warm_start/steps"]))
    stop.doing = "finishing the first evaluation and saving its checkpoint"
    critic_key = setup.randomness.key("critic")
    if setup.model.lora is not None and adapters is None:
        adapters = init_adapters(Model(setup.model, setup.mesh), setup.randomness.key("adapters"))
    state = init_state(setup.networks, weights, critic_key, prompts_seen, adapters, loaded)
    return state, metrics


def _attachment(run: RunConfig, folder: RunFolder, on_fault: Hook | None) -> Attachment | None:
    """Fault monitoring of this process; None in a run without `faults`."""
    if not run.faults:
        return None
    process = jax.process_index()
    hooks = [] if on_fault is None else [on_fault]
    if run.fault_command is not None:
        hooks.append(command_hook(run.fault_command))
    return Attachment(
        folder=folder.path,
        machine=machine_name(socket.gethostname(), process),
        watches=process == 0,
        detector=StandardDetector(continuity=run.faults_continuity),
        gpus=local_gpus([d.local_hardware_id for d in jax.local_devices()], os.environ)
        if jax.local_devices()[0].platform == "gpu"
        else None,
        hooks=tuple(hooks),
        interval=min(DETECTION_INTERVAL, run.faults_continuity),
        port=None if run.faults_port is None else run.faults_port + process,
    )


def _drainer(setup: Setup, folder: RunFolder) -> Drainer:
    """Drains of this run, which its first process decides."""
    run, num_processes = setup.run, jax.process_count()
    plan = None
    if run.min_processes is not None:
        plan = partial(
            restart_without, setup, num_processes=num_processes, minimum=run.min_processes
        )
    return Drainer(folder.path, num_processes, run.drain_every, plan)


def _drained(run: RunConfig, drainer: Drainer, stop: Stop, step: int) -> str | None:
    """The alarm that ended the run, in a line, in all processes; None if none did."""
    # After a signal, whatever sent it decides how the run continues.
    if run.on_fault != DRAIN or step == run.steps or any_of(bool(stop)):
        return None
    with RaiseInAllProcesses():
        line = drainer.write(step) if drainer.requested else None
    return broadcast_from_main(line)


def _throughput_metrics(setup: Setup, tokens: float, seconds: float) -> dict[str, float]:
    """Throughput metrics of a step; `tokens` is the total over all devices and processes."""
    meshes = [setup.mesh, setup.rollout_mesh, *([setup.split.experts] if setup.split else [])]
    num_devices = len({device for mesh in meshes for device in devices_of(mesh)})
    return {
        "perf/time_per_step": seconds,
        "perf/total_num_tokens": tokens,
        "perf/tokens_per_second": tokens / seconds,
        "perf/throughput": tokens / seconds / num_devices,
    }


def _check_finite(
    state: TrainState[Array], max_nonfinite: int, folder: RunFolder, checkpoints: Checkpoints
) -> None:
    for network, learner in state.networks.items():
        skipped = int(learner.skipped_in_a_row) if isinstance(learner, Learner) else 0
        if skipped >= max_nonfinite:
            checkpoints.wait()
            raise NonFiniteRun(
                f"step {int(state.step)}: {skipped} updates of the {network} in a row had a loss "
                "or gradient that is not finite; their batches are in "
                f"{folder.path / 'nonfinite'}. Lower the learning rate, or raise --max-nonfinite "
                "to continue."
            )
