"""Network config of a run: router and execution settings, and the checks that they are
supported."""

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import jax

from jrl.checks import flag
from jrl.config.run import RunConfig
from jrl.published.adapters import targets_from_modules
from jrl.published.network import check_packages
from jrl.published.settings import RouterSettings
from jrl.setting import names_with
from moe.architecture.feed_forward import can_drop
from moe.architecture.lora import Lora, is_target
from moe.attention.context_parallel import context_of
from moe.config import Model, ModelConfig
from moe.execution import Execution
from moe.experts.dispatch.choice import check_dispatch
from moe.experts.dispatch.cost import TokenExchange, cheapest, explain_choice, peer_capacity_of
from moe.implementations import decode_kernel_obstacle
from moe.kernels.choice import foreign_gpus
from moe.kernels.decode_attention import unsupported_heads
from moe.placement import specs
from moe.weights import adaptable_weights, targets_of
from sharding.costs.transfer import GPU_BUFFER_FACTOR
from sharding.folding import FoldedMesh

GPU_EXPERT_CHUNKS = 2
"""Chunks of token dispatch on GPUs. By the schedules of compiled updates a step takes 0.98 of the
time of one chunk on 8 H100s (Qwen3-30B-A3B) and 0.91 on 64 (Qwen3-235B-A22B)."""


def network_of(config: ModelConfig, run: RunConfig) -> ModelConfig:
    """Network config with the settings of a run.

    Raises:
      ValueError: for a setting that has no effect in such a network.
    """
    settings = {item.name: getattr(run, item.name) for item in fields(RouterSettings)}
    requested = {name: value for name, value in settings.items() if value is not None}
    for name, value in requested.items():
        if name == "bias_update_rate" and value and not config.selection_bias:
            raise _no_effect_error(name, run, "selection bias")
        if value and not config.num_experts:
            raise _no_effect_error(name, run, "experts")
    capacity = requested.get("capacity_factor", config.capacity_factor)
    for name in ("drop_policy", "drop_scope"):
        if name in requested and capacity is None:
            raise ValueError(
                f"{name}={requested[name]!r} changes nothing without a capacity, which is what "
                f"makes experts drop: give --capacity-factor, or leave out {flag(name)}."
            )
    for name in names_with(Execution, "experts"):
        if getattr(run, name) != getattr(Execution, name) and not config.num_experts:
            raise _no_effect_error(name, run, "experts")
    if run.latent is not None and config.mla is None:
        raise _no_effect_error("latent", run, "latent attention")
    dtype = config.dtype if run.dtype is None else run.dtype
    lora = lora_of(config, run)
    bias_update_rate = requested.get("bias_update_rate", config.bias_update_rate)
    if lora is not None and config.selection_bias and bias_update_rate:
        raise ValueError(
            f"bias_update_rate={bias_update_rate} moves a weight that lora_rank={lora.rank} "
            "freezes: give --bias-update-rate 0."
        )
    return replace(config, **requested, dtype=dtype, execution=run.execution, lora=lora)


def frozen_network_of(config: ModelConfig, run: RunConfig, mesh: FoldedMesh) -> ModelConfig:
    """Network config of a frozen network beside the policy: its own router, the dtype and the
    execution settings of the run as far as they apply to it."""
    execution = run.execution
    if not config.num_experts:
        settings = names_with(Execution, "experts")
        execution = replace(execution, **{name: getattr(Execution, name) for name in settings})
    dtype = config.dtype if run.dtype is None else run.dtype
    config = with_dispatch(replace(config, dtype=dtype, execution=execution), run, mesh)
    check_supported(Model(config, mesh))
    check_shardable(config, mesh)
    return config


def lora_of(config: ModelConfig, run: RunConfig) -> Lora | None:
    """LoRA settings of a run; None without adapters."""
    if run.lora_rank is None:
        return None
    available = targets_of(config)
    # The head is adapted only if it is named.
    default_targets = tuple(target for target in available if target != "head")
    targets = default_targets if run.lora_targets is None else tuple(run.lora_targets.split(","))
    if not all(map(is_target, targets)):
        check_packages(f"lora_targets={run.lora_targets!r}")
        targets = targets_from_modules(config, targets)
    alpha = 2.0 * run.lora_rank if run.lora_alpha is None else run.lora_alpha
    lora = Lora(run.lora_rank, alpha, targets, run.lora_rank_stabilised)
    weights = (*available, *adaptable_weights(config))
    absent = [target for target in targets if target not in weights]
    if absent:
        raise ValueError(
            f"lora_targets={run.lora_targets!r} has {', '.join(absent)}, which the network of "
            f"{run.model} does not have: choose among {','.join(available)}."
        )
    return lora


