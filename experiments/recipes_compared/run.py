"""Six recipes at equal sampled tokens and at equal wall-clock.

python -m experiments.recipes_compared.run
"""

from pathlib import Path

import numpy as np

from experiments.figures import by_variant, draw_curves, markdown, minutes, spread
from experiments.study import Curve, Study, command_line

FOLDER = Path(__file__).parent
STUDY = Study(
    FOLDER,
    {
        "PPO": "ppo --prompts 128 --group-size 1",
        "GRPO": "grpo",
        "DAPO": "dapo",
        "VAPO": "vapo",
        "T-PPO": "tppo",
        "HAPO": "hapo",
    },
)


def table(curves: list[Curve]) -> str:
    """Accuracy where every run has sampled as much as the thriftiest, and has taken as long as the
    quickest: all of them got that far."""
    tokens = min(curve.numbers["sampled_tokens"][-1] for curve in curves)
    seconds = min(curve.numbers["seconds"][-1] for curve in curves)
    rows = [
        [
            recipe,
            f"{np.mean([run.accuracy[0] for run in runs]):.3f}",
            spread([run.at("sampled_tokens", tokens) for run in runs]),
            spread([run.at("seconds", seconds) for run in runs]),
            spread([run.final for run in runs]),
            minutes(runs),
        ]
        for recipe, runs in by_variant(curves).items()
    ]
    equal = f"at {tokens / 1e3:,.0f}k sampled tokens", f"at {seconds / 60:.1f} minutes"
    return markdown(["recipe", "before", *equal, f"{STUDY.steps} steps", "minutes a run"], rows)


def main() -> None:
    curves = command_line(STUDY)
    print(table(curves))
    over = ("sampled_tokens", "seconds")
    draw_curves(curves, FOLDER / "plot.png", over, "Six recipes, three seeds each")


if __name__ == "__main__":
    main()
