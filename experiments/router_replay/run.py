"""Router replay on and off where updates are off-policy: sixteen updates to a batch.

python -m experiments.router_replay.run
"""

from pathlib import Path

from experiments.figures import draw_curves, final_table
from experiments.study import Study, command_line

FOLDER = Path(__file__).parent
OFF_POLICY = "grpo --mini-batch 16 --epochs 2"
STUDY = Study(
    FOLDER,
    {
        "no replay": OFF_POLICY,
        "R2": f"{OFF_POLICY} --router-replay R2",
        "R3": f"{OFF_POLICY} --router-replay R3",
    },
    metrics=("critic/score/mean", "actor/ppo_kl", "actor/pg_clipfrac", "actor/grad_norm"),
)


def main() -> None:
    curves = command_line(STUDY)
    print(
        final_table(
            curves, {"actor/ppo_kl": "KL to the old policy", "actor/pg_clipfrac": "clipped"}
        )
    )
    draw_curves(curves, FOLDER / "plot.png", ["step"], "Router replay, off-policy updates")


if __name__ == "__main__":
    main()
