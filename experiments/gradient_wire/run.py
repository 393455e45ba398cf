"""Gradients sent in float32 and in bfloat16 between eight devices.

python -m experiments.gradient_wire.run
"""

from pathlib import Path

import numpy as np

from experiments.figures import by_variant, draw_curves, final_table, markdown, spread
from experiments.study import Curve, Study, command_line

FOLDER = Path(__file__).parent
# Experts on two devices each: gradients of attention cross eight devices, those of experts four.
DEVICES = "--devices 8 --layout dp8/ep2"
STUDY = Study(
    FOLDER,
    {"float32": "grpo --gradient-wire float32", "bfloat16": "grpo --gradient-wire bfloat16"},
    steps=60,
    common=(
        "--prompts 16 --group-size 8 --mini-batch 32 --learning-rate 1e-4 "
        f"--learning-rate-warmup 8 --eval-every 5 --eval-prompts 256 {DEVICES}"
    ),
    metrics=("critic/score/mean", "actor/pg_loss", "actor/grad_norm", "actor/entropy"),
    task="sort",
    warm_start="--warm-start-accuracy 0.3 --eval-prompts 64",
)
COMPARED = {
    "accuracy": "held-out accuracy",
    "critic/score/mean": "reward",
    "actor/grad_norm": "norm of the gradient",
    "actor/entropy": "entropy, nats",
}


def table(curves: list[Curve]) -> str:
    """How far the two curves of a seed are apart, beside how far the seeds of float32 are: means
    over all evaluations."""
    plain, compressed = by_variant(curves).values()

    def of(curve: Curve, name: str) -> np.ndarray:
        return np.asarray(curve.numbers[name])[1:]

    rows = []
    for name, heading in COMPARED.items():
        wires = [
            float(np.mean(np.abs(of(one, name) - of(other, name))))
            for one, other in zip(plain, compressed, strict=True)
        ]
        between = np.stack([of(curve, name) for curve in plain])
        seeds = float(np.mean(np.ptp(between, axis=0)))
        rows.append([heading, f"{np.mean(between):.3f}", spread(wires), f"{seeds:.3f}"])
    return markdown(["", "float32", "bfloat16 differs by", "seeds differ by"], rows)


def main() -> None:
    curves = command_line(STUDY)
    print(final_table(curves, {"actor/grad_norm": "norm of the gradient"}))
    print()
    print(table(curves))
    title = "Gradients sent in float32 and in bfloat16, three seeds each"
    draw_curves(curves, FOLDER / "plot.png", ("step",), title)


if __name__ == "__main__":
    main()
