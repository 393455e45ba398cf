"""T-PPO's windows against complete rollouts: accuracy for the same decoding steps, and what is
spent until the same accuracy.

python -m experiments.tppo_efficiency.run
"""

import math
from pathlib import Path

from experiments.figures import UNITS, by_variant, draw_curves, markdown, spread
from experiments.study import Curve, Study, command_line

FOLDER = Path(__file__).parent
COMPLETE = "complete rollouts"
ACCURACIES = (0.38, 0.40)
"""Every run of complete rollouts and of windows of a half reaches the first."""
SPENT = {"decode_steps": "thousand decoding steps", "seconds": "minutes"}
STUDY = Study(
    FOLDER,
    {
        # A token less than the limit: what the policy learns from is whole responses.
        COMPLETE: "tppo --window 223",
        "window 3/4 of the limit": "tppo",
        "window 1/2": "tppo --window 112",
        "window 1/4": "tppo --window 56",
    },
)


def table(curves: list[Curve]) -> str:
    """Accuracy when as many decoding steps were spent as those runs did that spent the fewest, with
    windows of a quarter and of a half."""
    grouped = by_variant(curves)
    budgets = sorted(
        min(run.numbers["decode_steps"][-1] for run in runs) for runs in grouped.values()
    )[:2]
    rows = []
    for variant, runs in grouped.items():
        spent = [run.numbers["decode_steps"][-1] for run in runs]
        tokens = [run.numbers["sampled_tokens"][-1] / 1e3 for run in runs]
        at = [
            spread([run.at("decode_steps", budget) for run in runs])
            if min(spent) >= budget
            else "-"
            for budget in budgets
        ]
        end = spread([run.final for run in runs])
        rows.append([variant, *at, end, f"{sum(spent) / len(spent) / 1e3:.1f}", spread(tokens, 0)])
    header = ["rollout", *(f"at {budget / 1e3:.1f}k decoding steps" for budget in budgets)]
    others = ["after 60 steps", "thousand decoding steps", "thousand tokens"]
    return markdown([*header, *others], rows)


def until_table(curves: list[Curve]) -> str:
    """What each variant spends until `ACCURACIES`, and how many times that complete rollouts spend,
    seed by seed, over the seeds that come there."""
    grouped = by_variant(curves)
    complete = {run.seed: run for run in grouped[COMPLETE]}
    rows = []
    for accuracy in ACCURACIES:
        for variant, runs in grouped.items():
            there = [run for run in runs if run.until(accuracy, "step") is not None]
            row = [f"{accuracy:.2f}", variant, f"{len(there)} of {len(runs)}"]
            for quantity in SPENT:
                own, others = (
                    [_spent(run, accuracy, quantity) for run in some]
                    for some in (there, [complete[run.seed] for run in there])
                )
                ratios = [other / one for one, other in zip(own, others, strict=True)]
                row += [spread(own, 1), "1" if variant == COMPLETE else spread(ratios, 2)]
            rows.append(row)
    header = ["held-out accuracy", "rollout", "seeds that reach it"]
    for name in SPENT.values():
        header += [name, f"{COMPLETE} over it"]
    return markdown(header, rows)


def _spent(run: Curve, accuracy: float, quantity: str) -> float:
    spent = run.until(accuracy, quantity)
    return math.nan if spent is None else spent / UNITS[quantity]


def main() -> None:
    curves = command_line(STUDY)
    print(table(curves))
    print(until_table(curves))
    over = ("decode_steps", "sampled_tokens")
    draw_curves(curves, FOLDER / "plot.png", over, "Windows against complete rollouts")


if __name__ == "__main__":
    main()
