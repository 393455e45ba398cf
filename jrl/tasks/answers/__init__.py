"""Answers: which part of a completion is one, what it says, and whether it is right.

The worker program, which never loads `jrl`, loads this folder by its path: its files import each
other relatively, and nothing else of `jrl`.
"""

from .extraction import Extracted as Extracted
from .extraction import extract as extract
