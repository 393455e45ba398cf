"""VAPO without one of its seven parts at a time.

python -m experiments.vapo_ablation.run
"""

from pathlib import Path

from experiments.figures import draw_finals, final_table
from experiments.study import Study, command_line

FOLDER = Path(__file__).parent
STUDY = Study(
    FOLDER,
    {
        "VAPO": "vapo",
        "w/o value pretraining": "vapo --pretrain-critic 0",
        "w/o decoupled GAE": "vapo --lam-critic 0.95",
        "w/o length-adaptive GAE": "vapo --lam-alpha None",
        "w/o Clip-Higher": "vapo --clip-high 0.2",
        "w/o token-level loss": "vapo --aggregation seq-mean-token-mean",
        "w/o positive-example LM loss": "vapo --positive-coef 0",
        "w/o group sampling": "vapo --prompts 128 --group-size 1",
    },
    metrics=("critic/score/mean", "actor/entropy", "critic/vf_explained_var"),
)
"""The critic's pretraining counts among the steps, as it samples as much."""


def main() -> None:
    curves = command_line(STUDY)
    print(final_table(curves, {"critic/vf_explained_var": "explained variance"}))
    draw_finals(curves, FOLDER / "plot.png", "VAPO, leave one out")


if __name__ == "__main__":
    main()