def with_dispatch(config: ModelConfig, run: RunConfig, mesh: FoldedMesh) -> ModelConfig:
    """Network config with the token dispatch method, expert buffers and chunks of the run or, by
    default, those that are the fastest on the training mesh. They are set explicitly, so that
    scoring and sampling use the same method, with dropless buffers and on layouts of their own
    too."""
    name = run.dispatch
    if dispatches_tokens(Model(config, mesh)):
        if mesh.platform == "gpu":
            config = replace(config, execution=_with_gpu_defaults(config.execution, run))
        # Chosen once, for the training mesh: other passes must not choose another for theirs.
        name = name or cheapest(exchange_of(Model(config, mesh)), mesh)
    return replace(config, execution=replace(config.execution, dispatch=name))


def _with_gpu_defaults(execution: Execution, run: RunConfig) -> Execution:
    """Execution with the expert buffers and chunks of GPUs that share experts, if the run has
    none."""
    if run.buffer_factor is None:
        execution = replace(execution, buffer_factor=GPU_BUFFER_FACTOR)
    # Halves of the rows overlap the same communication.
    if execution.expert_chunks is None and not execution.two_batch_overlap:
        execution = replace(execution, expert_chunks=GPU_EXPERT_CHUNKS)
    return execution


def buffers_explained(config: ModelConfig, run: RunConfig) -> str | None:
    """Explanation of the buffers that `with_dispatch` chose for `config`, in a line; None if it
    chose none."""
    factor = config.execution.buffer_factor
    if run.buffer_factor is not None or factor is None:
        return None
    return (
        f"{factor:g} (buffers for any routing are several times as large, in memory and in what "
        "is sent; what overflows is recomputed with them)"
    )


def dispatch_explained(model: Model, run: RunConfig) -> str | None:
    """Explanation of the choice of `with_dispatch`, in a line; None if it chose none."""
    if run.dispatch is not None or not dispatches_tokens(model):
        return None
    return explain_choice(exchange_of(model), model.mesh)


def dispatches_tokens(model: Model) -> bool:
    """True if tokens are dispatched to experts on other devices."""
    return bool(model.config.num_experts) and model.mesh.layout.ep * model.mesh.layout.etp > 1


def exchange_of(model: Model) -> TokenExchange:
    """Sizes of a layer's token dispatch, for the cost model."""
    config = model.config
    execution, k = config.execution, config.experts_per_token
    factors = config.capacity_factor, execution.buffer_factor
    return TokenExchange(
        config.num_experts,
        k,
        config.d_model,
        itemsize=2 if config.dtype == "bfloat16" else 4,
        peer_capacity=peer_capacity_of(k, model.mesh.layout.ep, *factors),
        rate=execution.exchange_rate,
        comm_dtype=execution.activation_wire,
    )


def first_devices(count: int, setting: str, advice: str) -> list[Any]:
    """First devices of the run; raises ValueError, with the setting that needs them and the advice,
    if there are fewer."""
    devices = jax.devices()
    if len(devices) < count:
        raise ValueError(
            f"{setting} needs {count} devices and there are {len(devices)}: {advice}, or --devices "
            f"{count} to have as many fake ones on a CPU."
        )
    return devices[:count]


def check_supported(model: Model) -> None:
    """Rejects, before compilation, implementations that the devices do not support or that are
    incompatible; the ones that depend on the sizes of a batch are rejected when they run.

    Raises:
      ValueError: naming the flag, and a valid choice.
    """
    execution = model.config.execution
    context_of(model)
    check_dispatchers(model.config, model.mesh)
    if execution.activation_wire is not None and not dispatches_tokens(model):
        raise ValueError(
            f"activation_wire={execution.activation_wire!r} changes nothing on layout "
            f"{model.mesh.layout}: no token is sent to experts on another device. Leave out "
            f"{flag('activation_wire')}, or choose a layout with ep or etp."
        )
    for name, reason, alternative in _obstacles(model):
        raise ValueError(
            f"{name}={getattr(execution, name)!r} {reason}: leave out {flag(name)}{alternative}."
        )


