import json
import os
import pwd
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl import command_line
from jrl.command_line import exit_status, keep_compilations, start_jax
from jrl.config.run import RunConfig
from jrl.processes.stopping import DRAINED
from jrl.trainer.loop import NonFiniteRun
from jrl.trainer.supervised import WarmStartFailed

LOST = (
    "another process of the run has ended or cannot be reached: "
    "UNKNOWN: Gloo permute failed: Connection closed"
)


def raising(error):
    def command():
        raise error

    return command


def setting(name):
    return getattr(jax.config, name)


def test_a_command_has_its_own_status():
    assert exit_status(lambda: 3) == 3


def test_processes_with_the_status_of_a_drain_end_together(monkeypatch):
    monkeypatch.setattr(command_line, "exit_without_waiting", pytest.fail)
    assert [exit_status(lambda status=status: status) for status in (0, 2, DRAINED)] == [0, 2, 75]


def test_what_our_code_says_is_one_line(capsys):
    assert exit_status(lambda: RunConfig(steps=-1) and 0) == 2
    assert capsys.readouterr().err == ("error: steps=-1 must be at least 0.\n")


def in_our_code(line):
    """A command that executes a line of a module of ours."""
    modules = {"jax": jax, "jnp": jnp, "json": json, "np": np}
    return lambda: exec(line, {"__name__": "jrl.made_up", **modules})


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("int('three')", ValueError),
        ("np.zeros(3).reshape(2)", ValueError),
        ("json.loads('three')", ValueError),
        ("jnp.concatenate([])", ValueError),
        ("jax.jit(lambda x: jnp.concatenate([x, x[None]]))(jnp.zeros(3))", TypeError),
        ("jax.jit(lambda x: x, donate_argnums=3)(jnp.zeros(3))", ValueError),
        ("raise KeyError('three')", KeyError),
        ("raise RuntimeError('three')", RuntimeError),
    ],
)
def test_a_fault_keeps_its_traceback(line, error, capsys):
    with pytest.raises(error):
        exit_status(in_our_code(line))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "line",
    [
        "raise ValueError('three is no number')",
        "def f(x): raise ValueError('three is no number')\njax.jit(f)(jnp.zeros(3))",
        "try: int('three')\nexcept ValueError: raise ValueError('three is no number') from None",
    ],
)
def test_what_our_code_raises_is_one_line(line, capsys):
    assert exit_status(in_our_code(line)) == 2
    assert capsys.readouterr().err == "error: three is no number\n"


def test_what_others_raise_is_their_own(capsys):
    with pytest.raises(ValueError, match="three"):
        exit_status(raising(ValueError("three")))


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (NonFiniteRun("step 3:\n  5 updates"), 1, "step 3: 5 updates"),
        (WarmStartFailed("the loss is nan"), 1, "the loss is nan"),
        (PermissionError(13, "Permission denied", "/runs"), 1, "/runs: Permission denied"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (
            jax.errors.JaxRuntimeError(
                "RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes.\nbuf"
            ),
            1,
            "RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes.: lower --micro-batch; "
            "--dry-run shows what needs the memory.",
        ),
        *(
            (kind("UNKNOWN: Gloo permute failed: Connection closed\nat"), 1, LOST)
            for kind in (ValueError, RuntimeError)
        ),
    ],
)
def test_what_went_wrong_in_the_run_is_one_line(error, status, line, capsys):
    assert exit_status(raising(error)) == status
    assert capsys.readouterr().err == f"error: {line}\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
@pytest.mark.parametrize("buffering", [1, -1])
def test_standard_output_on_a_full_disk_is_one_line(buffering, monkeypatch, capsys):
    with open("/dev/full", "w", buffering=buffering) as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert exit_status(lambda: print("three") or 0) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: standard output or")
    assert line.endswith("No space left on device: make room on the disk, or redirect the output.")


def test_a_closed_stream_is_the_null_device(monkeypatch):
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert exit_status(lambda: print(sys.stdout.isatty(), sys.stdin.read()) or 0) == 0
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        assert stream.name == os.devnull
        stream.close()


def test_devices_that_are_there_will_do():
    start_jax(5)
    with pytest.raises(ValueError, match=r"devices=17 comes too late: .* with 16 devices"):
        start_jax(17)


def test_a_platform_that_is_not_there_is_one_line(monkeypatch):
    """JAX itself ends in a silent assertion if it sees no NVIDIA GPU."""

    def devices():
        raise AssertionError

    monkeypatch.setattr(jax, "devices", devices)
    with pytest.raises(ValueError, match=r"JAX cannot start: it finds no device .*nvidia-smi"):
        start_jax(None)


def test_types_of_64_bits_are_rejected_before_anything_is_built():
    with jax.enable_x64(True), pytest.raises(ValueError, match=r"JAX_ENABLE_X64 is on: .*unset it"):
        start_jax(None)


@pytest.fixture
def no_cache():
    """JAX that has no folder for its cache, as a user's process starts."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: setting(name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_compilations_are_kept_in_the_users_cache(no_cache, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_compilations()
    assert setting("jax_compilation_cache_dir") == str(tmp_path / "jrl" / "compilations")
    assert os.path.isdir(setting("jax_compilation_cache_dir"))


def test_without_a_place_to_keep_them_nothing_is_kept(no_cache, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    keep_compilations()
    assert setting("jax_compilation_cache_dir") is None


def test_a_user_without_a_home_keeps_nothing(no_cache, monkeypatch):
    """As in a container, whose user has a number only."""

    def unknown_user(number):
        raise KeyError(number)

    monkeypatch.setattr(pwd, "getpwuid", unknown_user)
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    keep_compilations()
    assert setting("jax_compilation_cache_dir") is None


def test_the_users_own_setting_stays():
    before = setting("jax_compilation_cache_dir")
    assert before is not None
    keep_compilations()
    assert setting("jax_compilation_cache_dir") == before
