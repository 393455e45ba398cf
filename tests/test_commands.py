"""The commands on the pages are read by the programs they name, flags and values included.

Nothing is run: each program is followed to where its command line has been read.
"""

import json
import re
import runpy
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
import tyro

from benchmarks.faults import __main__ as simulated_faults
from benchmarks.planner.serving.__main__ import PARSER as SERVERS
from jrl import chat, evaluate, export, serve
from jrl.__main__ import COMMANDS
from jrl.config import flags
from jrl.config.run import RunConfig
from jrl.config.run_code import RunCode
from jrl.config.training import AUTO
from jrl.conformance.command import parser as conform_parser
from jrl.faults import __main__ as faults
from jrl.launch import __main__ as launch
from jrl.recipes import RECIPES
from jrl.report import __main__ as report
from jrl.runs import __main__ as runs
from jrl.tasks import __main__ as tasks
from moe.planner.__main__ import PARSER as PLANNER
from sharding import Layout
from sharding.folding.__main__ import PARSER as FOLDING

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")),
    ROOT / "benchmarks" / "results" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "experiments").rglob("*.md")),
]


class Read(Exception):
    """A command line was read."""


def text(path):
    return path.read_text().replace("\\\n", " ")  # a command may go on in the next line


def notebook_text(path):
    cells = json.loads(path.read_text())["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def prose(page):
    return re.sub(r"(?ms)^ *```.*?^ *```", "", page)


def commands(page):
    """Lines of code blocks, and code within a paragraph or a table, as `python -m MODULE ...`;
    without comments."""
    blocks = re.findall(r"(?ms)^ *```[a-z]*\n(.*?)^ *```", page)
    spans = re.findall(r"`([^`]+)`", prose(page))
    for line in [line for block in blocks for line in block.splitlines()] + spans:
        for part in re.split(r"&&| \| |&$", line.strip().removeprefix("$ ")):
            if re.match(r"\s*(\w+=\S+ )*(python|jrl) ", part):
                yield shlex.join(as_module(shlex.split(part, comments=True)))


def as_module(words):
    """The words of a command with `python -m MODULE` in place of `jrl COMMAND`."""
    if "python" in words or words[words.index("jrl") + 1] not in COMMANDS:
        return words
    before, (name, *after) = words[: words.index("jrl")], words[words.index("jrl") + 1 :]
    module = COMMANDS[name].module.removesuffix(".__main__")
    return [*before, "python", "-m", module, *COMMANDS[name].words, *after]


TEXTS = [*map(text, PAGES), *map(notebook_text, sorted((ROOT / "notebooks").glob("*.ipynb")))]
FOUND = sorted({command for page in TEXTS for command in commands(page)})


def words_of(command):
    words = shlex.split(command)
    words = words[words.index("python") + 1 :] if "python" in words else words
    return [word for word in words if word not in ("...", "RUN...")]


def given(program):
    """Commands of a program, without its name alone."""
    return [c for c in FOUND if words_of(c)[:2] == ["-m", program] and len(words_of(c)) > 2]


def read_by(main, command, monkeypatch):
    """The words reach a parser and are accepted there."""
    read = tyro.cli

    def through(*arguments, **settings):
        read(*arguments, **settings)
        raise Read

    monkeypatch.setattr(tyro, "cli", through)
    with pytest.raises(Read):
        main(words_of(command)[2:])


STUDIES = [
    f"experiments.{path.parent.name}.run"
    for path in sorted((ROOT / "experiments").glob("*/run.py"))
    if path.parent.name != "recipes"  # a script, by its path
]


def test_there_are_commands():
    assert len(FOUND) > 30
    programs = {words_of(command)[1] for command in FOUND if words_of(command)[0] == "-m"}
    benchmarks = {
        "benchmarks.absent",
        "benchmarks.agreement",
        "benchmarks.faults",
        "benchmarks.memory",
        "benchmarks.gpu",
    }
    benchmarks |= {
        f"benchmarks.{name}"
        for name in ("dispatch", "gsm8k", "harness", "rollout", "serve", "turns")
    }
    tested = {
        "jrl.chat",
        "jrl.conform",
        "jrl.evaluate",
        "jrl.export",
        "jrl.faults",
        "jrl.report",
        "jrl.serve",
        "jrl.train",
    }
    tested |= {
        "jrl.launch",
        "jrl.runs",
        "jrl.tasks",
        "sharding.folding",
        "benchmarks.planner.serving",
        "moe.planner",
        "campaign.crossings",
        "campaign.faults",
        "campaign.faults.clean",
    }
    # Without arguments.
    single = {
        "pytest",
        "venv",
        "benchmarks.planner.calibration",
        "benchmarks.planner.serving.published",
        "benchmarks.planner.validation",
    }
    assert programs == benchmarks | tested | set(STUDIES) | single


OWN_RECIPE = re.findall(
    r'(?ms)^```python title="(.*?)"\n(.*?)^```', (ROOT / "docs" / "recipes.md").read_text()
)


@pytest.mark.slow
@pytest.mark.parametrize("command", given("jrl.train"))
def test_train_reads(command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name, source in OWN_RECIPE:
        (tmp_path / name).write_text(source)
    # What a resumed run was started with: any run will do.
    stored = (RunConfig(), RECIPES["grpo"]())
    monkeypatch.setattr(flags, "configuration_of", lambda folder, recipe: stored)
    monkeypatch.setattr(flags, "code_to_resume", lambda *_, trusted: RunCode())
    monkeypatch.setattr(flags.RunFolder, "read", lambda path: path)
    words = words_of(command)[2:]
    if words[-1:] in (["--layout"], ["--model"]):
        words.pop()  # a flag named with no value
    for before, word in pairwise(words):
        if before == "--config" and not word.startswith("preset:"):
            Path(word).parent.mkdir(parents=True, exist_ok=True)
            Path(word).write_text("recipe: grpo\n")
    if "--help" in words:
        with pytest.raises(SystemExit) as ended:
            flags.parse_arguments(words)
        assert ended.value.code == 0
    else:
        layout = flags.parse_arguments(words).run.layout
        assert layout == AUTO or Layout.parse(layout)


@pytest.mark.parametrize("command", given("jrl.launch"))
def test_launch_reads(command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    words = words_of(command)[2:]
    if not words:
        return  # the name of the program alone
    launcher_words, program_words = launch.split_arguments(words)
    launch.PARSER.parse_args(launcher_words)
    flags.parse_arguments(program_words)


@pytest.mark.parametrize("command", given("jrl.evaluate"))
def test_evaluate_reads(command, monkeypatch):
    read_by(evaluate._main, command, monkeypatch)


@pytest.mark.parametrize("command", given("jrl.conform"))
def test_conform_reads(command):
    conform_parser().parse_args(words_of(command)[2:] or ["jrl"])


@pytest.mark.parametrize("command", given("jrl.tasks"))
def test_tasks_reads(command, monkeypatch):
    read_by(tasks._main, command, monkeypatch)


@pytest.mark.parametrize("command", given("jrl.serve"))
def test_serve_reads(command, monkeypatch):
    read_by(serve._main, command, monkeypatch)


@pytest.mark.parametrize("command", given("jrl.chat"))
def test_chat_reads(command, monkeypatch):
    read_by(chat._main, command, monkeypatch)


@pytest.mark.parametrize("command", given("jrl.export"))
def test_export_reads(command, monkeypatch):
    read_by(export._main, command, monkeypatch)


@pytest.mark.parametrize("command", given("jrl.faults"))
def test_faults_reads(command, monkeypatch):
    read_by(faults._main, command, monkeypatch)


@pytest.mark.parametrize("command", given("benchmarks.faults"))
def test_benchmarks_of_faults_read(command, monkeypatch):
    read_by(simulated_faults._main, command, monkeypatch)


@pytest.mark.parametrize("command", given("jrl.report"))
def test_report_reads(command, monkeypatch):
    read_by(report._main, command, monkeypatch)


@pytest.mark.parametrize("command", given("jrl.runs"))
def test_runs_reads(command, monkeypatch):
    read_by(runs._main, command, monkeypatch)


@pytest.mark.parametrize("command", given("sharding.folding"))
def test_folding_reads(command):
    FOLDING.parse_args(words_of(command)[2:])


@pytest.mark.parametrize("command", given("moe.planner"))
def test_planner_reads(command):
    PLANNER.parse_args(words_of(command)[2:])


@pytest.mark.parametrize("command", given("benchmarks.planner.serving"))
def test_planner_of_servers_reads(command):
    SERVERS.parse_args(words_of(command)[2:])


COMPILED_PLANS = [one for one in given("benchmarks.absent") if words_of(one)[2:3] == ["plan"]]


@pytest.mark.parametrize("command", COMPILED_PLANS)
def test_plans_are_compiled_with_the_arguments_of_the_planner(command):
    PLANNER.parse_args(words_of(command)[3:])


SCRIPTS = [
    *(command for command in FOUND if words_of(command)[0].endswith(".py")),
    *(command for command in given("benchmarks.absent") if command not in COMPILED_PLANS),
    *given("benchmarks.agreement"),
    *given("benchmarks.gpu"),
    *given("benchmarks.rollout"),
    *given("benchmarks.serve"),
    *given("campaign.crossings"),
    *given("campaign.faults"),
    *given("campaign.faults.clean"),
    *(command for program in STUDIES for command in given(program)),
]


@pytest.mark.parametrize("command", SCRIPTS)
def test_scripts_exist_and_have_the_flags(command):
    """Some of them need packages that the tests do not have, so they are not loaded."""
    words = words_of(command)
    if words[0] == "-m":
        module = words[1].replace(".", "/")
        package = (ROOT / module).is_dir()
        words = [module + ("/__main__.py" if package else ".py"), *words[2:]]
    program = (ROOT / words[0]).read_text()
    for flag in (word for word in words if word.startswith("--")):
        assert f'"{flag}"' in program, flag


def test_a_line_without_mutants_is_said_in_one_line(monkeypatch):
    monkeypatch.setattr("sys.argv", ["mutation.py", f"{ROOT}/jrl/losses/policy/reinforce.py:1"])
    with pytest.raises(SystemExit, match=r"reinforce\.py:1: nothing to change"):
        runpy.run_path(str(ROOT / "tests" / "mutation.py"), run_name="__main__")


def test_each_objective_that_is_mutated_is_reached_through_a_public_function():
    """And with it which tests may notice."""
    program = runpy.run_path(str(ROOT / "tests" / "mutation.py"))
    nearest, _ = program["public_users"](Path("jrl/losses/policy/token_ratio.py"), "_dropped")
    assert nearest == {"dppo_loss"}
    for file, function in program["definitions"]():
        assert program["public_users"](file, function)


def test_flags_named_in_the_prose_exist():
    programs = "\n".join(
        path.read_text()
        for folder in ("jrl", "moe", "sharding", "benchmarks", "campaign", "experiments", "tests")
        for path in (ROOT / folder).rglob("*.py")
    )
    named = {flag for page in TEXTS for flag in re.findall(r"`(--[a-z][a-z0-9-]+)", prose(page))}
    assert len(named) > 8
    for flag in named:
        field = flag.removeprefix("--").replace("-", "_")
        assert f'"{flag}"' in programs or re.search(rf"(?m)^    {field}: ", programs), flag
