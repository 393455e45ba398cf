"""Alpha of VAPO's length-adaptive lambda against the reach of the outcome that it predicts.

python -m experiments.length_adaptive_lambda.run
"""

from dataclasses import replace
from pathlib import Path

import numpy as np

from experiments.figures import by_variant, draw_finals, markdown, spread
from experiments.study import TASK, Curve, Study, command_line
from jrl.losses import length_adaptive_lambda
from jrl.losses.diagnostics import terminal_reach
from jrl.recipes.vapo import Vapo
from jrl.tasks import load_task

FOLDER = Path(__file__).parent
ALPHAS = (0.05, 0.15, 0.5, 1.5, 5.0)
FIXED = "0.95 for all"


def _with(alpha: float) -> str:
    # The recipe's own is not said, so that its runs are those of the other studies.
    return "vapo" if alpha == Vapo.lam_alpha else f"vapo --lam-alpha {alpha:g}"


STUDY = Study(
    FOLDER,
    {
        **{f"alpha {alpha:g}": _with(alpha) for alpha in ALPHAS},
        FIXED: "vapo --lam-alpha None",
    },
    metrics=("critic/score/mean", "critic/vf_explained_var", "actor/grad_norm"),
)


def reaches() -> dict[str, float]:
    """The share of tokens that the outcome reaches, by the lengths of the task's own answers."""
    task = load_task(TASK, seed=0)
    lengths = np.array([len(task.train(number).answer) + 1 for number in range(512)])
    mask = np.arange(lengths.max()) < lengths[:, None]
    adaptive = {
        f"alpha {alpha:g}": length_adaptive_lambda(lengths, alpha=alpha)[:, None]
        for alpha in ALPHAS
    }
    shares = {
        variant: terminal_reach(mask, lam=lam).share
        for variant, lam in [*adaptive.items(), (FIXED, 0.95)]
    }
    return {variant: float(share) for variant, share in shares.items()}


def table(curves: list[Curve], reach: dict[str, float]) -> str:
    rows = []
    for variant, runs in by_variant(curves).items():
        explained = [run.numbers["critic/vf_explained_var"][-1] for run in runs]
        finals = [run.final for run in runs]
        rows.append([variant, f"{reach[variant]:.2f}", spread(finals), spread(explained, 2)])
    return markdown(
        ["lambda", "tokens in reach", "accuracy at the end", "explained variance"], rows
    )


def draw(curves: list[Curve], reach: dict[str, float]) -> None:
    """By the reach, the least first."""
    by_reach = sorted(curves, key=lambda curve: reach[curve.variant])
    labelled = [
        replace(curve, variant=f"{curve.variant}: {reach[curve.variant]:.0%} in reach")
        for curve in by_reach
    ]
    draw_finals(labelled, FOLDER / "plot.png", "Reach of the outcome reward and final accuracy")


def main() -> None:
    curves, reach = command_line(STUDY), reaches()
    print(table(curves, reach))
    draw(curves, reach)


if __name__ == "__main__":
    main()
