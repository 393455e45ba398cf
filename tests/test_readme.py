"""The README's Python runs, and its commands are the two that a newcomer needs."""

import doctest
import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_readme_examples_run():
    results = doctest.testfile(str(README), module_relative=False)
    assert results.failed == 0
    assert results.attempted >= 8


def test_quick_start_is_two_blocks_of_one_line():
    section = README.read_text().split("## Quick start", 1)[1].split("\n## ", 1)[0]
    blocks = re.findall(r"(?ms)^```bash\n(.*?)^```", section)
    assert [block.count("\n") for block in blocks] == [1, 1]
    assert "jrl train" in blocks[0]
    assert "pytest" in blocks[1]


def test_readme_is_short():
    text = README.read_text()
    assert len(text.splitlines()) <= 150
    assert len(text.split()) <= 1000  # 200 a minute


def test_readme_files_exist():
    for path in re.findall(r"\]\(((?!http)[^)#]+)\)", README.read_text()):
        assert (README.parent / path).exists(), path
