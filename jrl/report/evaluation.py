"""Terminal output of evaluations: progress, results, and first against last results of a run."""

import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box, progress
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jrl.program import program
from jrl.report import compilation
from jrl.report.display import printable, score_mark
from jrl.report.metrics import always_zero
from jrl.runs.folder import RunFolder

MAX_LINES = 10
"""Maximum number of progress lines per phase, if there is no terminal."""
FIRST_WAIT, MAX_WAIT, WAIT_GROWTH = 10.0, 300.0, 1.5
"""Seconds since the last line after which one is printed: initially, at most, and growth factor;
the first completions may take long."""
MAX_CHARACTERS = 600
"""Maximum number of characters shown; a longer text is shortened in its middle."""
StepMetrics = Mapping[str, float | int]
MODES = "sampled", "greedy"


class _CompilationColumn(progress.ProgressColumn):
    """The program that is being compiled."""

    def render(self, task: progress.Task) -> Text:
        line = None if task.finished else compilation.current_line()
        return Text(line or "", style="dim")


class _TokensColumn(progress.ProgressColumn):
    """Number of tokens sampled in each phase, by its name."""

    def __init__(self, phases: "dict[str, _Phase]"):
        super().__init__()
        self._phases = phases

    def render(self, task: progress.Task) -> Text:
        return Text(self._phases[task.description].tokens_line)


class _Phase:
    """Progress of a phase: completions, tokens of those sampled in all phases, and seconds."""

    def __init__(self, tokens: Callable[[], int]):
        self._tokens, self._before, self._begun = tokens, tokens(), time.monotonic()
        self._end: tuple[int, float] | None = None
        self.done, self.total, self.printed = 0, 0, 0

    def update(self, done: int, total: int) -> None:
        self.done, self.total = done, total
        # Later phases continue the count.
        self._end = (self.tokens, self.seconds) if done == total else None

    @property
    def tokens(self) -> int:
        return self._tokens() - self._before if self._end is None else self._end[0]

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun if self._end is None else self._end[1]

    @property
    def tokens_line(self) -> str:
        tokens = self.tokens
        return f"{tokens:,} tokens" if tokens else ""

    def line(self, name: str) -> str:
        fields = f"{self.done}/{self.total} completions", self.tokens_line, f"{self.seconds:.1f} s"
        return f"{name}: {', '.join(field for field in fields if field)}"


class EvaluationDisplay:
    """Progress of the phases of an evaluation, in completions done and in total.

    If there is no terminal, a line is printed for every tenth of a phase and, until a completion is
    finished, after ten seconds and then at growing intervals.

    Args:
      console: target of the display; standard output by default.
      tokens: returns the number of tokens sampled so far, in any thread; None shows no tokens.
      wait: seconds since the last line after which one is printed.
    """

    def __init__(
        self,
        console: Console | None = None,
        tokens: Callable[[], int] | None = None,
        wait: float = FIRST_WAIT,
    ):
        self._console = console or Console()
        self._tokens = tokens or (lambda: 0)
        self._progress: progress.Progress | None = None
        self._bars: dict[str, progress.TaskID] = {}
        self._phases: dict[str, _Phase] = {}
        self._wait, self._last_printed = wait, 0.0
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None

    def update(self, phase: str, done: int, total: int) -> None:
        """Show the number of completions of a phase that are decoded and verified."""
        with self._lock:
            is_new = phase not in self._phases
            if is_new:
                self._phases[phase] = _Phase(self._tokens)
                if self._progress is not None:
                    self._bars[phase] = self._progress.add_task(phase, total=total)
            current = self._phases[phase]
            current.update(done, total)
            if self._progress is not None:
                self._progress.update(self._bars[phase], completed=done)
            elif is_new or done == total or done - current.printed >= total / MAX_LINES:
                current.printed = done
                self._print(phase)

    def _print(self, phase: str) -> None:
        # Not through the console, which would cut the line at 80 columns.
        print(self._phases[phase].line(phase), file=self._console.file, flush=True)
        self._last_printed = time.monotonic()

    def _remind(self) -> None:
        """Prints the line of the current phase at growing intervals, until the end."""
        wait = self._wait
        while not self._ended.wait(wait):
            with self._lock:
                phase = next(reversed(self._phases), None)
                if phase is None or self._phases[phase].done == self._phases[phase].total:
                    continue
                if time.monotonic() - self._last_printed >= wait:
                    self._print(phase)
                    wait = min(WAIT_GROWTH * wait, MAX_WAIT)

    def __enter__(self) -> "EvaluationDisplay":
        if self._console.is_terminal:
            self._progress = progress.Progress(
                progress.SpinnerColumn(),
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TextColumn("completions"),
                _TokensColumn(self._phases),
                progress.TimeElapsedColumn(),
                _CompilationColumn(),
                console=self._console,
            )
            self._progress.start()
            compilation.set_drawing(self, True)
        else:
            self._thread = threading.Thread(
                target=self._remind, name="jrl evaluation display", daemon=True
            )
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        if self._progress is not None:
            compilation.set_drawing(self, False)
            self._progress.stop()
            self._progress = None


