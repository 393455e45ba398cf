"""``python -m moe.planner DIR --hardware h100x64``: the planner, which takes checkpoints too."""

import sys

from moe.planner import sizes_from
from sharding.planner.__main__ import main as planner


def main(arguments: list[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    return planner(arguments, read=sizes_from)


if __name__ == "__main__":
    sys.exit(main())
