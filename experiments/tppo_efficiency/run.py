"""T-PPO's windows against complete rollouts: accuracy for the same decoding steps.

python -m experiments.tppo_efficiency.run
"""

from pathlib import Path

from experiments.figures import by_variant, draw_curves, markdown, spread
from experiments.study import Curve, Study, command_line

FOLDER = Path(__file__).parent
COMPLETE = "complete rollouts"
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


def main() -> None:
    curves = command_line(STUDY)
    print(table(curves))
    over = ("decode_steps", "sampled_tokens")
    draw_curves(curves, FOLDER / "plot.png", over, "Windows against complete rollouts")


if __name__ == "__main__":
    main()
