"""Measures this library on one accelerator: a training step, its parts, and what the chip can do.

Each part runs in a process of its own, which has the device's memory to itself:

* ceilings: a large copy and a large bfloat16 matrix product on random numbers;
* step: a training step of a mixture of experts that fills the device, its tokens per second and
  model FLOPs utilisation (`moe.flops.training_flops` over the peak);
* experts: rows times the matrix of their group, each implementation, forward and with gradient;
* dispatch, products, tilings: kernels beside their alternatives (`kernels.py`);
* attention: each implementation, forward and with gradient;
* head: log-probabilities and entropies, from all logits and in chunks;
* decoding: drawing tokens after prompts.

A time is the median over calls that are each waited for; compilation is left out and reported. A
form that fails or does not fit is a line that says so. `--smoke` runs everything once on a CPU, at
sizes that take no time.

    python benchmarks/gpu.py --json gpu.json
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

# Dense bfloat16 operations per second, by datasheet, of chips with the key in their name.
PEAKS = {"B200": 2250e12, "H200": 989.5e12, "H100": 989.5e12, "A100": 312e12, "T4": 65e12}
# 3.6 billion parameters, of which a token meets 0.6.
NETWORK: dict[str, Any] = {
    "vocab_size": 32768,
    "num_layers": 12,
    "d_model": 2048,
    "num_heads": 16,
    "num_kv_heads": 4,
    "head_dim": 128,
    "num_experts": 32,
    "experts_per_token": 4,
    "d_expert": 1408,
    "router_z_coef": 0.0,
    "dtype": "bfloat16",
}
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "num_layers": 1,
    "d_model": 16,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 8,
    "num_experts": 4,
    "d_expert": 8,
}
Figures = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures this library on one accelerator")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--rows", type=int, default=8, help="sequences of a step, halved to fit")
    parser.add_argument("--time", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument(
        "--experts", nargs="+", default=["blocks", "ragged_dot"], help="of the step"
    )
    parser.add_argument("--remat", nargs="+", default=["none", "selective"], help="of the step")
    parser.add_argument("--calls", type=int, default=10, help="timed calls of each form")
    parser.add_argument("--limit", type=float, default=400.0, help="seconds for one part")
    parser.add_argument("--smoke", action="store_true", help="once, on a CPU, in no time")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.rows, arguments.time, arguments.calls = 2, 16, 1
        arguments.experts, arguments.remat = arguments.experts[:1], arguments.remat[-1:]
        os.environ["JAX_PLATFORMS"] = "cpu"
    if arguments.one:
        for one in PARTS[arguments.one](arguments):
            print(json.dumps({"part": arguments.one, **one}), flush=True)
        return
    figures: list[Figures] = []
    for part in arguments.parts:
        figures += in_a_process(part, arguments)
        if arguments.json:
            arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    if not any("milliseconds" in one for one in figures):
        sys.exit("nothing could be measured: each line above says why")


def in_a_process(part: str, arguments: argparse.Namespace) -> list[Figures]:
    """The figures of one part, shown as they come; the process is ended at its limit."""
    figures: list[Figures] = []
    root = str(Path(__file__).parents[1])
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92", **os.environ, "PYTHONPATH": root}
    command = [sys.executable, __file__, *sys.argv[1:], "--one", part]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
        limit = threading.Timer(arguments.limit, child.kill)
        limit.start()
        assert child.stdout is not None
        for line in child.stdout:
            figures.append(json.loads(line))
            show(figures[-1])
        limit.cancel()
    if child.returncode:
        how = "its limit" if child.returncode == -9 else f"status {child.returncode}"
        figures.append({"part": part, "form": "the rest", "failed": f"ended by {how}"})
        show(figures[-1])
    return figures


def show(figures: Figures) -> None:
    """One line: the part, the form, its time, and what else is known."""
    rest = {k: v for k, v in figures.items() if k not in ("part", "form", "milliseconds")}
    took = f"{figures['milliseconds']:>12.3f} ms" if "milliseconds" in figures else " " * 15
    said = ", ".join(
        f"{k} {v:,.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in rest.items()
    )
    print(f"{figures['part']:10}{figures['form']:34}{took}  {said}", flush=True)


def measured(
    form: str, build: Callable[[], tuple[Callable[[], Any], Callable[[float], Figures]]], calls: int
) -> Figures:
    """The figures of one form, or why there are none.

    Args:
      build: makes a call, whose arguments are in place, and what its seconds mean.
    """
    import jax

    try:
        call, meaning = build()
        began = time.perf_counter()
        jax.block_until_ready(call())
        compiled = time.perf_counter() - began
        jax.block_until_ready(call())
        seconds = []
        for _ in range(calls):
            began = time.perf_counter()
            jax.block_until_ready(call())
            seconds.append(time.perf_counter() - began)
    # Whatever a kernel, the compiler or the allocator refuses is a finding about that form alone.
    except Exception as error:
        said = str(error).strip() or type(error).__name__
        return {"form": form, "failed": said.splitlines()[0][:120]}
    median = statistics.median(seconds)
    return {"form": form, "milliseconds": 1e3 * median, **meaning(median), "first_call_s": compiled}


def random(shape: tuple[int, ...], seed: int = 0, dtype: str = "bfloat16") -> Any:
    """Normal numbers, made on the device: zeros can take less time than what is computed with."""
    import jax

    return jax.random.normal(jax.random.key(seed), shape, dtype)


def ceilings(arguments: argparse.Namespace) -> Iterator[Figures]:
    """What the chip does with a copy and with one large product."""
    import jax

    device = jax.devices()[0]
    yield {"form": device.device_kind, "jax": jax.__version__, "date": time.strftime("%Y-%m-%d")}
    elements, side = (2**10, 64) if arguments.smoke else (2**30, 8192)

    def copy():
        x, program = random((elements,)), jax.jit(lambda x: -x)
        return partial(program, x), lambda s: {"gigabytes_per_s": 2 * x.nbytes / s / 1e9}

    def product():
        x, y, program = random((side, side)), random((side, side), 1), jax.jit(lambda x, y: x @ y)
        return partial(program, x, y), lambda s: {"teraflops": 2 * side**3 / s / 1e12}

    yield measured("copy", copy, arguments.calls)
    yield measured(f"product of {side} x {side}", product, arguments.calls)


def network(arguments: argparse.Namespace, **execution: Any) -> Any:
    """The network of the step and of decoding."""
    from moe.config import ModelConfig
    from moe.execution import Execution

    sizes = NETWORK | SMALL if arguments.smoke else NETWORK
    return ModelConfig(**sizes, execution=Execution(**execution))


def step(arguments: argparse.Namespace) -> Iterator[Figures]:
    """Forward, backward and AdamW, float32 weights and moments, for each choice of execution."""
    for experts in arguments.experts:
        for remat in arguments.remat:
            rows = arguments.rows
            while True:
                config = network(arguments, experts=experts, remat=remat)
                form = f"{experts}, remat {remat}, {rows} x {arguments.time}"
                build = partial(training_step, config, rows, arguments.time)
                figures = measured(form, build, arguments.calls)
                yield figures
                if "RESOURCE_EXHAUSTED" not in figures.get("failed", "") or rows == 1:
                    break
                rows //= 2


def training_step(config: Any, rows: int, length: int) -> Any:
    """A call that moves a state on by one step, and what its seconds mean."""
    import jax
    from moe_step import program

    from moe.flops import training_flops
    from moe.weights import initialise, num_parameters

    start, one_step = program(config)
    weights = jax.jit(partial(initialise, config))(jax.random.key(0))
    state = [start(weights)]
    del weights
    tokens = jax.random.randint(jax.random.key(1), (rows, length), 0, config.vocab_size)

    def call():
        # The former state is given up to the step: two would not fit.
        moved, loss = one_step(state.pop(), tokens)
        state.append(moved)
        return loss

    def meaning(seconds: float) -> Figures:
        per_second = rows * length / seconds
        done = per_second * training_flops(config, length)
        figures = {
            "parameters": num_parameters(config),
            "tokens_per_s": per_second,
            "teraflops": done / 1e12,
        }
        peak = peak_of(jax.devices()[0].device_kind)
        return figures if peak is None else figures | {"mfu": done / peak}

    return call, meaning


def peak_of(kind: str) -> float | None:
    """The datasheet's rate of a device of that name, None for one that is not listed."""
    return next((peak for name, peak in PEAKS.items() if name in kind), None)


