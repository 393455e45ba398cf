"""A program that a launcher starts in place of the training: it says what it was given.

    python -m launched_program [--fail-in N] [--wait] [--drained-of N] ... --process-id N

--wait waits for SIGTERM, with a file ready-N in the working directory; --fail-in N ends process N
with status 3 once the others wait; --drained-of N ends all of N processes as drained, with the
file drain.json of the working directory as record, if there is one.
"""

import signal
import sys
import time
from pathlib import Path


def end(signum, frame):
    print("saved", flush=True)
    sys.exit(0)


def value(words, flag):
    return words[words.index(flag) + 1]


def main(words):
    signal.signal(signal.SIGTERM, end)
    print(*words, flush=True)
    print("to standard error", file=sys.stderr, flush=True)
    if "--fail-in" in words and value(words, "--fail-in") == words[-1]:
        while len(list(Path().glob("ready-*"))) < int(value(words, "--num-processes")) - 1:
            time.sleep(0.02)
        sys.exit(3)
    if value(words, "--num-processes") == value([*words, "--drained-of", ""], "--drained-of"):
        if words[-1] == "0" and Path("drain.json").exists():
            Path("run/faults").mkdir(parents=True)
            Path("drain.json").rename("run/faults/drain-1.json")
        sys.exit(75)
    if "--wait" in words:
        Path(f"ready-{words[-1]}").touch()
        time.sleep(60)
        sys.exit("nobody asked it to end")


if __name__ == "__main__":
    main(sys.argv[1:])
