"""The bucket of `bucket_server.py`, in a process of its own; children of this one find it too."""

import subprocess
import sys
from contextlib import contextmanager

import fsspec
import pytest
from places import SUPPORT

from jrl.runs import directory


@contextmanager
def bucket():
    """Address ``gs://bucket`` of an empty bucket."""
    server = subprocess.Popen(
        [sys.executable, str(SUPPORT / "bucket_server.py"), "0"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        address = f"http://localhost:{int(server.stdout.readline())}"
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("STORAGE_EMULATOR_HOST", address)  # of gcsfs
            environment.setenv("TENSORSTORE_GCS_HTTP_URL", address)
            environment.setenv("NO_GCE_CHECK", "true")  # for credentials, which need none
            _forget_clients()
            yield "gs://bucket"
    finally:
        _forget_clients()
        server.kill()
        server.communicate()


def _forget_clients():
    """Forget clients of another server."""
    directory.bucket_files.cache_clear()
    for protocol in ("gs", "file"):
        fsspec.get_filesystem_class(protocol).clear_instance_cache()