def _obstacles(model: Model) -> Iterator[tuple[str, str, str]]:
    """Implementations that are not supported: the field, the reason, and an alternative to leaving
    it out."""
    config = model.config
    execution, platform = config.execution, model.mesh.platform
    for name in ("attention", "decode_attention", "router", "experts"):
        if getattr(execution, name) != "mosaic":
            continue
        if platform != "gpu":
            yield name, f"is a kernel for NVIDIA's Hopper, not for {platform!r} devices", ""
        elif (foreign := foreign_gpus(hopper_only=name != "router")) is not None:
            yield name, f"does not support {foreign}", ""
    if execution.attention == "cudnn" and (platform != "gpu" or config.dtype != "bfloat16"):
        reason = f"takes bfloat16 on NVIDIA GPUs, not {config.dtype} on {platform!r} devices"
        yield "attention", reason, ", or give --dtype bfloat16 there"
    instead = ", or give --dtype bfloat16" if config.dtype == "float32" else ""
    if (obstacle := decode_kernel_obstacle(config)) is not None:
        yield "decode_attention", obstacle, instead
    if execution.attention == "mosaic":
        heads = unsupported_heads(config.dtype, 1, config.head_dim, config.v_head_dim)
        if heads is not None:
            yield "attention", f"is not supported: {heads}", instead


def check_dispatchers(config: ModelConfig, *meshes: FoldedMesh) -> None:
    """Raises ValueError, naming the token dispatcher that was chosen, for a mesh on which it is not
    supported."""
    execution = config.execution
    if execution.dispatch is not None:
        for mesh in meshes:
            check_dispatch(execution.dispatch, mesh, execution.server_devices)


def check_shardable(config: ModelConfig, *meshes: FoldedMesh) -> None:
    """Raises ValueError, naming axis and layout, for a mesh over which the weights cannot be
    sharded."""
    for mesh in meshes:
        specs(Model(config.without_adapters(), mesh))


def check_overlaps(model: Model, num_units: int, half_tokens: Sequence[int] = ()) -> None:
    """Rejects overlap of communication and computation if it has no effect or is not supported.

    Args:
      num_units: number of independent parts of a device's micro-batch: bins, or prompts with their
        responses.
      half_tokens: tokens of each half of them.

    Raises:
      ValueError: naming the flag.
    """
    config, mesh = model.config, model.mesh
    execution = config.execution
    layout = mesh.layout
    if execution.overlap_grad_reduce and (layout.pp > 1 or layout.num_devices == 1):
        reason = "there is no other device to sum gradients with"
        if layout.pp > 1:
            reason = "the stages of a pipeline sum gradients after their last micro-batch"
        raise ValueError(
            f"overlap_grad_reduce=True changes nothing on layout {layout}: {reason}. Leave out "
            f"{flag('overlap_grad_reduce')}, or choose another layout."
        )
    if not execution.two_batch_overlap:
        return
    if can_drop(config):
        raise ValueError(
            f"two_batch_overlap with capacity_factor={config.capacity_factor} would drop other "
            "tokens: the capacity of an expert is that of all tokens of a micro-batch. Leave out "
            "one of them."
        )
    if num_units < 2:
        raise ValueError(
            "two_batch_overlap=True has nothing to halve: a micro-batch has one row on a device, "
            "one prompt with its responses or one packed row. Choose a larger --micro-batch, or "
            f"leave out {flag('two_batch_overlap')}."
        )
    ranks = mesh.size(mesh.sequence)
    for tokens in half_tokens:
        if tokens % ranks:
            raise ValueError(
                f"two_batch_overlap=True: a half-batch of {tokens} tokens cannot be split over cp "
                f"x tp = {ranks} of layout {layout}. Choose a micro-batch whose half-batches "
                f"divide, or leave out {flag('two_batch_overlap')}."
            )


def _no_effect_error(name: str, run: RunConfig, lacking: str) -> ValueError:
    value = getattr(run, name)
    value_text = repr(value) if isinstance(value, str) else value
    return ValueError(
        f"{name}={value_text} changes nothing: the network of {run.model} has no {lacking}. Leave "
        f"out {flag(name)}."
    )
