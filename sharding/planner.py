"""Former place of the planner, `moe.planner`."""

import sys

MOVED = "sharding.planner is now moe.planner: run python -m moe.planner with the same arguments."

if __name__ == "__main__":
    sys.exit(f"error: {MOVED}")
raise ImportError(MOVED)
