"""Times decoding: slots that are kept full, fixed batches, and `generate` of transformers.

Three questions, each answered side by side in one run, on random weights and with responses whose
lengths are given, since no stop token ever comes:

* Lengths with a heavy tail (log-normal, the longest 8 times the median): the engine with all
  requests at once, beside the same engine given as many as it has slots, the next ones when the
  last of them has ended, once with every step over all slots and once over fewer where few rows
  are left. Their tokens must be equal, bit for bit.
* Equal lengths: the same three.
* ``--peer PYTHON``, an interpreter with torch and transformers: dense models, 100 tokens after
  prompts of 8, beside `peer_generate.py` on the same number of threads, with both of its caches.

Compilation is left out. ``--threads 2`` takes two processors on either side. ``--model tiny`` is so
small that filling slots costs as much as a few steps.

    python -m benchmarks.rollout --threads 2 --peer path/to/peer/bin/python
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moe.config import Model

DENSE: dict[str, dict[str, Any]] = {
    "tiny-dense": {
        "vocab_size": 20,
        "num_layers": 3,
        "d_model": 96,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 24,
        "d_ff": 448,
    },
    "small-dense": {
        "vocab_size": 2048,
        "num_layers": 6,
        "d_model": 256,
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 32,
        "d_ff": 1024,
    },
}
PROMPT, NEW = 8, 100
CACHES = ("dynamic", "static")


def main() -> None:
    parser = argparse.ArgumentParser(description="Times decoding")
    parser.add_argument("--threads", type=int, default=2, help="CPU cores to use")
    parser.add_argument("--rounds", type=int, default=3, help="rounds, alternating between systems")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--median", type=int, default=32, help="median tokens per response")
    parser.add_argument("--model", default="small", help="preset for the comparison of lengths")
    parser.add_argument("--peer", help="Python of an environment with torch and transformers")
    parser.add_argument("--peer-models", nargs="+", choices=list(DENSE), default=list(DENSE))
    parser.add_argument("--peer-rows", type=int, nargs="+", default=[64, 1])
    parser.add_argument("--smoke", action="store_true", help="a single run at a tiny size")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--one", choices=list(DENSE), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.rounds, arguments.slots, arguments.requests, arguments.median = 1, 4, 64, 4
        arguments.model = "tiny"
    # Before JAX starts: XLA sizes its thread pool by the processors it may use.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_NUM_CPU_DEVICES"] = str(arguments.threads)
    if arguments.one:
        print(json.dumps(dense(arguments.one, arguments.peer_rows)))
        return
    figures = over_lengths(arguments)
    if arguments.peer:
        figures["peer"] = beside_peer(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


def heavy_tailed(number: int, median: int) -> list[int]:
    """Lengths at even quantiles of the log-normal whose longest is 8 times the median."""
    normal = statistics.NormalDist()
    scores = [normal.inv_cdf((place + 0.5) / number) for place in range(number)]
    return [round(median * math.exp(math.log(8) * score / scores[-1])) for score in scores]


def over_lengths(arguments: argparse.Namespace) -> dict[str, Any]:
    """Slots kept full and fixed batches, for both kinds of lengths."""
    import random

    import jax

    heavy = heavy_tailed(arguments.requests, arguments.median)
    random.Random(0).shuffle(heavy)
    kinds = {"heavy tail": heavy, "equal": [arguments.median] * arguments.requests}
    engine, rollout = engine_of(arguments.model, arguments.slots, PROMPT + max(heavy))
    print(
        f"jax {jax.__version__}, {arguments.model}, {arguments.slots} slots, "
        f"{arguments.requests} responses, {arguments.threads} thread(s)"
    )
    print(f"{'lengths':12}{'batches':14}{'utilisation':>12}{'median s':>10}{'least s':>9}", end="")
    print(f"{'tokens/s':>10}{'x fixed':>9}{'quartiles':>14}")
    found: dict[str, Any] = {"jax": jax.__version__, "slots": arguments.slots}
    for kind, lengths in kinds.items():
        sides: dict[str, Callable[[], dict[Any, Any]]] = {
            "fixed": lambda lengths=lengths: rollout(lengths, arguments.slots, alone=False),
            "live rows": lambda lengths=lengths: rollout(lengths, arguments.slots),
            "kept full": lambda lengths=lengths: rollout(lengths, len(lengths)),
        }
        first, *others = (side() for side in sides.values())
        if not all(equal(first, other) for other in others):
            sys.exit(f"{kind}: fixed batches sampled other tokens than continuous batching.")
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        utilisation = {}
        for _ in range(arguments.rounds):
            for name, side in sides.items():
                before = engine.usage.copy()
                began = time.perf_counter()
                side()
                seconds[name].append(time.perf_counter() - began)
                utilisation[name] = engine.usage.since(before).utilisation
        for name, taken in seconds.items():
            ratios = [a / b for a, b in zip(seconds["fixed"], taken, strict=True)]
            median = statistics.median(taken)
            print(
                f"{kind:12}{name:14}{utilisation[name]:>12.3f}{median:>10.3f}{min(taken):>9.3f}"
                f"{sum(lengths) / median:>10,.0f}{statistics.median(ratios):>9.2f}{spread(ratios)}"
            )
        found[kind] = {"tokens": sum(lengths), "seconds": seconds, "utilisation": utilisation}
    return found


def equal(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    """Whether the same requests were answered with the same tokens."""
    same = (list(tokens) == list(other[key]) for key, tokens in one.items())
    return one.keys() == other.keys() and all(same)


def spread(ratios: list[float]) -> str:
    """Quartiles, to be printed after the median."""
    if len(ratios) < 2:
        return ""
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{low:>8.2f}-{high:.2f}"


def engine_of(model: str | Any, slots: int, columns: int) -> tuple[Any, Any]:
    """An engine with random weights, and a call that serves requests in batches of a size: it
    gives all tokens by the numbers of the requests, each of which has a prompt of its own. Fewer
    rows are computed where few are left, unless it is told that they are not `alone`.

    Slots are shared among as many devices as there are processors, where they can be: products as
    small as these do not use more than one processor each."""
    from functools import partial

    import jax
    import numpy as np

    from jrl.rollout.decoding.engine import Engine
    from jrl.rollout.decoding.mesh_backend import MeshBackend
    from jrl.rollout.decoding.requests import Request
    from jrl.rollout.decoding.slots import Decoder
    from jrl.rollout.sampling import Sampling
    from moe.config import PRESETS
    from moe.placement import shardings
    from moe.weights import initialise
    from sharding.folding import Layout, fold

    config = PRESETS[model](20) if isinstance(model, str) else model
    weights = jax.jit(partial(initialise, config))(jax.random.key(0))
    ranks = math.gcd(slots, jax.device_count())
    mesh = fold(Layout(dp=ranks), jax.devices()[:ranks])
    weights = jax.device_put(weights, shardings(Model(config, mesh)))
    decoder = Decoder(config, mesh, pad_id=0, stop_ids=(config.vocab_size,))
    backend = MeshBackend(decoder, mesh)
    engine = Engine(backend, slots=slots, max_length=columns, key=jax.random.key(1))

    def rollout(lengths: list[int], batch: int, alone: bool = True) -> dict[int, np.ndarray]:
        engine.load(weights, 0)
        shape = len(lengths), PROMPT
        prompts = np.random.default_rng(0).integers(0, config.vocab_size, shape)
        given = [
            Request(number, 0, ids.astype(np.int32), length)
            for number, (ids, length) in enumerate(zip(prompts, lengths, strict=True))
        ]
        tokens = {}
        for first in range(0, len(given), batch):
            engine.submit(given[first : first + batch], Sampling())
            while done := engine.poll(alone):
                tokens |= {t.request.prompt: t.tokens for t in done}
        engine.release()
        return tokens

    return engine, rollout


def dense(model: str, rows: list[int]) -> dict[str, Any]:
    """Seconds of our own decoding of a dense model, in this process, by the number of rows."""
    from moe.config import ModelConfig
    from moe.weights import num_parameters

    config = ModelConfig(**DENSE[model], num_experts=0)
    seconds = {}
    for number in rows:
        _, rollout = engine_of(config, number, PROMPT + NEW)
        seconds[str(number)] = timed(lambda rollout=rollout, n=number: rollout([NEW] * n, n))
    return {"seconds": seconds, "parameters": num_parameters(config)}


def timed(call: Callable[[], Any], calls: int = 3) -> list[float]:
    """Seconds of calls after the first, which compiles."""
    call()
    seconds = []
    for _ in range(calls):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return seconds


def beside_peer(arguments: argparse.Namespace) -> dict[str, Any]:
    """A process per system and round, in turn; prints a line per system and number of rows."""
    found: dict[str, Any] = {}
    print(f"\n{'dense':13}{'rows':>5}  {'system':23}{'parameters':>12}{'median s':>10}", end="")
    print(f"{'least s':>9}{'tokens/s':>10}{'ours / it':>11}{'quartiles':>14}")
    for model in arguments.peer_models:
        rounds: dict[str, list[dict[str, Any]]] = {}
        for _ in range(arguments.rounds):
            ours = [sys.executable, __file__, "--one", model]
            rounds.setdefault("jrl", []).append(in_turn(ours, arguments))
            for kind in CACHES:
                script = str(Path(__file__).with_name("peer_generate.py"))
                theirs = [arguments.peer, script, "--model", model, "--cache", kind]
                rounds.setdefault(f"transformers {kind}", []).append(in_turn(theirs, arguments))
        for rows in arguments.peer_rows:
            ours = [statistics.median(one["seconds"][str(rows)]) for one in rounds["jrl"]]
            for name, several in rounds.items():
                medians = [statistics.median(one["seconds"][str(rows)]) for one in several]
                ratios = [theirs / own for theirs, own in zip(medians, ours, strict=True)]
                median = statistics.median(medians)
                least = min(min(one["seconds"][str(rows)]) for one in several)
                print(
                    f"{model:13}{rows:>5}  {name:23}{several[0]['parameters']:>12,}{median:>10.3f}"
                    f"{least:>9.3f}{rows * NEW / median:>10,.0f}"
                    f"{statistics.median(ratios):>11.2f}{spread(ratios)}"
                )
        found[model] = rounds
    return found


def in_turn(command: list[str], arguments: argparse.Namespace) -> dict[str, Any]:
    """One measurement in a process of its own, so that every round starts alike."""
    command += ["--threads", str(arguments.threads)]
    command += ["--peer-rows", *map(str, arguments.peer_rows)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