def experts(arguments: argparse.Namespace) -> Iterator[Figures]:
    """`moe.experts.grouped.dot` and what it is measured by, on as many rows as the step has."""
    import jax
    import jax.numpy as jnp
    from grouped import forms, group_sizes, with_gradient

    config = network(arguments)
    rows = arguments.rows * arguments.time * config.experts_per_token
    inner, outer, groups = config.d_model, config.d_expert, config.num_experts
    x, pull = random((rows, inner)), random((rows, outer), 1)
    weights = random((groups, inner, outer), 2)
    for spread in ("balanced",) if arguments.smoke else ("balanced", "Zipf"):
        sizes = jnp.asarray(group_sizes(spread, rows, groups), jnp.int32)
        for name, form in forms().items():
            if name == "einsum" and spread != "balanced":
                continue

            def forward(form=form, sizes=sizes):
                call = partial(jax.jit(form), x, weights, sizes)
                return call, lambda s: {"teraflops": 2 * rows * inner * outer / s / 1e12}

            def both(form=form, sizes=sizes):
                call = partial(jax.jit(with_gradient(form)), x, weights, pull, sizes)
                return call, lambda s: {"teraflops": 6 * rows * inner * outer / s / 1e12}

            yield measured(f"{name}, {spread}, forward", forward, arguments.calls)
            yield measured(f"{name}, {spread}, both", both, arguments.calls)


