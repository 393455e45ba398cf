"""Where gathering all tokens overtakes sending each to its experts, on the devices at hand.

Times a layer of experts, forward and backward, under each way of dispatch, for more and more
experts per token: an all-gather sends the same for any number, an exchange more for each. Routing
is even and buffers have room for just that, so that an exchange sends what the formulas count.
Where the two take the same time, the rate of an all-to-all follows from what both send
(`moe.experts.dispatch.cost`); it is what to give as ``--exchange-rate``, and where dispatch is
chosen by itself (the default) that is all there is to set. All devices are one group, in one
domain.

    python -m benchmarks.dispatch --devices 8       fake ones, or all that are there without
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

WAYS = ("all_gather", "all_to_all", "ragged")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Times the token dispatch methods on these devices"
    )
    parser.add_argument("--devices", type=int, help="fake CPU devices (default: real ones)")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens per device")
    parser.add_argument("--width", type=int, default=512, help="elements per token")
    parser.add_argument("--experts-per-device", type=int, default=2)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=7, help="alternating timed calls")
    parser.add_argument("--json", type=Path, help="file for the results")
    given = parser.parse_args(arguments)
    if given.devices is not None:
        import jax

        jax.config.update("jax_num_cpu_devices", given.devices)
    figures = measure(given)
    print(report(figures))
    if given.json:
        given.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each way by experts per token, what formulas say of them, and the rate."""
    import jax

    from moe.experts.dispatch.cost import predict_seconds, supported_dispatchers
    from sharding.costs.hardware import UNKNOWN
    from sharding.folding import Layout, fold

    number = jax.device_count()
    if number < 2:
        raise SystemExit(
            "one device sends nothing: use --devices 8, or a machine with more devices."
        )
    mesh = fold(Layout(dp=number, ep=number))
    ways = supported_dispatchers(mesh)
    exchange = ways[-1]
    rows = []
    for k in range(1, number + 1):
        programs = {way: program(way, k, mesh, given) for way in ("all_gather", exchange)}
        takes = in_turn(programs, given.rounds)
        sends = predict_seconds(exchange_of(k, number, given), mesh.layout, UNKNOWN)
        rows.append(
            {
                "k": k,
                "seconds": takes,
                "sent, all-gather 1": sends[exchange] / sends["all_gather"],
            }
        )
    device = jax.devices()[0]
    return {
        "device": f"{number} x {device.device_kind}",
        "exchange": exchange,
        "dtype": given.dtype,
        "tokens": given.tokens,
        "width": given.width,
        "rows": rows,
        "exchange_rate": rate_of(rows, exchange),
    }


def exchange_of(k: int, devices: int, given: argparse.Namespace) -> Any:
    """What a layer sends, with room for even routing."""
    from moe.experts.dispatch.cost import TokenExchange

    itemsize = 2 if given.dtype == "bfloat16" else 4
    sizes = devices * given.experts_per_device, k, given.width, itemsize
    return TokenExchange(*sizes, peer_capacity=min(1.0, k / devices))


def program(way: str, k: int, mesh: Any, given: argparse.Namespace) -> Any:
    """A layer's gradient by its tokens and weights, compiled, with its operands."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from moe.execution import Dispatch, Execution
    from moe.experts.dispatch.choice import dispatch
    from moe.router.routing import Routing
    from moe.weights import Experts

    number = mesh.size(mesh.ep)
    experts, hidden = number * given.experts_per_device, 8
    keys = jax.random.split(jax.random.key(0), 3)
    weights = Experts(
        router=jnp.zeros((given.width, experts)),
        gate_up=jax.random.normal(keys[0], (experts, given.width, 2, hidden)) / given.width**0.5,
        down=jax.random.normal(keys[1], (experts, hidden, given.width)) / hidden**0.5,
    )
    x = jax.random.normal(keys[2], (number * given.tokens, given.width), given.dtype)
    # Each token's experts lie with k devices, one after the other: all get as many.
    token = jnp.arange(x.shape[0])[:, None]
    device = (token + jnp.arange(k)) % number
    expert = device * given.experts_per_device + token // number % given.experts_per_device
    routing = Routing(expert.astype(jnp.int32), jnp.full(expert.shape, 1 / k, jnp.float32))
    own, rows = P(mesh.ep, mesh.etp), P(mesh.axes)

    def layer(weights, x, routing):
        execution = Execution(dispatch=cast(Dispatch, way), buffer_factor=1.0)
        out, _ = dispatch(weights, x, routing, mesh, execution)
        return out

    def total(weights, x, routing):
        spec = Experts(router=P(), gate_up=P(mesh.ep, None, None, mesh.etp), down=own)
        out = jax.shard_map(layer, mesh=mesh.mesh, in_specs=(spec, rows, rows), out_specs=rows)(
            weights, x, routing
        )
        return jnp.sum(out.astype(jnp.float32))

    places = jax.tree.map(lambda _: NamedSharding(mesh.mesh, rows), (x, routing))
    operands = weights, *jax.device_put((x, routing), places)
    compiled = jax.jit(jax.grad(total, argnums=(0, 1))).lower(*operands).compile()
    return lambda: jax.block_until_ready(compiled(*operands))


def in_turn(programs: dict[str, Any], rounds: int) -> dict[str, float]:
    """Median seconds of each, one after the other so that a slow moment meets all."""
    taken: dict[str, list[float]] = {name: [] for name in programs}
    for number in range(rounds + 1):
        for name, run in programs.items():
            start = time.perf_counter()
            run()
            if number:
                taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in taken.items()}


def rate_of(rows: Sequence[dict[str, Any]], exchange: str) -> float | None:
    """What an exchange sends where it takes as long as an all-gather, on the line between two
    numbers of experts; None where it is always slower, what it sends at most where always quicker.
    """
    before: tuple[float, float] | None = None
    for row in rows:
        sent, takes = row["sent, all-gather 1"], row["seconds"]
        ahead = takes["all_gather"] - takes[exchange]
        if ahead <= 0:
            if before is None:
                return None
            part = before[1] / (before[1] - ahead)
            return before[0] + part * (sent - before[0])
        before = sent, ahead
    return None if before is None else before[0]


def report(figures: dict[str, Any]) -> str:
    """A table and what to set."""
    exchange = figures["exchange"]
    lines = [
        f"{figures['device']}, {figures['tokens']} tokens of {figures['width']} {figures['dtype']} "
        "elements each, forward and backward",
        f"{'k':>3} {'all_gather':>12} {exchange:>12} {'sent':>10}",
    ]
    for row in figures["rows"]:
        takes, sent = row["seconds"], row["sent, all-gather 1"]
        lines.append(
            f"{row['k']:>3} {takes['all_gather'] * 1e3:>9.2f} ms {takes[exchange] * 1e3:>9.2f} ms "
            f"{sent:>9.0%}"
        )
    rate = figures["exchange_rate"]
    if rate is None:
        lines.append(f"all_gather is always faster here: --dispatch all_gather, not {exchange}.")
    else:
        lines.append(f"equal time where {exchange} sends {rate:.0%}: --exchange-rate {rate:.2f}")
    return "\n".join(lines)


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except KeyboardInterrupt:
        raise SystemExit(130) from None
