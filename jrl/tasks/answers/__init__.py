"""Answers of completions: extraction, parsing, and comparison with the reference answer.

The worker program never loads `jrl`, and loads this folder by its path. Its files therefore import
each other relatively, and nothing else of `jrl`.
"""

from .extraction import Extracted as Extracted
from .extraction import extract as extract
