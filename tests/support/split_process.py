"""One of several processes that decode together, some with attention and some with experts.

    python split_process.py COUNT PORT NUMBER FILE FAILS HOW M2N

Four devices in all; tokens are drawn, messages travel as M2N says. What it has of the logits and
choices goes to FILE, with the bytes that it let others pull and what it was told. The process of
number FAILS is killed after a token if HOW is "dies", or does nothing more if it is "hangs",
and makes FILE.failed then; tokens come from the batch, so that none waits to look at them.
"""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
from two_sides import CONFIG, sides, split_mesh, two_sides

from jrl.command_line import exit_status, start_jax
from jrl.processes.coordinator import Processes
from moe.disaggregated import m2n as m2n_of
from moe.disaggregated.runner import Runner

SPLIT, MICRO_BATCHES = "dp2 / ep2", 4
PAUSE = 3.0
"""Seconds before a process dies, in which the others enqueue what they can."""
LONGEST_WAIT = 20.0
"""Seconds for a message, within which its programs are compiled."""


def decode(count: int, port: str, number: int, file: str, fails: int, how: str, m2n: str) -> int:
    start_jax(4, Processes(f"localhost:{port}", num_processes=count, process_id=number))
    m2n_of.TIMEOUT_SECONDS = LONGEST_WAIT
    mesh = split_mesh(SPLIT)
    runner = Runner(CONFIG, mesh, m2n=m2n, records_choices=True)
    offered, offer = 0, m2n_of._TransferServer.offer

    def counted(office, to, messages):
        nonlocal offered
        offered += sum(message.nbytes for message in messages)
        offer(office, to, messages)

    m2n_of._TransferServer.offer = counted

    def goes_on(token: int) -> bool:
        if token and number == fails:
            if how == "dies":
                time.sleep(PAUSE)
            Path(f"{file}.failed").touch()
            if how == "hangs":
                time.sleep(3600)
            os.kill(os.getpid(), signal.SIGKILL)
        return True

    heard: list[list[int]] = []

    def told(i: int, counts) -> None:
        heard.append([i, *np.asarray(counts)[0].tolist()])

    weights = sides(mesh)
    sampled = True if fails < 0 else None
    logits, choices, _ = two_sides(
        runner, weights, MICRO_BATCHES, goes_on=goes_on, told=told, sampled=sampled
    )
    held = sum(x.nbytes for side in (weights.attention, weights.rest) for x in leaves(side))
    routed = sum(x.nbytes for x in leaves(weights.experts))
    counts = {"attention": held, "experts": routed, "sent": runner.bytes_sent, "offered": offered}
    np.savez(file, logits=logits, choices=choices, told=heard, **counts)
    return 0


def leaves(side):
    import jax

    return [shard.data for leaf in jax.tree.leaves(side) for shard in leaf.addressable_shards]


if __name__ == "__main__":
    count, port, number, file, fails, *ways = sys.argv[1:]
    sys.exit(exit_status(lambda: decode(int(count), port, int(number), file, int(fails), *ways)))
