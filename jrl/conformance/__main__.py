"""The same command if this package is installed alone."""

import sys

from .command import main

if __name__ == "__main__":
    sys.exit(main())
