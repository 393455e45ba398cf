"""Programs of disaggregated decoding and prefill, for absent devices: the attention half and the
expert half of a layer, each on its own devices (`moe.disaggregated`)."""

from functools import partial
from typing import Any, NamedTuple

from benchmarks.absent import compilers
from benchmarks.absent.steps import OF_ATTENTION, OF_PREFILL, Step, prompts_of_prefill
from benchmarks.gpu.networks import network
from moe.config import Model


class Half(NamedTuple):
    """Half of a layer, to be compiled.

    Attributes:
      function, operands: of `benchmarks.absent.compilers.compile_for`.
      others: bytes on a device besides its arguments and results: weights and caches of the other
        layers, and messages of the other micro-batches.
    """

    function: Any
    operands: tuple[Any, ...]
    others: int


def half_of(step: Step) -> Half:
    """The program of a step whose layout is a split (`moe.disaggregated.split.Split`).

    In decoding, `Step.rows` are the slots of all attention devices, and `Step.micro_batches` those
    in flight. A prefill is the largest of an engine.
    """
    return _attention(step) if step.kind in OF_ATTENTION else _experts(step)


def _serving(step: Step) -> Any:
    from moe.decoding import for_step
    from moe.disaggregated.layer import Serving
    from moe.disaggregated.placement import Placement
    from moe.disaggregated.split import Split, fold_split
    from moe.model import for_prefill

    mesh = fold_split(Split.parse(step.layout), compilers.devices(step.device, step.shape))
    execution: dict[str, Any] = step.execution | {"scan_layers": False}
    config = network(step.sizes, **execution)
    placement = Placement.identity(config.num_experts, mesh.experts.size(mesh.experts.ep))
    adapted = for_prefill(config.for_any_routing()) if step.kind in OF_PREFILL else for_step(config)
    return Serving(adapted, mesh, placement.num_slots)


def _num_rows(step: Step, mesh: Any) -> int:
    """Rows of a program on all attention devices: those of a micro-batch, or the prompts of the
    largest prefill.

    Args:
      mesh: of both groups.
    """
    from jrl.rollout.decoding.split_backend import max_prefill_tokens

    if step.kind not in OF_PREFILL:
        return step.rows // step.micro_batches
    dp = mesh.attention.layout.dp
    return dp * prompts_of_prefill(step, dp, max_prefill_tokens(mesh))


def _num_tokens(step: Step, serving: Any) -> int:
    """Tokens of an attention device in a program."""
    layout = serving.mesh.attention.layout
    columns = step.prompt if step.kind in OF_PREFILL else 1
    return _num_rows(step, serving.mesh) * columns // layout.num_devices


def _messages(message: Any, mesh: Any, senders: int, receivers: int) -> tuple[Any, ...]:
    """Arrays of the messages that devices of `mesh`, the receivers, have from the senders."""
    import jax

    from moe.disaggregated.m2n import row_sharding

    shape = receivers * message.rows, message.width
    array = jax.ShapeDtypeStruct(shape, message.dtype, sharding=row_sharding(mesh))
    return (array,) * senders


def _attention(step: Step) -> Half:
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec

    from moe.disaggregated import programs
    from moe.disaggregated.layer import state_specs
    from moe.disaggregated.programs import Buffers
    from moe.disaggregated.weights import rest_specs
    from moe.weights import cast_shapes, without_layers

    serving = _serving(step)
    config, mesh = serving.config, serving.mesh.attention
    sharded = partial(_sharded, mesh=mesh)
    rest = jax.tree.map(
        sharded, without_layers(cast_shapes(config)), rest_specs(Model(config, mesh))
    )
    inputs = _inputs(step, serving)
    state = jax.eval_shape(partial(programs.begin, serving), rest, inputs)
    state = jax.tree.map(sharded, state, state_specs(serving))
    received = _messages(
        serving.message_back(_num_tokens(step, serving)),
        *(mesh, serving.num_targets, serving.num_sources),
    )
    half, cache = _layer(serving), _layer_cache(step, serving)
    number = sharded(jax.ShapeDtypeStruct((), jnp.int32), PartitionSpec())
    if step.kind in OF_PREFILL:
        buffers, columns = Buffers(None, None), None
        # The cache of the slots, and keys and values of the prompts until they are copied there.
        prompts = _num_rows(step, serving.mesh) * step.prompt
        of_prompts = _bytes(cache) * prompts // (step.rows * cache.keys.shape[-1])
        others = _bytes(cache) * config.num_layers + of_prompts * (config.num_layers - 1)
    else:
        buffers, columns = cache, step.prompt + step.response
        others = _bytes(cache) * (config.num_layers - 1)
        others += (step.micro_batches - 1) * _bytes((state, received))
    others += side_bytes_of(serving)[0] - _bytes(half.layer)
    operands = serving, columns, half, number, buffers, state, inputs, received
    return Half(programs.attention_half, operands, others)


