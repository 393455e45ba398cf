"""T-PPO's windows against complete rollouts: decoding steps and time to the same accuracy.

python -m experiments.tppo_efficiency.run
"""

from pathlib import Path

from experiments.figures import by_variant, draw_curves, markdown, minutes, spread
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
    """What each needs for the accuracy that complete rollouts end with, seed by seed."""
    grouped = by_variant(curves)
    goals = {run.seed: run.final for run in grouped[COMPLETE]}
    rows = []
    for variant, runs in grouped.items():
        needed = []
        for quantity, unit in (("decode_steps", 1e3), ("seconds", 60.0)):
            spent = [run.until(goals[run.seed], quantity) for run in runs]
            reached = [value / unit for value in spent if value is not None]
            text = spread(reached, 1) if reached else "never"
            needed.append(
                text
                if len(reached) == len(runs)
                else f"{text}, {len(reached)} of {len(runs)} seeds"
            )
        rows.append([variant, *needed, spread([run.final for run in runs]), minutes(runs)])
    header = ["rollout", "thousand decoding steps to it", "minutes to it", "accuracy at the end"]
    return markdown([*header, "minutes a run"], rows)


def main() -> None:
    curves = command_line(STUDY)
    print(table(curves))
    over = ("decode_steps", "seconds")
    draw_curves(curves, FOLDER / "plot.png", over, "Windows against complete rollouts")


if __name__ == "__main__":
    main()
