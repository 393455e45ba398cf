"""A run as the planner reads it: sizes, layout, batch and method of an update."""

from dataclasses import replace
from typing import Literal

import jax

from jrl.config.run import RunConfig
from jrl.recipes.base.optimizer import Optimizer
from jrl.trainer.learner.learner import abstract_state, keeps_masters
from jrl.trainer.setup.geometry import Geometry
from moe.attention.context_parallel import context_of
from moe.attention.core import MAX_PLAIN_SCORES_ACCELERATOR, MAX_PLAIN_SCORES_CPU
from moe.config import Model, ModelConfig
from moe.execution import TWO_LEVELS
from moe.experts.dispatch.cost import hardware_of
from moe.planner.method import Batch, Method
from moe.planner.models import ModelSizes, sizes_of
from moe.weights import num_trained_parameters
from sharding.folding import Layout


def planner_args(
    config: ModelConfig, geometry: Geometry, run: RunConfig
) -> tuple[ModelSizes, Layout, Batch, Method]:
    """Arguments of the planner for an update."""
    batch, model = batch_of(geometry), Model(config, geometry.mesh)
    method = method_of(model, batch, run)
    optimizer = replace(geometry.recipe.policy_optimizer, mu_dtype=run.mu_dtype)
    # The planner has the state of AdamW.
    if optimizer.name != "adamw" or optimizer.transformation is not None:
        method = replace(method, state_bytes=_state_bytes_per_parameter(optimizer, model))
    # Layers with Gated DeltaNet, which the planner does not describe, count as attention.
    return sizes_of(replace(config, delta=None)), geometry.mesh.layout, batch, method


def batch_of(geometry: Geometry) -> Batch:
    """Planner's batch sizes: mini-batch, row length and micro-batch per device."""
    mini = geometry.recipe.mini_batch_size
    # The maximum length of a row, as the lengths of responses are unknown.
    time = geometry.prompt_length + geometry.response_length
    return Batch(mini, time, mini // geometry.num_micro_batches // geometry.mesh.layout.dp)


def method_of(model: Model, batch: Batch, run: RunConfig) -> Method:
    """Planner's execution settings: the network's, and the run's dtypes of gradients and
    moments."""
    config, mesh = model.config, model.mesh
    execution = replace(
        config.execution,
        context=context_of(model),
        attention=attention_of(model, batch),
    )
    if execution.server_devices is None and execution.dispatch in TWO_LEVELS:
        execution = replace(execution, server_devices=hardware_of(mesh).domain)
    return Method(
        execution,
        itemsize=2 if config.dtype == "bfloat16" else 4,
        storage="bfloat16" if keeps_masters(config) else "float32",
        even=execution.buffer_factor is not None,
        gradient_wire=run.gradient_wire,
        mu_dtype=run.mu_dtype,
        duplicates_experts=mesh.platform == "cpu",
    )


def attention_of(
    model: Model, batch: Batch
) -> Literal["plain", "blocked", "xla", "cudnn", "mosaic"] | None:
    """Attention implementation that `moe.attention.core` chooses for a micro-batch; None for a
    kernel."""
    config, mesh = model.config, model.mesh
    if config.execution.attention is not None:
        return config.execution.attention
    # GPUs use cuDNN; devices of an unknown platform are assumed to be GPUs.
    if mesh.platform in ("gpu", None) and config.dtype == "bfloat16":
        return None
    layout = mesh.layout
    # Between layers tokens are sharded over tp; in attention a rank has all tokens and some heads.
    queries = batch.local_tokens(layout) * layout.tp
    scores = config.num_heads // layout.tp * queries * batch.time
    max_scores = MAX_PLAIN_SCORES_CPU if mesh.platform == "cpu" else MAX_PLAIN_SCORES_ACCELERATOR
    return "blocked" if scores > max_scores else "plain"


def _state_bytes_per_parameter(optimizer: Optimizer, model: Model) -> float:
    """Bytes of the optimizer's state per trained parameter, on average over the network."""
    like = abstract_state(optimizer, model)
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(like))
    return total / num_trained_parameters(model.config)
