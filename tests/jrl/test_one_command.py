"""The command `jrl`: each of its commands is a module, with that module's flags and exit status."""

import re
import subprocess
import sys
from importlib import import_module

import pytest

from jrl.__main__ import COMMANDS, main
from jrl.completion import completion_script, words_of
from jrl.program import program

WRONG = "--no-such-flag"


def status_and_output(call, words, capsys):
    try:
        status = call(words)
    except SystemExit as left:
        status = left.code
    printed = capsys.readouterr()
    return status, printed.out, printed.err


@pytest.mark.parametrize("words", [["--help"], [WRONG]], ids=["help", "wrong"])
@pytest.mark.parametrize("name", COMMANDS)
def test_command_has_flags_and_status_of_its_module(name, words, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/jrl"])
    command = COMMANDS[name]
    module = import_module(command.module)
    expected = status_and_output(module.main, [*command.words, *words], capsys)
    assert status_and_output(main, [name, *words], capsys) == expected
    assert expected[0] == (0 if words == ["--help"] else 2)
    if words == ["--help"]:
        assert f"usage: jrl {'train' if name == 'sft' else name} " in expected[1]


@pytest.mark.parametrize(
    ("started", "name"),
    [
        ("/usr/bin/jrl", "jrl faults watch"),
        ("site/jrl/__main__.py", "python -m jrl faults watch"),
        ("site/jrl/faults/__main__.py", "python -m jrl.faults watch"),
        ("/usr/bin/pytest", "python -m jrl.faults watch"),
        ("", "python -m jrl.faults watch"),
    ],
)
def test_program_is_named_as_it_was_started(started, name, monkeypatch):
    monkeypatch.setattr(sys, "argv", [started])
    assert program("faults watch") == name


@pytest.mark.parametrize("name", COMMANDS)
def test_command_passes_words_and_status_on(name, monkeypatch):
    command, seen = COMMANDS[name], []
    monkeypatch.setattr(import_module(command.module), "main", lambda w: seen.append(w) or 75)
    assert main([name, "RUN", "--steps", "3", "--", "-x"]) == 75
    assert seen == [[*command.words, "RUN", "--steps", "3", "--", "-x"]]


@pytest.mark.parametrize(
    ("word", "fix"), [("trian", "did you mean train?"), ("qqq", "see jrl --help.")]
)
def test_unknown_command_is_one_line(word, fix, capsys):
    assert main([word]) == 2
    assert capsys.readouterr().err == f"error: command {word!r} is unknown: {fix}\n"


def test_help_lists_commands_and_loads_no_jax():
    program = (
        "import sys; from jrl.__main__ import main; main([]);"
        "print([name for name in ('jax', 'numpy', 'tyro') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    *lines, loaded = done.stdout.splitlines()
    assert loaded == "[]", done.stderr
    listed = {line.split()[0] for line in lines if line.startswith("  ")}
    assert listed == {*COMMANDS, "completion"}


def test_names_of_the_package_are_there_after_its_import_alone():
    program = "import jrl; print(jrl.losses.gae is jrl.gae, 'gae' in dir(jrl))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "True True\n"


@pytest.mark.parametrize("words", [[], ["tcsh"], ["bash", "zsh"]])
def test_completion_of_no_or_another_shell_is_refused(words, capsys):
    assert main(["completion", *words]) == 2
    assert "must be one shell of bash, zsh, fish" in capsys.readouterr().err


HELPS = {
    "runs": "│ {list,verify}  as --keep says │\n│ -h, --help   show │\n│ --keep INT  of prune │",
    "serve": "│ --warm-up, --no-warm-up   compile, see --slots │\n│ --slots INT │",
    "plan": "options:\n  --hardware HARDWARE   device type\n  --top TOP",
    "faults": "usage\n\n  watch      look at runs",
}
WORDS = {
    "runs": ["list", "verify", "--help", "--keep"],
    "serve": ["--help", "--warm-up", "--no-warm-up", "--slots"],
    "plan": ["--help", "--hardware", "--top"],
    "faults": ["watch", "--help"],
}


def test_words_of_help_are_choices_and_flags_that_start_a_line():
    assert {name: words_of(text) for name, text in HELPS.items()} == WORDS


def bash_completions(script, words):
    program = f"{script}\nCOMP_WORDS=(jrl {' '.join(map(repr, words))})\n"
    program += f"COMP_CWORD={len(words)}\n_jrl\necho ${{COMPREPLY[*]}}"
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "completions"),
    [
        (["r"], ["runs"]),
        (["co"], ["completion"]),
        (["serve", "--no"], ["--no-warm-up"]),
        (["runs", ""], WORDS["runs"]),
        (["runs", "--keep", "3", "v"], ["verify"]),
    ],
)
def test_bash_completes_commands_and_flags(words, completions):
    script = completion_script("bash", {}, HELPS)
    assert bash_completions(script, words) == completions


@pytest.mark.slow
def test_completion_has_flags_of_all_commands(capsys):
    for shell in ("bash", "zsh", "fish"):
        assert main(["completion", shell]) == 0
        script = capsys.readouterr().out
        mark = "-l run-dir" if shell == "fish" else "--run-dir"
        assert mark in script and all(name in script for name in COMMANDS)
    lines = script.splitlines()  # of fish: one for each word
    for name in COMMANDS:
        assert len([x for x in lines if f"seen_subcommand_from {name}'" in x]) > 1, name
    assert all(re.fullmatch(r"complete -c jrl -n .*", line) for line in lines)