def print_results(results: Mapping[str, Any]) -> None:
    """Print the results of `jrl.trainer.evaluation.evaluate`, with the evaluated run
    and task."""
    console = Console()
    # Not through the console, which would cut lines at 80 columns.
    print("{run}: {recipe} on {task}, step {step}".format(**results), file=console.file)
    print(_prompts(results), file=console.file)
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
        table.add_row("prompts dropped as too long", f"{results['prompts_dropped']}")
    table.add_row("mean length", f"{results['response_length/mean']:.2f} tokens")
    table.add_row("truncated by the length limit", f"{results['response_length/clip_ratio']:.1%}")
    total = results["prompts"] * results["k"]
    for name in results:
        if name.startswith("verifier/") and results[name]:
            reason = f"verdict: {name.removeprefix('verifier/')}"
            table.add_row(reason, f"{results[name] / total:.1%}")
    for name in results:
        if name.startswith("critic/"):
            table.add_row(name.removeprefix("critic/"), f"{results[name]:.3f}")
    console.print(table)


def print_completions(records: Sequence[Mapping[str, Any]]) -> None:
    """Print completions, records of a file of samples, with prompts, answers and verdicts."""
    console = Console()
    if not records:
        return
    table = Table(box=box.ROUNDED, title="Completions", show_lines=True)
    for heading in ("prompt", "answer", "completion", ""):
        table.add_column(heading, overflow="fold", no_wrap=heading == "")
    for record in records:
        texts = [record[name] for name in ("prompt", "answer", "completion")]
        verdict = Text.assemble(score_mark(record, console), "\n", record["reason"])
        table.add_row(*(printable(_shorten(text), console) for text in texts), verdict)
    console.print(table)


def _prompts(results: Mapping[str, Any]) -> str:
    """Line about the evaluated prompts: their number, the number available, and the sampling."""
    evaluated, available = results["prompts"], results["prompts_there"]
    held_out = "" if results["everything"] else "held-out "
    count_text = f"{evaluated:,}"
    if available is not None:
        count_text = (
            f"all {count_text}" if evaluated == available else f"{count_text} of {available:,}"
        )
    sampling = "{k} completions each at temperature {temperature}".format(**results)
    return f"{count_text} {held_out}prompts, {sampling}"


def _shorten(text: str) -> str:
    if len(text) <= MAX_CHARACTERS:
        return text
    half = MAX_CHARACTERS // 2
    return f"{text[:half]} ... {text[-half:]}"


def summarize_run(folder: RunFolder) -> str:
    """The held-out metrics of the first and the last evaluation, and the paths of the pages."""
    lines = folder.metrics()
    summary = _summarize_supervised(lines, folder) or _summarize_rewards(lines, folder)
    plots, page = folder.plots_path / "overview.png", folder.report_path
    zeros = [
        f"reward {name} was 0 in every completion: look at samples.jsonl, or at its function"
        for name in always_zero(lines)
    ]
    return "\n".join([summary[0], *zeros, f"plots: {plots}", f"page:  {page}", summary[1]])


def first_evaluation(metrics: StepMetrics) -> str:
    """Line about the evaluation of a policy before its first step."""
    if "val/nll" in metrics:
        line = f"loss {metrics['val/nll']:.3f} nats a token on held-out conversations"
    else:
        accuracies = (f"{mode} {metrics[f'val/accuracy/{mode}']:.3f}" for mode in MODES)
        line = f"held-out accuracy {', '.join(accuracies)}"
        if _differ(metrics):
            scores = (f"{mode} {metrics[f'val/score/{mode}']:.3f}" for mode in MODES)
            line += f"; score {', '.join(scores)}"
    return f"before the first step: {line} ({metrics['timing_s/testing']:.1f} s)"


def _summarize_rewards(lines: Sequence[StepMetrics], folder: RunFolder) -> tuple[str, str]:
    evaluations = [line for line in lines if "val/accuracy/sampled" in line]
    first, last = evaluations[0], evaluations[-1]
    start = "warm start" if "warm_start/steps" in first else "start"
    line = f"held-out accuracy, {start} -> step {last['step']}: {_changes(first, last, 'accuracy')}"
    if _differ(first) or _differ(last):
        line += f"; score: {_changes(first, last, 'score')}"
    return line, f"more:  {program('evaluate')} {_path(folder)} --k 8"


def _changes(first: StepMetrics, last: StepMetrics, quantity: str) -> str:
    names = {mode: f"val/{quantity}/{mode}" for mode in MODES}
    return ", ".join(f"{mode} {first[n]:.3f} -> {last[n]:.3f}" for mode, n in names.items())


def _differ(metrics: StepMetrics) -> bool:
    """True if scores say more than accuracy, as of a task that gives partial marks."""
    pairs = ((metrics[f"val/{each}/{mode}"] for each in ("score", "accuracy")) for mode in MODES)
    return any(f"{score:.3f}" != f"{accuracy:.3f}" for score, accuracy in pairs)


def _summarize_supervised(
    lines: Sequence[StepMetrics], folder: RunFolder
) -> tuple[str, str] | None:
    """Summary of a supervised run; None for a run of reinforcement learning."""
    evaluations = [line for line in lines if "val/nll" in line]
    if not evaluations:
        return None
    first, last = evaluations[0], evaluations[-1]
    model = str(folder.config()["run"]["model"])
    changes = [
        f"loss {first['val/nll']:.3f} -> {last['val/nll']:.3f} nats a token",
        f"perplexity {first['val/perplexity']:.4g} -> {last['val/perplexity']:.4g}",
        f"tokens right {first['val/token_accuracy']:.1%} -> {last['val/token_accuracy']:.1%}",
    ]
    return (
        f"held-out conversations, start -> step {last['step']}: {', '.join(changes)}",
        f"next:  {program('train')} grpo --model {shlex.quote(model)} --weights {_path(folder)} "
        "--task ...",
    )


def _path(folder: RunFolder) -> str:
    return shlex.quote(str(folder.path))
