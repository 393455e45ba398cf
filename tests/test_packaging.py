"""Install commands name this project; its extras, dependencies, wheel and licence."""

import functools
import itertools
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FOLDERS = (
    ".ci",
    "benchmarks",
    "campaign",
    "docs",
    "experiments",
    "jrl",
    "moe",
    "notebooks",
    "sharding",
)
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


@pytest.mark.slow
def test_install_commands_name_this_project():
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


IMPORTED_AS = {"nvidia_ml_py": "pynvml", "orbax_checkpoint": "orbax", "pyyaml": "yaml"}
NOT_IMPORTED = {
    "accelerate": "TRL imports it",
    "basedpyright": "a command",
    "beartype": "named on the command line: --jaxtyping-packages=jrl,beartype.beartype",
    "guidellm": "a command",
    "hatchling": "builds the wheel",
    "ipykernel": "runs the cells of a notebook",
    "jax_cuda13_pjrt": "a plugin of JAX",
    "jax_cuda13_plugin": "a plugin of JAX",
    "libtpu": "loaded by JAX",
    "lm_eval": "a command",
    "mkdocs_material": "a theme of mkdocs",
    "mkdocstrings": "a plugin of mkdocs",
    "nbclient": "the command `jupyter execute`",
    "nvidia_cuda_nvcc": "has ptxas, which XLA runs",
    "nvidia_cuda_nvdisasm": "a command",
    "nvidia_nvjitlink": "a library that is loaded by its path",
    "pytest_xdist": "a plugin of pytest: -n",
    "requests": "TRL's client imports it",
    "ruff": "a command",
    "verifiers": "calls the client of renderers",
}


IMPORT = re.compile(r"\n *(?:import |from (?=[\w.]+ import ))(\w+)")
IMPORT_BY_NAME = re.compile(r'(?:find_spec|import_extra|import_module|importorskip)\("(\w+)')


def imported(*folders):
    """Top-level modules that the files of these folders import, also by their name in a string."""
    texts = (path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return {
        name
        for text in texts
        for way in (IMPORT, IMPORT_BY_NAME)
        for name in way.findall("\n" + text)
    }


def test_declared_dependencies_are_imported():
    """The base install's by the packages, extras also by tests and benchmarks."""
    library = imported("jrl", "moe", "sharding")
    everything = library | imported("tests", "benchmarks", "experiments", "docs")
    unused = set()
    extras = PROJECT["optional-dependencies"].values()
    for requirements, modules in (
        (PROJECT["dependencies"], library),
        ([*itertools.chain(*extras)], everything),
    ):
        names = {re.match(r"[\w.-]+", one)[0].replace("-", "_") for one in requirements}
        unused |= {name for name in names if IMPORTED_AS.get(name, name) not in modules}
    assert unused - {"jrl_reasoning"} == NOT_IMPORTED.keys()


def test_licence_is_included():
    assert PROJECT["license"] == "Apache-2.0"
    assert PROJECT["license-files"] == ["LICENSE"]
    text = (ROOT / "LICENSE").read_text()
    assert re.search(r"Apache License\s+Version 2\.0, January 2004", text)
    assert text.rstrip().endswith("limitations under the License.")


@pytest.mark.slow
def test_the_wheel_is_the_whole_library_and_runs(tmp_path):
    """Built, installed in a folder that comes before the checkout on the path, and run there."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith(f"jrl_reasoning-{PROJECT['version']}-py3-none-any")
    listed = ["git", "-c", "safe.directory=*", "ls-files", "-co", "--exclude-standard"]
    tracked = subprocess.run(
        [*listed, "jrl", "moe", "sharding"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == {name for name in tracked if (ROOT / name).exists()}

    site = tmp_path / "site"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True)
    run = subprocess.run(
        [sys.executable, "-m", "jrl.train", "--dry-run"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert "Batch: grpo on sort" in run.stdout
    where = [sys.executable, "-c", "import jrl; print(jrl.__file__)"]
    env = {**os.environ, "PYTHONPATH": str(site)}
    printed = subprocess.run(where, cwd=tmp_path, env=env, capture_output=True, text=True).stdout
    assert printed.startswith(str(site))


EXTRAS = ("safetensors", "tokenizers", "jinja2", "gguf", "math_verify", "reasoning_gym", "pyarrow")
EXTRAS += ("datasets", "tensorboardX", "llguidance", "starlette", "uvicorn", "ray", "wandb")
EXTRAS += ("gcsfs", "trackio", "mlflow")


@pytest.mark.slow
def test_a_run_needs_no_extra(tmp_path):
    """The first command of a newcomer, after `pip install -e .`."""
    # A module that is None cannot be imported, and `find_spec` does not find it.
    hidden = f"import sys\nsys.modules.update(dict.fromkeys({EXTRAS}))\n"
    (tmp_path / "sitecustomize.py").write_text(hidden)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    for command in ("jrl.train --dry-run", "jrl.evaluate --help", "jrl.serve missing"):
        done = subprocess.run(
            [sys.executable, "-m", *command.split()],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
        )
        if command.startswith("jrl.serve"):
            assert done.stderr.splitlines()[-1].startswith("error: serving needs starlette")
        else:
            assert done.returncode == 0, done.stderr


def test_the_changelog_has_the_version():
    assert f"\n## {PROJECT['version']} - " in (ROOT / "CHANGELOG.md").read_text()
