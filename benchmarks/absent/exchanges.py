"""Bytes that token dispatch sends inside servers and between them, read off programs for GPUs.

    python -m benchmarks.absent.exchanges                # every method, for eight servers of eight

Programs are compiled for absent H100s, an experts layer forward and backward. Buffers count whole,
used or not. Beside them is what the planner says (`sharding.costs.dispatch`).
"""

import argparse
import itertools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SERVERS, DEVICES = 8, 8
TOKENS, EXPERTS, K, WIDTH, HIDDEN = 256, 128, 8, 512, 256
"""Tokens of a device; experts of all, and of a token; elements of a token, and of an expert."""
METHODS = ("all_gather", "all_to_all", "two_level", "two_level_ragged")
KINDS = ("all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all")
_GROUP = re.compile(r"replica_groups=(?:\{\{([\d,]+)\}|mesh\['pp'=1,'dp_ep'=(\d+))")
"""The first group, written out, or all devices of the mesh."""
Sent = dict[str, int]
"""Bytes that a device receives from its server ("inside") and from others ("across")."""


def compiled_bytes(text: str) -> Sent:
    """Bytes of the collectives of a scheduled program.

    Args:
      text: of ``compiled.as_text()``, for GPUs.
    """
    from sharding.overlap import computations, shapes_of_type

    total = {"inside": 0, "across": 0}
    for one in itertools.chain.from_iterable(computations(text).values()):
        kind = one.operation.removesuffix("-start")
        if kind not in KINDS:
            continue
        listed, number = _GROUP.findall(one.attributes)[0]
        group = list(map(int, listed.split(","))) if listed else list(range(int(number)))
        arrays = [bits * math.prod(shape) // 8 for bits, shape in shapes_of_type(one.result)]
        if kind != one.operation:
            # Operands, and then as many results; of slices, one.
            arrays = arrays[-1:] if "ragged" in kind else arrays[len(arrays) // 2 :]
        size = sum(arrays)
        shard = size if kind == "reduce-scatter" else size // len(group)
        near = sum(device // DEVICES == group[0] // DEVICES for device in group)
        total["inside"] += shard * (near - 1)
        total["across"] += shard * (len(group) - near)
    return total


def planned_bytes(method: str) -> Sent:
    """The same of the planner's collectives."""
    from sharding.costs.dispatch import TokenDispatch
    from sharding.costs.hardware import HARDWARE
    from sharding.folding import Layout

    layout = Layout.parse(_layout())
    dispatch = TokenDispatch(
        method, layout, TOKENS, TOKENS, K, WIDTH, 2, layout.ep * TOKENS, server_devices=DEVICES
    )
    total = {"inside": 0, "across": 0}
    forward, backward = dispatch.transfers()
    for transfer in [*forward, *backward]:
        n = transfer.group(layout)
        shard = transfer.bytes if transfer.kind == "all_gather" else transfer.bytes // n
        near = transfer.members_in_domain(layout, HARDWARE["h100"])
        total["inside"] += shard * (near - 1)
        total["across"] += shard * (n - near)
    return total


def compile_layer(method: str) -> str:
    """Scheduled program of an experts layer, forward and backward."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from benchmarks.absent import compilers
    from moe.execution import TWO_LEVELS, Execution
    from moe.experts.dispatch.choice import dispatch
    from moe.router.routing import Routing
    from moe.weights import Experts
    from sharding.folding import Layout, fold

    mesh = fold(Layout.parse(_layout()), compilers.devices("h100", f"1x{SERVERS}x{DEVICES}"))
    server_devices = DEVICES if method in TWO_LEVELS else None
    execution = Execution(dispatch=method, server_devices=server_devices)

    def layer(gate_up: Any, down: Any, x: Any, ids: Any, probs: Any) -> Any:
        def run(gate_up: Any, down: Any, x: Any, probs: Any) -> Any:
            experts = Experts(jnp.zeros(()), gate_up, down)
            return dispatch(experts, x, Routing(ids, probs), mesh, execution, product="batched")

        out, back, _ = jax.vjp(run, gate_up, down, x, probs, has_aux=True)
        return out, *back(out)

    def of(dtype: Any, spec: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh.mesh, spec))

    rows, experts = PartitionSpec(mesh.axes), PartitionSpec(mesh.ep)
    sharded = jax.shard_map(
        layer,
        mesh=mesh.mesh,
        in_specs=(experts, experts, rows, rows, rows),
        out_specs=(rows, experts, experts, rows, rows),
        # Only compiled: which axes the results vary over changes no collective.
        check_vma=False,
    )
    tokens = SERVERS * DEVICES * TOKENS
    operands = (
        of(jnp.float32, experts, EXPERTS, WIDTH, 2, HIDDEN),
        of(jnp.float32, experts, EXPERTS, HIDDEN, WIDTH),
        of(jnp.bfloat16, rows, tokens, WIDTH),
        of(jnp.int32, rows, tokens, K),
        of(jnp.float32, rows, tokens, K),
    )
    return compilers.compile_for("h100", sharded, *operands).compiled.as_text()


def _layout() -> str:
    return f"dp{SERVERS * DEVICES} / ep{SERVERS * DEVICES}"


def rows_of(methods: list[str]) -> Iterator[dict[str, Any]]:
    """A row for each method."""
    for method in methods:
        yield {
            "method": method,
            "compiled": compiled_bytes(compile_layer(method)),
            "planned": planned_bytes(method),
        }


def main() -> None:
    command = argparse.ArgumentParser(
        prog="python -m benchmarks.absent.exchanges",
        description="Bytes of token dispatch inside servers and between them",
    )
    command.add_argument("--only", nargs="+", default=METHODS, choices=METHODS, metavar="METHOD")
    command.add_argument("--out", type=Path, help="file for the rows as JSON")
    arguments = command.parse_args()

    from benchmarks.absent import compilers

    if (reason := compilers.missing("cuda")) is not None:
        command.error(reason)
    compilers.prepare()
    print("| method | KiB inside a server | planned | KiB between servers | planned |")
    print("| --- | --- | --- | --- | --- |")
    rows = []
    for row in rows_of(list(arguments.only)):
        cells = [
            f"{row[source][side] / 1024:,.0f}"
            for side in ("inside", "across")
            for source in ("compiled", "planned")
        ]
        print(f"| {row['method']} | {' | '.join(cells)} |", flush=True)
        rows.append(row)
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
