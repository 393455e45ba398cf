"""What one is told to install is this project: its name, its extras, its licence."""

import functools
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FOLDERS = (".ci", "benchmarks", "docs", "experiments", "jrl", "moe", "notebooks", "sharding")
TEXTS = sorted(
    path
    for pattern in ("*.md", "*.toml", *(f"{folder}/**/*" for folder in FOLDERS))
    for path in ROOT.glob(pattern)
    if path.suffix in {".md", ".py", ".ipynb", ".toml", ".yml", ""} and path.is_file()
)


@functools.cache
def lines():
    return [*_lines()]


def _lines():
    for path in TEXTS:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            yield f"{path.relative_to(ROOT)}:{number}", line.replace('\\"', '"')


def test_the_distribution_is_not_called_as_another_project_on_the_index():
    assert PROJECT["name"] == "jrl-reasoning"


def test_nobody_is_told_to_install_the_other_project():
    assert len(TEXTS) > 100
    other = re.compile(r"""pip install (-\S+ )*["']?jrl\b(?!-)|\bjrl\[[a-z]""")
    told = [place for place, line in lines() if other.search(line)]
    assert not told


def test_the_extras_that_are_named_exist():
    named = [
        (place, extra)
        for place, line in lines()
        for extras in re.findall(r'"\.\[([a-z0-9,]+)\]"', line)
        for extra in extras.split(",")
    ]
    assert len(named) >= 15
    assert not [
        (place, extra) for place, extra in named if extra not in PROJECT["optional-dependencies"]
    ]


@pytest.mark.parametrize("extra", PROJECT["optional-dependencies"])
def test_an_extra_that_takes_others_names_this_project(extra):
    for requirement in PROJECT["optional-dependencies"][extra]:
        assert not re.match(r"jrl\b(?!-reasoning)", requirement)
        if within := re.match(rf"{PROJECT['name']}\[(.*)\]", requirement):
            assert set(within[1].split(",")) <= set(PROJECT["optional-dependencies"]) - {extra}


def test_the_linter_that_lays_out_signatures_is_the_one_that_checks():
    extras = PROJECT["optional-dependencies"]
    assert {r for r in extras["docs"] if r.startswith("ruff")} <= set(extras["lint"])


def test_the_licence_is_there():
    assert PROJECT["license"] == "Apache-2.0"
    assert PROJECT["license-files"] == ["LICENSE"]
    text = (ROOT / "LICENSE").read_text()
    assert re.search(r"Apache License\s+Version 2\.0, January 2004", text)
    assert text.rstrip().endswith("limitations under the License.")