def attention(arguments: argparse.Namespace) -> Iterator[Figures]:
    """The implementations of `moe.attention.core`, causal, on rows of the step's length."""
    import jax
    import jax.numpy as jnp

    from moe.attention.core import IMPLEMENTATIONS, core_attention
    from moe.attention.mask import Marks, Mask

    config = network(arguments)
    rows, length, width = max(arguments.rows // 4, 1), arguments.time, config.head_dim
    query = random((rows, length, config.num_heads, width))
    key, value = (random((rows, length, config.num_kv_heads, width), seed) for seed in (1, 2))
    column = jnp.broadcast_to(jnp.arange(length)[None], (rows, length))
    marks = Marks(column, column, jnp.ones_like(column))
    mask = Mask(marks, marks, causal=True, single=True)
    # Queries with keys and weights with values, half of them visible.
    flops = 2 * rows * length**2 * config.num_heads * width
    for name in IMPLEMENTATIONS:

        def value_of(query, key, value, name=name):
            return core_attention(query, key, value, mask, implementation=name)

        def both(query, key, value, value_of=value_of):
            out, back = jax.vjp(value_of, query, key, value)
            return back(out)

        for part, program, times in (("forward", value_of, 1), ("both", both, 3)):

            def build(program=program, times=times):
                call = partial(jax.jit(program), query, key, value)
                return call, lambda s: {"teraflops": times * flops / s / 1e12}

            yield measured(f"{name}, {rows} x {length}, {part}", build, arguments.calls)


def head(arguments: argparse.Namespace) -> Iterator[Figures]:
    """`moe.head` on the tokens of the step and a large vocabulary, with gradients."""
    import jax
    import jax.numpy as jnp
    from vocabulary import forms, with_gradient

    tokens, vocab = (64, 96) if arguments.smoke else (arguments.rows * arguments.time // 2, 131072)
    d_model = network(arguments).d_model
    operands = (
        random((d_model, vocab), dtype="float32") / d_model**0.5,
        random((tokens, d_model), 1),
        jax.random.randint(jax.random.key(2), (tokens,), 0, vocab),
        jnp.ones((2, tokens), jnp.float32),
    )
    for name, form in forms([tokens, d_model, vocab], [vocab // 16, vocab // 4]).items():

        def build(form=form):
            program = with_gradient(form).lower(*operands).compile()
            mebibytes = program.memory_analysis().temp_size_in_bytes / 2**20
            flops = 6 * tokens * d_model * vocab
            return partial(program, *operands), lambda s: {
                "teraflops": flops / s / 1e12,
                "mebibytes": mebibytes,
            }

        yield measured(f"{name}, {tokens} x {vocab}", build, arguments.calls)


def decoding(arguments: argparse.Namespace) -> Iterator[Figures]:
    """Responses in decoding slots: one for each slot and all of one length, and four for each slot
    whose lengths have a long tail."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from decoding import rollout

    from moe.weights import initialise

    config = network(arguments)
    weights = jax.jit(partial(initialise, config))(jax.random.key(0))
    if config.dtype == "bfloat16":
        # Reading the matrices is what a decoding step waits for; a server keeps them halved.
        weights = jax.tree.map(lambda x: x.astype(jnp.bfloat16), weights)
    prompt, response = (4, 4) if arguments.smoke else (256, 256)
    for slots in (2,) if arguments.smoke else (64, 512):
        build = partial(rollout, config, weights, slots, prompt, [response] * slots)
        form = f"{slots} rows, {prompt} + {response} tokens"
        yield measured(form, build, arguments.calls)
    slots = 2 if arguments.smoke else 128
    # Half the rows are shorter than half a response, and the longest tenth hold a third of all
    # tokens.
    tail = response / 2 * np.random.default_rng(5).lognormal(sigma=1.0, size=4 * slots)
    limits = np.clip(tail, 1, 4 * response).astype(int).tolist()
    build = partial(rollout, config, weights, slots, prompt, limits)
    form = f"{slots} slots, {len(limits)} rows of 1 to {max(limits)}"
    yield measured(form, build, arguments.calls)


def of_kernels(part: str, arguments: argparse.Namespace) -> Iterator[Figures]:
    """A part that is in a file of its own."""
    import kernel_products
    import kernels

    parts = {
        "dispatch": kernels.dispatch,
        "products": kernel_products.products,
        "tilings": kernel_products.tilings,
    }
    yield from parts[part](arguments)


PARTS = {
    "ceilings": ceilings,
    "step": step,
    "experts": experts,
    "dispatch": partial(of_kernels, "dispatch"),
    "products": partial(of_kernels, "products"),
    "tilings": partial(of_kernels, "tilings"),
    "attention": attention,
    "head": head,
    "decoding": decoding,
}

if __name__ == "__main__":
    main()
