"""Sixteen fake CPU devices, strict promotion and a compilation cache, before anything touches a
device."""

import atexit
import os
import shutil
import signal
import tempfile
from pathlib import Path

import chex
import jax
import psutil
import pytest
from compiling import FLAGS, trace_quickly

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 16)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Tests compile the same small programs again and again, in this process and in the ones they start.
CACHE = Path(tempfile.gettempdir()) / f"jrl-test-compilations-{jax.__version__}"
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(CACHE)
jax.config.update("jax_compilation_cache_dir", str(CACHE))
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)

trace_quickly()


# Thousands of programs go with their process; to take them apart first takes seconds.
if "PYTEST_XDIST_WORKER" in os.environ:
    atexit.register(os._exit, 0)

# Code of runs that tests start is not recorded as the code of whoever runs them.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="jrl-test-state-")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

# A shell's background job ignores Ctrl-C, and so would the processes that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    parser.addoption(
        "--optimised", action="store_true", help="compile programs as users do, which takes longer"
    )


def pytest_configure(config):
    if config.option.optimised:
        return
    given = os.environ.get("XLA_FLAGS", "").split()
    os.environ["XLA_FLAGS"] = " ".join([*FLAGS, *given])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Whole runs come first: they share programs, which one process then traces once."""
    items.sort(key=lambda item: item.path.parent.name not in ("jrl", "trainer"))


@pytest.fixture(autouse=True, scope="session")
def _sixteen_devices():
    chex.assert_devices_available(16, "cpu")


@pytest.fixture(autouse=True, scope="module")
def _forget_programs():
    """Thousands of compiled programs are gigabytes, and what is wanted again is on disk; but
    tracing takes time too, so they are kept while there is room."""
    yield
    if psutil.Process().memory_info().rss > 3 << 30:
        jax.clear_caches()
