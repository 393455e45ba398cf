"""Write the vectors: python tests/vectors/generate.py

Every number comes from the loops in tests/oracles, in float64, which share no code with the
library. The files are kept in the repository; a test works them out again and compares.
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

from jrl.conformance.cases import USUAL
from vectors.objective import text
from vectors.tables import ROWS


def main() -> None:
    for vector in ROWS:
        vector.path.write_text(text(vector.document()))
        print(f"{vector.path.name}: {len(vector.cases)} cases")
    USUAL.write_text(json.dumps(usual_settings(), indent=1) + "\n")


def usual_settings() -> dict[str, dict[str, Any]]:
    """The values of settings that a case of a file need not name."""
    return {row.function: dict(row.defaults) for row in ROWS if row.defaults}


if __name__ == "__main__":
    main()
