"""Outputs of a run: metrics, samples, loggers, the progress display and the final report page."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Array

from jrl.config.run import RunConfig
from jrl.faults.collect.fleet import Alarm
from jrl.processes.agreement import is_main_process, to_host
from jrl.recipes.base.recipe import Recipe
from jrl.report import suspicion
from jrl.report.display import TrainingDisplay, print_samples
from jrl.report.metrics import check_defined
from jrl.report.page import draw_or_warn, write_page
from jrl.report.plots import plot_run
from jrl.report.suspicion import Lookout
from jrl.report.warnings import FewWarnings
from jrl.rollout.answer_statistics import is_disputed
from jrl.rollout.collection.collect import sampling_of, shown_rows
from jrl.rollout.sampler import Completion, Sampler, numbered_heldout
from jrl.runs import loggers
from jrl.runs.folder import RunFolder
from jrl.runs.records import Appender, read_metrics, read_samples
from jrl.text.prompt_format import PromptFormat
from jrl.trainer.evaluation.evaluate import heldout_examples
from jrl.trainer.setup.setup import Setup
from jrl.trainer.state import TrainState
from jrl.trainer.step import NonFinite, RolloutStepResult
from jrl.trainer.summary import single_turn_answers

NUM_SHOWN = 4
"""Held-out prompts shown before and after, and completions per step in samples.jsonl."""
TOTALS = {
    "training/total_tokens": "training/tokens",
    "training/nonfinite_skipped_total": "training/nonfinite_skipped",
    "training/empty_skipped_total": "training/empty_skipped",
}
"""Metrics that are sums over all steps, and the metric of a step that each adds up."""


def appender(path: Path) -> Appender:
    """Opens a file of the run for appending lines, which only the first process writes."""
    return Appender(path if is_main_process() else os.devnull)


@dataclass
class Outputs:
    """Open files, loggers and the display of a run."""

    metrics: Appender
    samples: Appender
    loggers: list[loggers.Logger]
    display: TrainingDisplay
    recipe_metrics: Mapping[str, str]
    totals: dict[str, float]
    drifted: bool
    lookout: Lookout = field(default_factory=Lookout)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for total, name in TOTALS.items():
            self.totals[total] += metrics[name]
        metrics |= self.totals
        check_defined(metrics, self.recipe_metrics)
        self.metrics.append(step, metrics)
        for logger in self.loggers:
            logger.log(step, metrics)
        self.display.update(step, metrics)

    def warn(self, alarms: list[Alarm]) -> None:
        for alarm in alarms:
            self.display.alarm(alarm.describe())

    def warn_of_drift(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows an alarm at the first step of a drift of the sampler from the trainer."""
        if "sampling/drift_alarm" not in metrics:
            return
        before, self.drifted = self.drifted, metrics["sampling/drift_alarm"] > 0
        if self.drifted and not before:
            kl = metrics["sampling/k3_kl"]
            self.display.alarm(
                f"step {step}: the sampler has drifted from the trainer: sampling/k3_kl is "
                f"{kl:.3g} nats, more than --drift-alarm allows"
            )

    def warn_of_suspicion(self, step: int, metrics: dict[str, float]) -> bool:
        """Shows an alarm if the run is suspicious for the first time, and returns true then; adds
        ``reward/suspicion`` to the metrics of each step with scores."""
        reasons = self.lookout.check(metrics)
        if suspicion.SCORE in metrics:
            metrics[suspicion.NAME] = float(bool(reasons))
        if not reasons or self.lookout.suspected:
            return False
        self.lookout.suspected = True
        self.display.alarm(
            f"step {step}: {reasons[0]}. Check its samples of kind suspicious for reward hacking: "
            "answers that the verifier accepts and you would not."
        )
        return True

    def write_suspicious(self, format: PromptFormat, step: int, result: RolloutStepResult) -> None:
        """Writes completions with full marks, those first whose full marks a second check
        disputes."""

        def is_undisputed(completion: Completion) -> bool:
            return not any(map(is_disputed, single_turn_answers([completion])))

        correct = [each for each in result.collected.completions if each.correct]
        by_prompt: dict[int, Completion] = {}
        for completion in sorted(correct, key=is_undisputed):
            by_prompt.setdefault(completion.trajectory.request.prompt, completion)
        for completion in list(by_prompt.values())[:NUM_SHOWN]:
            self.samples.append(step, {"kind": "suspicious", **completion.record(format)})

    def write_samples(self, format: PromptFormat, step: int, result: RolloutStepResult) -> None:
        completions = result.collected.completions
        for row in shown_rows(completions, NUM_SHOWN):
            record = {"kind": "training", **completions[row].record(format)}
            if row in result.tokens:
                record["tokens"] = result.tokens[row].record(format.tokenizer)
            self.samples.append(step, record)


