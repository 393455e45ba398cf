"""Plot of all diagnostics of a critic, one panel each."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jrl.report.critic import BINS, CriticReport, CriticRollout, critic_diagnostics
from jrl.report.plots import (
    BLUE,
    GREEN,
    GRID,
    INK,
    MUTED,
    ORANGE,
    PURPLE,
    create_grid,
    save,
    style_axes,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ALONG = "position in the response"


def plot_diagnostics(
    rollout: CriticRollout,
    path: Path | str,
    title: str | None = None,
    report: CriticReport | None = None,
) -> Path:
    """Draws the diagnostics of one rollout, which must have a token, as a PNG at `path`.

    `report` gives the numbers of the rollout if they are already computed.
    """
    report = critic_diagnostics(rollout) if report is None else report
    figure, grid = create_grid(12, title)
    figure.set_size_inches(20.0, 14.0)
    panels = (
        *(_explained_variance, _bias, _calibration, _bootstrap, _reach, _sensitivity),
        *(_variance, _concentration, _contradiction, _lengths, _negative, _groups),
    )
    for axes, draw in zip(grid, panels, strict=True):
        style_axes(axes, "y")
        axes.tick_params(pad=7)
        draw(axes, rollout, report)
    return save(figure, path)


def _label_panel(axes: "Axes", title: str, note: str, x: str, y: str) -> None:
    """Title, a line of numbers below it, and the labels of the axes."""
    axes.set_title(f"{title}\n", fontsize=14, fontweight="bold", color=INK, loc="left", pad=8)
    note_text = axes.text(0, 1.03, note, transform=axes.transAxes, fontsize=11, color=MUTED)
    # Neither affects the layout: both are drawn above their own panel.
    for text in (note_text, *axes.texts, axes.title):
        text.set_in_layout(False)
    axes.set_xlabel(x, fontsize=12, color=MUTED)
    axes.set_ylabel(y, fontsize=12, color=MUTED)


def _bin_centers(axes: "Axes") -> np.ndarray:
    """Centres of the bins of the position in a response, with the axis that shows them."""
    axes.set_xlim(0, 1)
    axes.set_xticks([0, 0.5, 1], ["start", "middle", "end"])
    return (np.arange(BINS) + 0.5) / BINS


def _percent(axes: "Axes", top: float | None = 1.0) -> None:
    from matplotlib.ticker import PercentFormatter

    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_ylim(0, top)


def _legend(axes: "Axes") -> None:
    axes.legend(frameon=False, labelcolor=INK, fontsize=11)


def _bars(
    axes: "Axes", names: list[str], heights: list[float], colours: list[str], form: str = "{:.0%}"
) -> None:
    """Bars labelled with their height."""
    bars = axes.bar(range(len(names)), heights, width=0.62, color=colours)
    axes.bar_label(bars, [form.format(height) for height in heights], color=INK, fontsize=11)
    axes.set_xticks(range(len(names)), names)


def _pairs(
    axes: "Axes", names: list[str], first: np.ndarray, second: np.ndarray, labels: tuple[str, str]
) -> None:
    """Two bars for each name."""
    positions = np.arange(len(names))
    axes.bar(positions - 0.19, first, width=0.36, color=BLUE, label=labels[0])
    axes.bar(positions + 0.19, second, width=0.36, color=ORANGE, label=labels[1])
    axes.set_xticks(positions, names, fontsize=10)


def _length_buckets(rollout: CriticRollout) -> list[str]:
    """Labels of the buckets of length on an axis."""
    shortest, longest = rollout.lengths[rollout.lengths > 0].min(), rollout.lengths.max()
    lows = [int(shortest), *(edge + 1 for edge in rollout.edges)]
    highs = [*rollout.edges, int(longest)]
    return [str(a) if a == b else f"{a}–{b}" for a, b in zip(lows, highs, strict=True)]  # noqa: RUF001 - a range


def _explained_variance(axes: "Axes", rollout: CriticRollout, report: CriticReport) -> None:
    explained = np.asarray(report.position.explained_variance)
    axes.plot(_bin_centers(axes), np.maximum(explained, -1), color=GREEN, linewidth=2.6, marker="o")
    axes.axhline(0, color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.set_ylim(min(-0.1, float(np.maximum(explained, -1).min()) - 0.05), 1.05)
    note = f"overall {report.explained_variance:.2f}; 0 is a constant, 1 is perfect"
    _label_panel(axes, "Explained variance", note, ALONG, "1 − Var(G − V) / Var(G)")  # noqa: RUF001 - minus


def _bias(axes: "Axes", rollout: CriticRollout, report: CriticReport) -> None:
    middles, bias = _bin_centers(axes), np.asarray(report.position.bias)
    axes.plot(middles, bias, color=BLUE, linewidth=2.6, marker="o", label="mean error")
    axes.plot(middles, report.position.error, color=MUTED, linewidth=1.8, label="typical error")
    axes.axhline(0, color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)))
    _legend(axes)
    note = f"start {bias[0]:+.3f}, end {bias[-1]:+.3f}"
    _label_panel(axes, "Value bias", note, ALONG, "V − G, in reward")  # noqa: RUF001 - minus


def _calibration(axes: "Axes", rollout: CriticRollout, report: CriticReport) -> None:
    calibration = report.calibration
    count = np.asarray(calibration.tokens)
    has_tokens = count > 0
    share = count / count.sum()
    middles = (np.arange(BINS) + 0.5) / BINS
    axes.bar(middles, share, width=0.09, color=GRID, label="share of tokens")
    axes.plot([0, 1], [0, 1], color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)))
    predicted = np.asarray(calibration.predicted)[has_tokens]
    observed = np.asarray(calibration.observed)[has_tokens]
    axes.plot(predicted, observed, color=PURPLE, linewidth=2.2)
    axes.scatter(predicted, observed, s=20 + 220 * share[has_tokens], color=PURPLE, zorder=3)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.04)
    axes.legend(frameon=False, labelcolor=INK, fontsize=11, loc="upper left")
    note = f"Brier {float(calibration.brier):.3f}, calibration error {float(calibration.ece):.3f}"
    _label_panel(axes, "Calibration", note, "predicted success", "observed success")


def _bootstrap(axes: "Axes", rollout: CriticRollout, report: CriticReport) -> None:
    middles = _bin_centers(axes)
    axes.plot(middles, report.bias, color=ORANGE, linewidth=2.6, marker="o", label="bias")
    axes.axhline(report.deviation, color=BLUE, linewidth=2, label="spread of advantages")
    axes.set_ylim(0, None)
    _legend(axes)
    ratio = report.bias.mean() / report.deviation if report.deviation else 0.0
    note = f"mean {ratio:.1%} of the spread; bound {float(report.bootstrap.bound):.3f}"
    _label_panel(axes, "Bootstrap bias of advantages", note, ALONG, "in reward")


def _reach(axes: "Axes", rollout: CriticRollout, report: CriticReport) -> None:
    longest = int(rollout.lengths.max())
    decay = np.ravel(np.broadcast_to(rollout.lam, (len(rollout.lengths), 1)))[rollout.lengths > 0]
    back = np.arange(longest)
    low, mid, high = ((rollout.gamma * x) ** back for x in np.quantile(decay, (0, 0.5, 1)))
    axes.fill_between(back, low, high, color=BLUE, alpha=0.15, linewidth=0)
    axes.plot(back, mid, color=BLUE, linewidth=2.6)
    typical = float(np.median(rollout.lengths[rollout.lengths > 0])) - 1
    axes.axvline(typical, color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)))
    side = "left" if typical > longest / 2 else "right"
    words = " median response \n begins here "
    axes.text(typical, 1.0, words, color=MUTED, fontsize=11, ha=side, va="top")
    axes.set_xlim(longest - 1 if longest > 1 else 1, 0)
    axes.set_ylim(0, 1.04)
    horizon = float(report.reach.horizon)
    note = f"{float(report.reach.share):.0%} feel it; horizon " + (
        f"{horizon:.0f} tokens" if np.isfinite(horizon) else "without end"
    )
    if report.guard_rate is not None:
        note += f"; floor in {report.guard_rate:.0%}"
    _label_panel(axes, "Terminal reach", note, "tokens before the end", "weight of the outcome")


def _sensitivity(axes: "Axes", rollout: CriticRollout, report: CriticReport) -> None:
    sensitivity = report.sensitivity
    correlation = np.asarray(sensitivity.correlation)
    agreement = np.asarray(sensitivity.sign_agreement)
    _pairs(axes, _length_buckets(rollout), correlation, agreement, ("correlation", "equal sign"))
    axes.set_ylim(min(0.0, float(correlation.min()) - 0.05), 1.25)
    axes.set_yticks([0, 0.5, 1])
    axes.axhline(0, color=MUTED, linewidth=1.0)
    axes.legend(frameon=False, labelcolor=INK, fontsize=11, loc="upper center", ncols=2)
    note = "A(λ) against A(1), by length of the response"
    _label_panel(axes, "Sensitivity to lambda", note, "tokens", "")


def _variance(axes: "Axes", rollout: CriticRollout, report: CriticReport) -> None:
    variances = [float(report.variance.within), float(report.variance.between)]
    _bars(axes, ["within\nresponses", "between\nresponses"], variances, [GREEN, BLUE], "{:.3g}")
    axes.set_ylim(0, 1.15 * max(*variances, 1e-9))
    note = f"ratio {float(report.variance.ratio):.2f}; 0 adds nothing to a baseline"
    _label_panel(axes, "Variance of advantages", note, "", "in reward squared")


def _concentration(axes: "Axes", rollout: CriticRollout, report: CriticReport) -> None:
    concentration = report.concentration
    axes.bar(_bin_centers(axes), report.errors, width=0.085, color=PURPLE)
    axes.set_ylim(0, None)
    gini, top_mass = float(concentration.gini), float(concentration.top_mass)
    note = f"Gini {gini:.2f}; top 5% of tokens hold {top_mass:.0%}"
    _label_panel(axes, "Temporal-difference errors", note, ALONG, "mean |δ|, in reward")


def _contradiction(axes: "Axes", rollout: CriticRollout, report: CriticReport) -> None:
    axes.plot(_bin_centers(axes), report.contradictions, color=ORANGE, linewidth=2.6, marker="o")
    axes.axhline(0.5, color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)))
    _percent(axes, max(0.6, 1.1 * float(report.contradictions.max())))
    note = f"{report.contradiction:.0%} of tokens; half is chance"
    _label_panel(axes, "Sign against the outcome", note, ALONG, "share of tokens")


def _lengths(axes: "Axes", rollout: CriticRollout, report: CriticReport) -> None:
    responses, tokens = np.asarray(report.length.responses), np.asarray(report.length.tokens)
    _pairs(axes, _length_buckets(rollout), responses, tokens, ("responses", "tokens"))
    _percent(axes, 1.3 * float(max(responses.max(), tokens.max())))
    axes.legend(frameon=False, labelcolor=INK, fontsize=11, loc="upper center", ncols=2)
    note = "in a loss per response, and per token"
    _label_panel(axes, "Weight by length", note, "tokens", "share")


def _negative(axes: "Axes", rollout: CriticRollout, report: CriticReport) -> None:
    negative = report.negative
    shares = [float(negative.responses), float(negative.tokens)]
    _bars(axes, ["of responses", "of tokens"], shares, [BLUE, ORANGE])
    _percent(axes, 1.15 * max(*shares, 0.05))
    note = (
        f"mean length {float(negative.length):.1f} against {float(negative.other_length):.1f}; "
        f"drift {float(negative.drift):+.3f}"
    )
    _label_panel(axes, "Negative advantage", note, "", "share")


def _groups(axes: "Axes", rollout: CriticRollout, report: CriticReport) -> None:
    groups = report.groups
    right, wrong = float(groups.all_right), float(groups.all_wrong)
    shares = [right, max(0.0, 1 - right - wrong), wrong]
    _bars(axes, ["all right", "mixed", "all wrong"], shares, [GREEN, BLUE, ORANGE])
    _percent(axes, 1.15 * max(shares))
    note = f"pass@1 {float(groups.pass_at_1):.0%}, pass@k {float(groups.pass_at_k):.0%}"
    _label_panel(axes, "Groups", note, "responses to one prompt", "share of prompts")
