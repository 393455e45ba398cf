"""The four parts of HAPO alone and together, on top of DAPO without dynamic sampling.

python -m experiments.hapo_ablation.run
"""

from pathlib import Path

from experiments.figures import draw_finals, final_table
from experiments.study import COMMON, Study, command_line

FOLDER = Path(__file__).parent
PARTS = {
    "adaptive temperature": "adaptive-temperature",
    "token-level group average": "token-level-group-average",
    "differential redistribution": "differential-redistribution",
    "asymmetric clipping": "asymmetric-clipping",
}


def only(kept: str | None) -> str:
    """HAPO with one of its parts, or with none."""
    off = [flag for part, flag in PARTS.items() if part != kept]
    return "hapo " + " ".join(f"--no-{flag}" for flag in off)


STUDY = Study(
    FOLDER,
    {
        "no part": only(None),
        **{f"{part} only": only(part) for part in PARTS},
        "all four": "hapo",
    },
    common=f"{COMMON} --no-dynamic-sampling",
)
"""Without dynamic sampling all variants sample as many completions: what is compared is the parts,
not how many groups a variant throws away."""


def main() -> None:
    curves = command_line(STUDY)
    print(final_table(curves, {"actor/entropy": "entropy"}))
    draw_finals(curves, FOLDER / "plot.png", "Components of HAPO, each alone and all together")


if __name__ == "__main__":
    main()
