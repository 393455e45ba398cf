"""Write the vectors: python tests/vectors/generate.py

Every number comes from the loops in tests/oracles, in float64, which share no code with the
library. The files are kept in the repository; a test works them out again and compares.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

from vectors.objective import text
from vectors.tables import ROWS


def main() -> None:
    for vector in ROWS:
        vector.path.write_text(text(vector.document()))
        print(f"{vector.path.name}: {len(vector.cases)} cases")


if __name__ == "__main__":
    main()
