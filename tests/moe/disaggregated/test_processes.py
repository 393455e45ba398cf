"""Attention and experts in processes of their own, by Gloo or by reading from each other."""

import os
import socket
import subprocess
import sys

import numpy as np
import pytest
from places import ROOT, SUPPORT
from two_sides import live, one_side

pytestmark = pytest.mark.slow
CLOSE = 1e-6
"""float32: the sums of a token's experts come in another order."""


def run_together(folder, count, m2n, fails=-1, how="dies"):
    """Status and standard error of each process; one that hangs is killed when the others have
    ended."""
    with socket.create_server(("", 0)) as server:
        port = str(server.getsockname()[1])
    command = [sys.executable, str(SUPPORT / "split_process.py"), str(count), port]
    processes = [
        subprocess.Popen(
            [*command, str(number), str(folder / f"{number}.npz"), str(fails), how, m2n],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(count)
    ]
    try:
        others = [p for number, p in enumerate(processes) if (number, how) != (fails, "hangs")]
        ends = {process: process.communicate(timeout=120)[1] for process in others}
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return [(process.returncode, ends.get(process, "")) for process in processes]


@pytest.mark.parametrize("m2n", ["collective", "transfer"])
def test_processes_decode_what_one_does(tmp_path, m2n, count=2):
    for status, errors in run_together(tmp_path, count, m2n):
        assert status == 0, errors[-3000:]
    wanted, wanted_choices, _ = one_side()
    seen, offered = np.zeros(wanted.shape[:2], int), 0
    for number in range(count):
        with np.load(tmp_path / f"{number}.npz") as file:
            found = {name: file[name] for name in file.files}
        offered += int(found["offered"])
        attends = number < count // 2
        assert (found["attention"] > 0) == attends and (found["experts"] > 0) != attends
        here = ~np.isnan(found["logits"][..., 0])
        seen += here
        of_rows = here & live()
        np.testing.assert_allclose(found["logits"][of_rows], wanted[of_rows], atol=CLOSE)
        np.testing.assert_array_equal(found["choices"][here], wanted_choices[here])
    assert np.all(seen == 1)
    # No side has devices in two processes, so that each message is between processes.
    assert offered == (int(found["sent"]) if m2n == "transfer" else 0)


@pytest.mark.parametrize(
    ("m2n", "how", "fails"),
    [("collective", "dies", 1), ("transfer", "dies", 1), ("transfer", "hangs", 0)],
)
def test_a_process_that_fails_ends_the_other_with_one_line(tmp_path, m2n, how, fails):
    """Where it dies not that of the coordinator, without which JAX itself may be the first to end
    the others. How long a collective waits for who lives is Gloo's affair."""
    ends = run_together(tmp_path, 2, m2n, fails, how)
    (status, errors), (killed, _) = ends[1 - fails], ends[fails]
    assert killed == -9
    assert status == 1, errors
    assert ("has sent nothing for 20 s" in errors) == (how == "hangs"), errors
    lines = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "another process of the run has ended" in lines[0], errors
