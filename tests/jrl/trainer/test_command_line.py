import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.trainer.command_line import exit_status, keep_compilations, start_jax
from jrl.trainer.config import RunConfig
from jrl.trainer.loop import NonFiniteRun
from jrl.trainer.warm_start import WarmStartFailed


def raising(error):
    def command():
        raise error

    return command


def setting(name):
    return getattr(jax.config, name)


def test_a_command_has_its_own_status():
    assert exit_status(lambda: 3) == 3


def test_what_our_code_says_is_one_line(capsys):
    assert exit_status(lambda: RunConfig(steps=0) and 0) == 2
    assert capsys.readouterr().err == "error: steps=0 must be at least 1.\n"


@pytest.mark.parametrize(
    "fault",
    [
        lambda: int("three"),
        lambda: np.zeros(3).reshape(2),
        lambda: jnp.zeros(3).reshape(2),
        lambda: jax.jit(lambda x: x.reshape(2))(jnp.zeros(3)),
        raising(KeyError("three")),
        raising(RuntimeError("three")),
    ],
)
def test_a_fault_keeps_its_traceback(fault, capsys):
    with pytest.raises((ValueError, TypeError, KeyError, RuntimeError)):
        exit_status(fault)
    assert capsys.readouterr().err == ""


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
    ],
)
def test_what_went_wrong_in_the_run_is_one_line(error, status, line, capsys):
    assert exit_status(raising(error)) == status
    assert capsys.readouterr().err == f"error: {line}\n"


def test_the_traceback_setting_is_put_back():
    before = setting("jax_traceback_filtering")
    exit_status(lambda: 0)
    assert setting("jax_traceback_filtering") == before


def test_devices_that_are_there_will_do():
    start_jax(5)
    with pytest.raises(ValueError, match=r"devices=9 comes too late: .* with 8 devices"):
        start_jax(9)


@pytest.fixture
def no_cache():
    """JAX without a folder for its cache, as a user's process starts."""
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


def test_the_users_own_setting_stays():
    before = setting("jax_compilation_cache_dir")
    assert before is not None
    keep_compilations()
    assert setting("jax_compilation_cache_dir") == before
