"""Where the tests' own programs lie, and the checkout that they try."""

from pathlib import Path

SUPPORT = Path(__file__).parent
ROOT = SUPPORT.parents[1]
