"""Results of an evaluation, and a few of its completions, on the terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jrl.report.display import printable, score_mark

MAX_CHARACTERS = 600
"""Characters of a text that are shown; of a longer one its beginning and its end."""


def print_results(results: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the numbers of `jrl.trainer.evaluation.evaluate`, with what was evaluated."""
    console = console or Console()
    # Not through the console: it would cut lines at 80 columns.
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


def print_completions(records: Sequence[Mapping[str, Any]], console: Console | None = None) -> None:
    """Print completions with their prompts, reference answers and verdicts.

    Args:
      records: as a file of samples has them (`jrl.rollout.sampler.Completion.record`).
      console: where to print; standard output by default.
    """
    console = console or Console()
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
    """Line about the evaluated prompts: their number, of how many, and how they were sampled."""
    evaluated, available = results["prompts"], results["prompts_there"]
    held_out = "" if results["everything"] else "held-out "
    if available is None:
        count_text = f"{evaluated:,}"
    else:
        count_text = (
            f"all {available:,}" if evaluated == available else f"{evaluated:,} of {available:,}"
        )
    sampling = "{k} completions each at temperature {temperature}".format(**results)
    return f"{count_text} {held_out}prompts, {sampling}"


def _shorten(text: str) -> str:
    if len(text) <= MAX_CHARACTERS:
        return text
    half = MAX_CHARACTERS // 2
    return f"{text[:half]} ... {text[-half:]}"
