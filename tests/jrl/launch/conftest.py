import os
import socket

import pytest
from places import ROOT, SUPPORT

SSH = """#!/bin/sh
while [ "$1" = -o ]; do shift 2; done
if [ "$1" = down ]; then
    echo "ssh: connect to host down port 22: No route to host" >&2
    exit 255
fi
shift
exec sh -c "$1"
"""


@pytest.fixture
def ssh(monkeypatch, tmp_path):
    path = tmp_path / "bin" / "ssh"
    path.parent.mkdir()
    path.write_text(SSH)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SUPPORT), str(ROOT)]))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def free_port():
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]