def write_heldout_samples(
    setup: Setup,
    sampler: Sampler,
    state: TrainState[Array],
    lines: Appender,
    evaluated: Sequence[dict[str, Any]] = (),
) -> None:
    """Writes completions of a few held-out prompts to samples.jsonl.

    Args:
      evaluated: records of completions that an evaluation of this state has sampled, of the first
        prompts; if they are too few, completions are sampled.
    """
    examples, records = numbered_heldout(heldout_examples(setup.task, NUM_SHOWN)), evaluated
    if len(records) < len(examples):
        sampler.engine.load(state.policy.weights, int(state.step))
        completions = sampler.sample(examples, sampling_of(setup.recipe), 1)
        records = [completion.record(setup.format) for completion in completions]
        sampler.engine.release()  # before a checkpoint copies the state
    for record in records:
        lines.append(int(state.step), {"kind": "heldout", **record})


@contextmanager
def open_outputs(run: RunConfig, recipe: Recipe, folder: RunFolder, step: int) -> Iterator[Outputs]:
    """Context manager of the outputs of a run that continues after `step`."""
    history = read_metrics(folder.metrics_path) if is_main_process() else []
    rewards = [line["critic/score/mean"] for line in history if "critic/score/mean" in line]
    last = history[-1] if history else {}
    with ExitStack() as stack:
        extra: list[loggers.Logger] = []
        for name in run.log_to if is_main_process() else ():
            logger = loggers.open_logger(name, folder, step)
            stack.callback(logger.close)
            extra.append(logger)
        # Totals and the drift continue from the last line, as they are in no checkpoint.
        yield Outputs(
            metrics=stack.enter_context(appender(folder.metrics_path)),
            samples=stack.enter_context(appender(folder.samples_path)),
            loggers=extra,
            display=stack.enter_context(TrainingDisplay(run.steps, step, rewards)),
            recipe_metrics=recipe.metrics,
            totals={name: last.get(name, 0.0) for name in TOTALS},
            drifted=last.get("sampling/drift_alarm", 0.0) > 0,
            lookout=Lookout(history),
        )


def save_nonfinite(folder: RunFolder, name: str, skipped: NonFinite) -> None:
    """Saves the batch of a skipped update as plain arrays in an .npz file."""
    path = folder.path / "nonfinite" / f"{name}.npz"
    # A collective: all processes copy to the host, and the first one writes.
    batch = to_host(skipped.batch)
    arrays = {name: value for name, value in vars(batch).items() if value is not None}
    arrays |= {"loss": skipped.loss, "grad_norm": skipped.grad_norm}
    if is_main_process():
        path.parent.mkdir(exist_ok=True)
        np.savez(path, allow_pickle=False, **arrays)


def finish(folder: RunFolder, title: str, stopped: bool, warnings: FewWarnings) -> None:
    """Writes the final plots and the report page, and prints completions before and after."""
    draw_or_warn(lambda: plot_run(folder.metrics_path, folder.plots_path, title=title), warnings)
    draw_or_warn(lambda: write_page([folder], folder.report_path), warnings)
    if stopped:
        return
    # Read back, as the completions before training may have been sampled by an earlier process.
    shown = [line for line in read_samples(folder.samples_path) if line["kind"] == "heldout"]
    if not shown:
        raise ValueError(f"{folder.samples_path} has no samples of kind heldout: lines were lost")
    before = [line for line in shown if line["step"] == shown[0]["step"]]
    after = [line for line in shown if line["step"] == shown[-1]["step"]]
    print_samples(before, after)
