"""Attention and experts in processes of their own, by Gloo or by reading from each other."""

import os
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import NamedTuple

import numpy as np
import pytest
from places import ROOT, SUPPORT
from split_process import LONGEST_WAIT, MICRO_BATCHES
from two_sides import STEPS, live, noise, one_side

pytestmark = pytest.mark.slow
CLOSE = 1e-6
"""float32: the sums of a token's experts come in another order."""


SOON = 30.0
"""Seconds after which the others have ended, on a busy machine too."""


class End(NamedTuple):
    """Status and standard error of a process, and when it ended."""

    status: int
    errors: str
    when: float


def run_together(folder, count, m2n, fails=-1, how="dies"):
    """The end of each process; one that hangs is killed when the others have ended."""
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

    def end(process):
        errors = process.communicate(timeout=120)[1]
        return End(process.returncode, errors, time.time())

    others = [p for number, p in enumerate(processes) if (number, how) != (fails, "hangs")]
    try:
        with ThreadPoolExecutor(count) as pool:
            ends = dict(zip(others, pool.map(end, others), strict=True))
    finally:
        for process in processes:
            process.kill()
    return [ends.get(process) or end(process) for process in processes]


@pytest.mark.parametrize(("m2n", "count"), [*product(["collective", "transfer"], [2, 4])])
def test_processes_decode_as_one_process(tmp_path, m2n, count):
    """In two each has a side, in four half of one."""
    for status, errors, _ in run_together(tmp_path, count, m2n):
        assert status == 0, errors[-3000:]
    wanted, wanted_choices, _ = one_side(sampled=True)
    wanted_tokens = np.argmax(wanted + noise(True), axis=-1)
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
        tokens = np.argmax(found["logits"] + noise(True), axis=-1)
        np.testing.assert_array_equal(tokens[of_rows], wanted_tokens[of_rows])
        np.testing.assert_array_equal(found["choices"][of_rows], wanted_choices[of_rows])
        # What all of attention counts comes to every process that has none of it.
        told = [[i, token + 1, i] for token in range(STEPS) for i in range(MICRO_BATCHES)]
        assert found["told"].tolist() == ([] if attends else told)
    assert np.all(seen == 1)
    # No side has devices in two processes, so that each message is between processes.
    assert offered == (int(found["sent"]) if m2n == "transfer" else 0)


CONNECTED = re.compile(
    r"\[Gloo\] Rank |\d+ is connected to \d+ peer ranks\.|"
    r" Expected number of connected peer ranks is : \d+"
)
"""What Gloo says of a connection. Its threads write into each other's lines."""


@pytest.mark.parametrize(
    ("m2n", "count", "how", "fails"),
    [
        ("collective", 2, "dies", 1),
        ("transfer", 2, "dies", 1),
        ("transfer", 2, "hangs", 0),
        ("collective", 4, "dies", 3),
    ],
)
def test_a_process_that_fails_ends_the_others_with_one_line(tmp_path, m2n, count, how, fails):
    """The coordinator does not die: if it does, JAX itself may be the first to end the others. Gloo
    decides how long a collective waits for a living process."""
    ends = run_together(tmp_path, count, m2n, fails, how)
    assert ends.pop(fails).status == -9
    failed = (tmp_path / f"{fails}.npz.failed").stat().st_mtime
    for status, errors, when in ends:
        assert status == 1, errors
        assert when - failed < SOON + (how == "hangs") * LONGEST_WAIT
        assert ("has sent nothing for 20 s" in errors) == (how == "hangs"), errors
        lines = [line for line in errors.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1 and "another process of the run has ended" in lines[0], errors
        # Gloo tells of its connections, and who waited in vain says so.
        known = 'm2n="transfer": process 0 has sent nothing', *lines
        others = CONNECTED.sub("", errors).splitlines()
        assert [line for line in others if line and not line.startswith(known)] == [], errors
