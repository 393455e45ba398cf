"""Bytes that token dispatch sends inside servers and between them, read off programs for GPUs.

    python -m benchmarks.absent exchanges                # every method, for eight servers of eight

Programs are compiled for absent H100s, an experts layer forward and backward. Buffers count whole,
used or not. Beside them is what the planner says (`sharding.costs.transfer`).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from benchmarks.absent import compilers
from benchmarks.absent.rows import HOPPER, Figures, folder_of, reason
from benchmarks.absent.selection import Selection
from sharding.costs.hardware import HARDWARE
from sharding.costs.transfer import TokenDispatch
from sharding.folding import Layout
from sharding.overlap import collective_of, computations, device_groups

SERVERS, DEVICES = 8, 8
LAYOUT = Layout(dp=SERVERS * DEVICES, ep=SERVERS * DEVICES)
TOKENS, EXPERTS, K, WIDTH, HIDDEN = 256, 128, 8, 512, 256
"""Tokens of a device; experts of all, and of a token; elements of a token, and of an expert."""
PROGRAM = "experts layer"
METHODS = ("all_gather", "all_to_all", "ragged", "two_level", "two_level_ragged")
COUNTED = ("all_gather", "reduce_scatter", "all_to_all")
"""Kinds of collectives of tokens; an all-reduce is that of a gradient."""
Sent = dict[str, int]
"""Bytes that a device receives from its server ("inside") and from others ("across")."""


def exchanges(selection: Selection, *, quick: bool, keep: Path | None) -> Iterator[Figures]:
    """A row for each method; quick: two levels."""
    for method in ("two_level",) if quick and not selection.names else METHODS:
        label = f"{HOPPER} {PROGRAM}, {method}, {LAYOUT}"
        if not selection.takes(label):
            continue
        about = {"device": HOPPER, "layout": str(LAYOUT), "program": PROGRAM, "form": method}
        try:
            program = compile_layer(method, folder_of(keep, label))
        except Exception as error:  # a compiler's refusal has no type of its own; it is a row
            yield about | {"error": reason(error)}
            continue
        yield about | {
            "seconds": program.seconds,
            "compiled": compiled_bytes(program.text),
            "planned": planned_bytes(method),
        }


def compiled_bytes(text: str) -> Sent:
    """Bytes of the collectives of a scheduled program.

    Args:
      text: of ``compiled.as_text()``, for GPUs.
    """
    total, program = {"inside": 0, "across": 0}, computations(text)
    for instructions in program.values():
        by_name = {one.name: one for one in instructions}
        for one in instructions:
            collective = collective_of(one, by_name, program)
            # An asynchronous instruction calls a collective, which is counted there.
            if collective is None or one.operation == "async-start":
                continue
            if collective.kind not in COUNTED:
                continue
            group, size = device_groups(one)[0], collective.bytes
            shard = size if collective.kind == "all_gather" else size // len(group)
            near = sum(device // DEVICES == group[0] // DEVICES for device in group)
            total["inside"] += shard * (near - 1)
            total["across"] += shard * (len(group) - near)
    return total


def planned_bytes(method: str) -> Sent:
    """The same of the planner's collectives."""
    buffer = LAYOUT.ep * TOKENS
    dispatch = TokenDispatch(
        method, LAYOUT, TOKENS, TOKENS, K, WIDTH, 2, buffer, server_devices=DEVICES
    )
    total = {"inside": 0, "across": 0}
    forward, backward = dispatch.transfers()
    for transfer in [*forward, *backward]:
        n = transfer.group(LAYOUT)
        shard = transfer.bytes if transfer.kind == "all_gather" else transfer.bytes // n
        near = transfer.members_in_domain(LAYOUT, HARDWARE[HOPPER])
        total["inside"] += shard * (near - 1)
        total["across"] += shard * (n - near)
    return total


def compile_layer(method: str, keep: Path | None = None) -> compilers.Program:
    """Compiles an experts layer, forward and backward."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from moe.execution import TWO_LEVELS, Dispatch, Execution
    from moe.experts.dispatch.choice import dispatch
    from moe.router.routing import Routing
    from moe.weights import Experts
    from sharding.folding import fold

    mesh = fold(LAYOUT, compilers.devices(HOPPER, f"1x{SERVERS}x{DEVICES}"))
    server_devices = DEVICES if method in TWO_LEVELS else None
    execution = Execution(dispatch=cast(Dispatch, method), server_devices=server_devices)

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
    return compilers.compile_for(HOPPER, sharded, *operands, keep=keep, reads_kernels=False)
