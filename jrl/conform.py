"""Check losses of any library: jrl conform FILE.py:FUNCTION --as QUANTITY, jrl conform verl trl."""

import sys

from jrl.conformance.command import main

if __name__ == "__main__":
    sys.exit(main())
