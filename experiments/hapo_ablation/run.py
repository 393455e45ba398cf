"""The four parts of HAPO alone and together, on top of DAPO.

python -m experiments.hapo_ablation.run
"""

from pathlib import Path

from experiments.figures import draw_finals, final_table
from experiments.study import Study, command_line

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
        "DAPO (no part)": only(None),
        **{f"{part} only": only(part) for part in PARTS},
        "HAPO (all four)": "hapo",
    },
)


def main() -> None:
    curves = command_line(STUDY)
    print(final_table(curves, {"actor/entropy": "entropy"}))
    draw_finals(curves, FOLDER / "plot.png", "The parts of HAPO, alone and together")


if __name__ == "__main__":
    main()
