"""Command line: prints the process groups of a layout, and draws a picture of it."""

import argparse
import sys
from pathlib import Path

from sharding.folding.groups import describe, draw
from sharding.folding.layout import Layout

PARSER = argparse.ArgumentParser(
    prog="python -m sharding.folding",
    description="Prints the device groups of a layout's collectives. No device is needed.",
)
PARSER.add_argument("layout", help='for example "tp2 cp2 dp2 pp2 / ep4 etp1"; axes left out are 1')
PARSER.add_argument(
    "--picture", type=Path, metavar="FILE", help="also write a picture of the devices"
)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0, or 2 for a layout or a picture that is not
    possible, with the reason."""
    args = PARSER.parse_args(arguments)
    try:
        layout = Layout.parse(args.layout)
        print(describe(layout))
        if args.picture is not None:
            draw(layout, args.picture)
    except (ValueError, OSError) as reason:
        print("error:", reason, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