def side_bytes_of(serving: Any) -> tuple[int, int]:
    """Bytes of the weights on an attention device and on an expert device."""
    from moe.disaggregated.weights import side_bytes

    return side_bytes(serving.config, serving.mesh)


def _layer(serving: Any) -> Any:
    """Attention half of a layer: shapes of its weights and its table of slots."""
    import jax
    from jax.sharding import PartitionSpec

    from moe.disaggregated.placement import Placement
    from moe.disaggregated.weights import AttentionHalf, _without_experts, attention_specs
    from moe.weights import cast_shapes

    config, mesh = serving.config, serving.mesh.attention
    sharded = partial(_sharded, mesh=mesh)
    stack = _without_experts(cast_shapes(config)).layers
    table = Placement.identity(config.num_experts, serving.num_peers).slot_table()
    return AttentionHalf(
        jax.tree.map(sharded, _of_one_layer(stack), attention_specs(Model(config, mesh))),
        jax.tree.map(lambda x: sharded(x, PartitionSpec()), table),
    )


def _of_one_layer(stack: Any) -> Any:
    import jax

    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), stack)


def _inputs(step: Step, serving: Any) -> Any:
    """Tokens of a program of attention: one of each row of a micro-batch, or prompts."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec

    from moe.cache import StepTokens
    from moe.disaggregated.programs import Prompts, Steps

    mesh, rows = serving.mesh.attention, _num_rows(step, serving.mesh)
    spec = PartitionSpec(mesh.except_sequence)

    def of(dtype: Any, *shape: int) -> Any:
        return _sharded(
            jax.ShapeDtypeStruct(shape, dtype), spec if shape else PartitionSpec(), mesh
        )

    number = of(jnp.int32, rows)
    if step.kind in OF_PREFILL:
        return Prompts(of(jnp.int32, rows, step.prompt), number)
    return Steps(StepTokens(number, number, of(jnp.bool_, rows)), of(jnp.int32))


def _layer_cache(step: Step, serving: Any) -> Any:
    """The cache of a layer, of all slots."""
    from dataclasses import replace

    from jrl.rollout.decoding.slots import Decoder, abstract_pool
    from moe.cache import cache_columns
    from moe.disaggregated.programs import Buffers

    mesh = serving.mesh.attention
    # Those of one layer are made as those of all.
    config = replace(serving.config, num_layers=serving.config.num_dense_layers + 1)
    columns = cache_columns(step.prompt + step.response, Model(config, mesh))
    cache = abstract_pool(Decoder(config, mesh, 0, (1,)), step.rows, columns).cache
    return Buffers(cache.keys[-1], cache.values[-1] if cache.values else None)


def _experts(step: Step) -> Half:
    import jax

    from moe.disaggregated import programs
    from moe.disaggregated.weights import _routed_experts, expert_specs
    from moe.weights import cast_shapes

    serving = _serving(step)
    mesh = serving.mesh.experts
    stack = _of_one_layer(_routed_experts(cast_shapes(serving.config)))
    experts = jax.tree.map(partial(_sharded, mesh=mesh), stack, expert_specs(mesh))
    message = serving.message_out(_num_tokens(step, serving))
    received = _messages(message, mesh, serving.num_sources, serving.num_targets)
    others = side_bytes_of(serving)[1] - _bytes(experts)
    if step.kind not in OF_PREFILL:
        others += (step.micro_batches - 1) * _bytes(received)
    return Half(programs.experts_half, (serving, experts, received), others)


def _sharded(leaf: Any, spec: Any, mesh: Any) -> Any:
    from jax.sharding import NamedSharding

    from sharding.sharded_jit import abstract_array

    return abstract_array(leaf, NamedSharding(mesh.mesh, spec))


def _bytes(tree: Any) -> int:
    """Bytes of arrays on one device."""
    import math

    import jax

    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )
