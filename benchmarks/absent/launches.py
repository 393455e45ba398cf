"""Kernel launches of programs for GPUs, counted in the scheduled program that their compiler makes.

    python -m benchmarks.absent launches                 # the table, for absent H100s
    python -m benchmarks.absent launches --only decoding

A launch takes the host about 3 us: a program of many small kernels runs at the pace of its launches
and not of its arithmetic. The layers of training are in a scanned stack, whose loop has a known
length, so that a program of 48 layers is compiled and counted as it is; in decoding they are
unrolled, and a step is a turn of the window's loop. A call of a library, such as a sort or a
collective, counts as one launch.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.absent.compilers import Program
from benchmarks.absent.rows import HOPPER, Figures, reason
from benchmarks.absent.selection import Selection
from benchmarks.gpu.shapes import QWEN3_06B, QWEN3_A3B
from moe.config import Model
from sharding.overlap import ENTRY, Instruction, computations

BOUND = 20_000
"""Launches of a training step of 48 layers, at most, by whatever None selects."""
WITHOUT_LAUNCH = {
    *("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "domain"),
    *("partition-id", "replica-id", "opt-barrier", "add-dependency", "async-update"),
}
"""Operations that launch nothing; nor does the end of an asynchronous one."""
PLAIN = {
    "experts": "batched",
    "router": "plain",
    "attention": "blocked",
    "decode_attention": "plain",
}
"""Fields of `moe.execution.Execution`: what None selects on GPUs for networks that no kernel
supports, and for shapes that cuDNN does not."""


class Launches(NamedTuple):
    """Launches of one run of a program.

    Attributes:
      fixed: those of every run.
      per_turn: those of one iteration of each loop whose length is not known when compiling. In the
        products of experts ("batched") it has none if groups are balanced.
    """

    fixed: int
    per_turn: int


def count_launches(text: str) -> Launches:
    """Counts the launches of a scheduled program.

    Args:
      text: of ``compiled.as_text()``, for GPUs.
    """
    program = computations(text)
    counted: dict[str, Launches] = {}

    def count(name: str) -> Launches:
        if name not in counted:
            each = [_of_instruction(one, count) for one in program[name]]
            counted[name] = Launches(
                sum(one.fixed for one in each), sum(one.per_turn for one in each)
            )
        return counted[name]

    return count(ENTRY)


def _of_instruction(one: Instruction, count: Callable[[str], Launches]) -> Launches:
    name = one.operation
    if name == "while":
        body, condition = count(one.computation("body")), count(one.computation("condition"))
        if one.trip_count is not None:
            return Launches(one.trip_count * body.fixed, one.trip_count * body.per_turn)
        # The host reads the condition before each iteration, and after the last.
        check = condition.fixed + 1
        return Launches(check, body.fixed + body.per_turn + check)
    if name == "conditional":
        # The host reads the index of the branch.
        most = max((count(branch) for branch in one.called), key=sum)
        return Launches(most.fixed + 1, most.per_turn)
    if name == "call":
        return count(one.computation("to_apply"))
    is_free = name in WITHOUT_LAUNCH or name.endswith("-done")
    is_free = is_free or '"AllocateBuffer"' in one.attributes
    return Launches(0 if is_free else 1, 0)


class Case(NamedTuple):
    """A program that is counted.

    Attributes:
      program: name in the table.
      form: of the execution.
      build: compiles it for absent H100s.
      bound: launches that it may have; None is any number.
      turn: launches that one further turn of each loop may have; None is a fifth of `bound`.
    """

    program: str
    form: str
    build: Callable[[], Program]
    bound: int | None = None
    turn: int | None = None

    def __str__(self) -> str:
        return f"{self.program}, {self.form}"


def experts_layer(**execution: Any) -> Program:
    """Forward and backward pass of the experts of a layer of Qwen3-30B-A3B on "dp8 / ep8", 4,096
    tokens on each device."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from benchmarks.absent import compilers
    from benchmarks.gpu.networks import network
    from moe.experts.dispatch.choice import dispatch
    from moe.implementations import selected_implementation
    from moe.router.routing import Routing
    from moe.weights import Experts
    from sharding.folding import Layout, fold

    mesh = fold(Layout.parse("dp8 / ep8"), compilers.devices("h100", "1x1x8"))
    config = network(QWEN3_A3B, **execution)
    product = selected_implementation(Model(config, mesh), "experts")
    by_token, by_expert = PartitionSpec(mesh.dp), PartitionSpec(mesh.ep)

    def layer(gate_up: Any, down: Any, x: Any, ids: Any, probs: Any) -> Any:
        def run(gate_up: Any, down: Any, x: Any, probs: Any) -> Any:
            experts = Experts(jnp.zeros(()), gate_up, down)
            return dispatch(
                experts, x, Routing(ids, probs), mesh, config.execution, product=product
            )[0]

        out, back = jax.vjp(run, gate_up, down, x, probs)
        return out, *back(out)

    def of(dtype: Any, spec: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh.mesh, spec))

    tokens, k, experts = 8 * 4096, config.experts_per_token, config.num_experts
    width, hidden = config.d_model, config.d_expert
    specs = by_expert, by_expert, by_token, by_token, by_token
    sharded = jax.shard_map(
        layer,
        mesh=mesh.mesh,
        in_specs=specs,
        out_specs=(by_token, by_expert, by_expert, by_token, by_token),
        # Only compiled: which axes the results vary over changes no kernel.
        check_vma=False,
    )
    operands = (
        of(jnp.float32, by_expert, experts, width, 2, hidden),
        of(jnp.float32, by_expert, experts, hidden, width),
        of(jnp.bfloat16, by_token, tokens, width),
        of(jnp.int32, by_token, tokens, k),
        of(jnp.float32, by_token, tokens, k),
    )
    function = _with_options(sharded, mesh)
    return compilers.compile_for("h100", function, *operands, reads_kernels=False)


def training_step(**execution: Any) -> Program:
    """An optimizer step of GRPO of Qwen3-30B-A3B on "dp8 / ep8", two rows of 2,048 tokens on each
    device."""
    from benchmarks.absent.programs import compile_step
    from benchmarks.absent.steps import SELECTED

    step = SELECTED._replace(execution=SELECTED.execution | execution)
    return compile_step(step, reads_kernels=False)


def decode_window(sizes: dict[str, Any], rows: int, **execution: Any) -> Program:
    """The loop of decode steps of a rollout on one device: caches of 1,152 tokens in bfloat16. A
    step is a turn of the loop."""
    from benchmarks.absent.programs import compile_step
    from benchmarks.absent.steps import DECODING, ONE, Step

    step = Step(*ONE, "decoding", sizes, execution, DECODING, rows, prompt=128, response=1024)
    return compile_step(step, reads_kernels=False)


def _with_options(function: Any, mesh: Any) -> Any:
    import jax

    from sharding.sharded_jit import compiler_options

    return jax.jit(function, compiler_options=compiler_options(mesh))


def _decoding(name: str, sizes: dict[str, Any], rows: int, turn: int | None = None) -> Case:
    build, bound = partial(decode_window, sizes, rows), None if turn is None else 120
    return Case(f"decoding, {name}", f"{rows} rows", build, bound, turn)


CASES = (
    Case("experts layer", "None", partial(experts_layer, buffer_factor=1.5), 300),
    Case("experts layer", "buffers for any routing", experts_layer, 300),
    Case("experts layer", "no kernels", partial(experts_layer, **PLAIN), 300),
    Case("experts layer", "blocks", partial(experts_layer, experts="blocks")),
    Case("training step", "None", training_step, BOUND),
    Case("training step", "no kernels", partial(training_step, **PLAIN), BOUND),
    _decoding("2 layers of Qwen3-0.6B", QWEN3_06B | {"num_layers": 2}, 256, turn=56),
    _decoding("Qwen3-0.6B", QWEN3_06B, 1, turn=650),
    _decoding("Qwen3-0.6B", QWEN3_06B, 256, turn=480),
    *(_decoding("Qwen3-0.6B", QWEN3_06B, rows) for rows in (64, 1024)),
    *(_decoding("Qwen3-30B-A3B", QWEN3_A3B, rows) for rows in (1, 64, 256, 1024)),
)
"""Programs and forms; "blocks" is not selected by None on GPUs, and is there to compare."""


def launches(selection: Selection, *, quick: bool, keep: Path | None) -> Iterator[Figures]:
    """A row for each program and form; quick: the first. Kernels of whole programs are not kept."""
    for case in CASES[:1] if quick and not selection.names else CASES:
        if not selection.takes(f"{HOPPER} {case}"):
            continue
        about = {"device": HOPPER, "program": case.program, "form": case.form}
        try:
            program = case.build()
        except Exception as error:  # a compiler's refusal has no type of its own; it is a row
            yield about | {"error": reason(error)}
            continue
        counted = count_launches(program.text)
        yield about | {
            "seconds": program.seconds,
            "launches": counted.fixed,
            "per_turn": counted.per_turn,
            "temporaries": program.temporaries,
        }
