"""Rows in flight when weights change: keys and values computed again, or kept.

python -m experiments.stale_cache.run
"""

from pathlib import Path

from experiments.figures import draw_finals, final_table
from experiments.study import Study, command_line

FOLDER = Path(__file__).parent
AHEAD = "grpo --max-staleness 4"
STUDY = Study(
    FOLDER,
    {"caches computed again": AHEAD, "caches kept": f"{AHEAD} --stale-cache"},
    metrics=("critic/score/mean", "staleness/mean", "sampling/k3_kl", "timing_s/gen"),
)
"""Four versions behind at most: most rows see weights change while they are written."""


def main() -> None:
    curves = command_line(STUDY)
    headings = {
        "staleness/mean": "versions behind",
        "sampling/k3_kl": "KL to the sampler, nats",
        "timing_s/gen": "seconds of sampling a step",
    }
    print(final_table(curves, headings))
    draw_finals(curves, FOLDER / "plot.png", "Rows in flight: caches computed again or kept")


if __name__ == "__main__":
    main()
