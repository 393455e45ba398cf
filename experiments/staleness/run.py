"""Samples of policies up to N versions behind, with and without importance correction.

python -m experiments.staleness.run
"""

from pathlib import Path

from experiments.figures import draw_finals, final_table
from experiments.study import Study, command_line

FOLDER = Path(__file__).parent
BOUNDS = (0, 1, 2, 4)
STUDY = Study(
    FOLDER,
    {
        "N = 0": "grpo",
        **{f"N = {bound}": f"grpo --max-staleness {bound}" for bound in BOUNDS[1:]},
        **{
            f"N = {bound}, truncated weights": (
                f"grpo --max-staleness {bound} --mismatch truncated --old-logprobs recompute"
            )
            for bound in BOUNDS[1:]
        },
    },
    metrics=("critic/score/mean", "staleness/mean", "rollout_corr/kl", "actor/pg_clipfrac"),
)


def main() -> None:
    curves = command_line(STUDY)
    print(
        final_table(curves, {"staleness/mean": "versions behind", "actor/pg_clipfrac": "clipped"})
    )
    draw_finals(curves, FOLDER / "plot.png", "Samples of policies up to N versions behind")


if __name__ == "__main__":
    main()
