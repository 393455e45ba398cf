"""From GRPO to DAPO, a part more at a time.

python -m experiments.dapo_ladder.run
"""

from pathlib import Path

from experiments.figures import draw_finals, final_table
from experiments.study import Study, command_line

FOLDER = Path(__file__).parent
GRPO = "dapo --no-dynamic-sampling --overlong-buffer 0"
STUDY = Study(
    FOLDER,
    {
        "GRPO": f"{GRPO} --aggregation seq-mean-token-mean --clip-high 0.2",
        "+ overlong filtering": (
            f"{GRPO} --aggregation seq-mean-token-mean --clip-high 0.2 --overlong-filter"
        ),
        "+ Clip-Higher": f"{GRPO} --aggregation seq-mean-token-mean --overlong-filter",
        "+ soft overlong punishment": (
            "dapo --no-dynamic-sampling --aggregation seq-mean-token-mean"
        ),
        "+ token-level loss": "dapo --no-dynamic-sampling",
        "+ dynamic sampling (DAPO)": "dapo",
    },
    metrics=("critic/score/mean", "actor/entropy", "response_length/clip_ratio"),
)
"""The punishment takes the place of the filter, as in the paper's final recipe."""


def main() -> None:
    curves = command_line(STUDY)
    print(
        final_table(curves, {"actor/entropy": "entropy", "response_length/clip_ratio": "truncated"})
    )
    draw_finals(curves, FOLDER / "plot.png", "From GRPO to DAPO, one component at a time")


if __name__ == "__main__":
    main()
