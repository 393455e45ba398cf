"""Predicted memory of a run on one device: the buffers by kind, from exact shapes and shardings,
and the peak over its phases."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax
from jax.sharding import PartitionSpec

from jrl.recipes.base.optimizer import Optimizer
from jrl.rollout.collection.collect import sampling_of
from jrl.rollout.decoding.expert_balancer import first_placement
from jrl.rollout.decoding.mesh_backend import unstack
from jrl.rollout.device_memory import local_devices
from jrl.rollout.packing import bin_length
from jrl.trainer.learner.learner import abstract_state, keeps_masters
from jrl.trainer.learner.teacher import DivergenceScorer
from jrl.trainer.resources import process_memory
from jrl.trainer.scoring import num_micro_batches
from jrl.trainer.setup.geometry import Geometry
from jrl.trainer.setup.plan_inputs import planner_args
from jrl.trainer.setup.setup import MIN_PREFILL_PROMPTS, Setup
from moe import placement
from moe.adapters import is_adapted, select_frozen, select_trained
from moe.architecture.attention import delta_layers
from moe.attention.latent import caches_latent
from moe.cache import cache_columns, kernel_bytes
from moe.config import Model, ModelConfig
from moe.disaggregated.weights import side_bytes
from moe.planner.memory import (
    NUM_SAVED_SCORES,
    NUM_WORKING_SCORES,
    activation_bytes,
    comm_buffer_bytes,
    layer_memory,
    model_states,
    working_score_bytes,
)
from moe.planner.method import for_weights
from moe.router.routing import choices_dtype
from moe.weights import Transformer, cast_shapes, shapes, table
from sharding.folding import FoldedMesh
from sharding.schedule import Schedule
from sharding.zero import ShardDim

LOGITS, STAGE_INPUTS = "logits of a forward pass", "stored inputs of a stage"
GRADIENTS_SENT = "gradient sent in bfloat16"
DECODE_PARTIALS = "decode attention partials"
KV_CACHE, ROLLOUT_POLICY = "key/value cache", "rollout policy"
UNSTACKED = "unstacked weights to sample"
GATHERED, GRADIENTS = "weights gathered for scoring", "gradients"
POLICY, WEIGHTS = "policy", "weights"
ACTIVATIONS, WORKSPACE = "activations", "workspace (layer + logits)"
SAMPLING = (KV_CACHE, UNSTACKED, ROLLOUT_POLICY, DECODE_PARTIALS)
"""Rows of `memory` that are needed while the policy samples."""


def memory(setup: Setup) -> dict[str, int]:
    """Bytes on each device, by kind of buffer; kinds of no bytes are left out.

    With ``W`` the bytes of the policy's weights on one device, ``itemsize x elements / devices it
    is split over`` for each of them, ``F`` the bytes of as many float32 numbers, and ``V`` and
    ``E`` the same for the critic:

    * weights ``W``, reference model ``W``, critic ``V``, those of a teacher on its own layout;
      under `Execution.fsdp` their shards, and the largest of them again, gathered for scoring;
      while it samples, the layers of the policy
      that are not scanned, unstacked, under fsdp all weights, and on another rollout layout a copy
      sharded by that;
    * float32 masters of weights in bfloat16 (`jrl.trainer.learner.learner`), each sharded over the
      devices that hold the weight if a dimension divides (`sharding.zero`): ``F / G`` with G
      replicas of everything, and ``E / G``; none if the weights are float32;
    * the optimizer's state, from its own shapes (`learner.abstract_state`): of AdamW two moments
      and a step counter, ``2 F / G`` and ``2 E / G`` for moments that are sharded in the same way,
      a quarter less with a first moment in bfloat16;
    * gradients ``max(F, E)``, float32, and with gradient accumulation ``max(W, V)`` for the
      gradient of one micro-batch, in which the layers count by their shards under `Execution.fsdp`;
      for a single micro-batch and no pipeline ``max(W, V)`` alone;
    * KV cache ``layers x slots x (prompt + response) x kv_heads / tp x (head_dim + v_head_dim) x
      itemsize``, with the slots per device; for latent attention the latent vectors in place of
      keys and values, and for layers with Gated DeltaNet a state per row;
    * under an `Execution.decode_attention` of "mosaic" the float32 partial results that the kernel
      writes for a layer before they are merged (`moe.cache.kernel_bytes`), for a step that computes
      all slots and reads the whole cache;
    * logits ``4 x rows x response / cp x min(chunk, vocab / tp)`` of a vocabulary chunk, or
      ``4 x rows x response / (cp tp) x vocab`` if the sampler truncates and that is more, with
      the rows per device of the largest forward pass: a micro-batch, a warm start's batch, or
      where completions are scored before the first update all of them (on a pipeline, one of
      their `num_micro_batches`);
    * under `Recipe.router_replay` the expert ids of each token and layer, a byte or two each;
    * under a `RunConfig.gradient_wire` of bfloat16 two bfloat16 copies of the largest gradient of a
      matrix, sent to and received from other sequence-parallel groups;
    * on a pipeline, the inputs of layers that a stage keeps for the backward pass.

    With adapters (`ModelConfig.lora`) ``F``, ``E`` and all that follows from them count adapters
    and value head only, in float32 and with no masters; the critic has only these in addition to
    the policy's weights, and there is no reference model. While it samples, there is a merged copy
    of the weights with adapters.

    Per parameter, weight, summed gradient, master and moments take ``6 + 12 / G`` bytes in
    bfloat16, as in Megatron-Core, and ``8 + 8 / G`` in float32.

    Activations and temporary buffers of the compiler come in addition.
    """
    run, recipe, model, mesh = setup.run, setup.recipe, setup.model, setup.mesh
    geometry, fsdp, networks = setup.geometry, model.execution.fsdp, trained_networks(setup)
    trained = [each for each, _ in networks.values()]
    frozen = [each.model for each in setup.frozen.values()]
    # Networks are updated one after the other: the larger one counts.
    gradients = max(gradient_bytes(each, shapes(each.config)) for each in trained)
    # Gradients of a micro-batch are in the dtypes of the weights; their sum, which a pipeline has
    # of one as well, is float32.
    summand = max(
        gradient_bytes(each, cast_shapes(each.config), mesh.layout.vpp) for each in trained
    )
    if geometry.num_micro_batches > 1:
        gradients += summand
    elif mesh.layout.pp == 1:
        gradients = summand
    # Separate rollout devices have a table of their own.
    rollout = rollout_memory(setup) if run.rollout_devices is None else {}
    rows: dict[str, int] = {}
    for role, (each, optimizer) in networks.items():
        prefix = "" if role == POLICY else f"{role}'s "
        # With adapters, the critic's base weights are the policy's.
        is_shared = bool(prefix) and model.lora is not None
        shared = weight_bytes(each, shards=fsdp, frozen=True) if is_shared else 0
        rows[role if prefix else WEIGHTS] = weight_bytes(each, shards=fsdp) - shared
        optimizer_bytes = _optimizer_bytes(optimizer, each)
        rows |= {f"{prefix}{name}": size for name, size in optimizer_bytes.items()}
    rows |= {
        # The base weights of adapters are the policy that training started from.
        **{
            role: weight_bytes(each.model, shards=fsdp)
            for role, each in setup.frozen.items()
            if each.from_file or model.lora is None
        },
        GRADIENTS: gradients,
        GATHERED: max(map(weight_bytes, [*trained, *frozen])) if fsdp else 0,
        **rollout,
        LOGITS: logits_bytes(model, geometry, max(forward_rows(setup).values())),
        STAGE_INPUTS: stage_input_bytes(model, geometry) if mesh.layout.pp > 1 else 0,
        GRADIENTS_SENT: max(sent_bytes(each, run.gradient_wire) for each in trained),
    }
    if recipe.router_replay is not None:
        local_completions = recipe.completions // mesh.size(mesh.dp)
        rows["expert ids"] = choices_bytes(model, local_completions * _row_length(setup))
    return {name: num_bytes for name, num_bytes in rows.items() if num_bytes}


def trained_networks(setup: Setup) -> dict[str, tuple[Model, Optimizer]]:
    """Trained networks of a run by role, each with its optimizer."""
    networks = {POLICY: (Model(setup.model, setup.mesh), setup.policy_optimizer)}
    if setup.critic is not None:
        networks["critic"] = Model(setup.critic, setup.mesh), setup.critic_optimizer
    return networks


def forward_rows(setup: Setup) -> dict[str, int]:
    """Rows on all devices of the forward pass of each phase."""
    run, recipe, mesh, geometry = setup.run, setup.recipe, setup.mesh, setup.geometry
    rows = {"update": recipe.mini_batch_size // geometry.num_micro_batches}
    if run.weights is None and run.checkpoint is None and run.warm_start_steps:
        rows["warm start"] = geometry.supervised_rows(run.warm_start_batch)
    local_completions, num_passes = recipe.completions // mesh.size(mesh.dp), 1
    if setup.frozen or recipe.uses_critic or recipe.rescores:
        if mesh.layout.pp > 1:
            layout, length = geometry.prompt_layout, _row_length(setup)
            num_passes = num_micro_batches(local_completions, length, layout, mesh)
        rows["scoring"] = recipe.completions // num_passes
    return rows


def _row_length(setup: Setup) -> int:
    return setup.prompt_length + setup.response_length


@dataclass(frozen=True)
class RunMemory:
    """Predicted memory of a run on one device.

    Attributes:
      permanent: bytes of the buffers that are there in all phases, by kind.
      phases: bytes of those that a phase needs in addition, by kind. Phases take turns.
    """

    permanent: Mapping[str, int]
    phases: Mapping[str, Mapping[str, int]]

    @property
    def peaks(self) -> dict[str, int]:
        """Bytes at the peak of each phase."""
        permanent = sum(self.permanent.values())
        return {name: permanent + sum(rows.values()) for name, rows in self.phases.items()}

    @property
    def largest(self) -> str:
        """Phase with the largest peak."""
        peaks = self.peaks
        return max(peaks, key=lambda name: peaks[name])

    @property
    def peak(self) -> int:
        return self.peaks[self.largest]


def run_memory(setup: Setup) -> RunMemory:
    """Predicted memory of a run: the buffers of `memory`, the activations and temporary buffers of
    each phase, by the planner's model of a layer (`moe.planner.memory`), and on a CPU the copy
    of the state that a checkpoint is written from, the compiled programs and the libraries.

    Layers with Gated DeltaNet count as layers with attention. Sequences have their maximum length.
    """
    rows, mesh = memory(setup), setup.mesh
    for name in (LOGITS, STAGE_INPUTS, GRADIENTS_SENT):
        rows.pop(name, None)
    sampling = {name: rows.pop(name) for name in SAMPLING if name in rows}
    if setup.run.stale_cache and KV_CACHE in sampling:
        rows[KV_CACHE] = sampling.pop(KV_CACHE)
    forward = forward_rows(setup)
    phases = {"update": {GRADIENTS: rows.pop(GRADIENTS), **_update_bytes(setup, forward["update"])}}
    gathered = {GATHERED: rows.pop(GATHERED)} if GATHERED in rows else {}
    if setup.run.rollout_devices is None:
        phases = {"sampling": {**sampling, **_sampling_bytes(setup)}, **phases}
    if "scoring" in forward:
        scored = Model(setup.model, mesh), *(each.model for each in setup.frozen.values())
        passes = [_scoring_bytes(setup, each, forward["scoring"]) for each in scored]
        largest = max(passes, key=lambda buffers: sum(buffers.values()))
        if any(isinstance(each.scorer, DivergenceScorer) for each in setup.frozen.values()):
            # One pass of both.
            largest = {name: sum(each[name] for each in passes) for name in largest}
        phases["scoring"] = gathered | largest
    if "warm start" in forward:
        warm_start = replace(setup, model=setup.model.without_adapters())
        imitator = Model(warm_start.model, mesh)
        all_gradients = gradient_bytes(imitator, cast_shapes(warm_start.model))
        passed = _update_bytes(warm_start, forward["warm start"], shares_prompts=False)
        phases["warm start"] = {GRADIENTS: all_gradients, **passed}
    if mesh.platform == "cpu":
        rows["copy for a checkpoint"] = _checkpoint_bytes(setup)
        published = setup.run.checkpoint is not None and setup.run.tokenizer is None
        num_tokens = setup.tokenizer.vocab_size if published else 0
        rows |= process_memory(len(local_devices(mesh)), num_tokens)
    return RunMemory(rows, phases)


def _update_bytes(setup: Setup, rows: int, shares_prompts: bool = True) -> dict[str, int]:
    """Activations and temporary buffers of a forward and backward pass on one device.

    Args:
      rows: of a micro-batch, on all devices.
      shares_prompts: true if completions of a group run their prompt once.
    """
    geometry, config = setup.geometry, setup.model
    local_rows = -(-rows // setup.mesh.size(setup.mesh.dp))
    if setup.networks.packs and shares_prompts:
        local_rows = geometry.bins
        tokens = local_rows * bin_length(geometry.row_length, setup.mesh)
        tokens //= setup.mesh.size(setup.mesh.sequence)
    else:
        tokens = _pass_tokens(geometry, local_rows, shares_prompts)
    sizes, layout, batch, method = planner_args(config, geometry, setup.run)
    batch = replace(batch, micro_tokens=tokens)
    layers = layer_memory(sizes, layout, batch, method)
    head_rows = local_rows * setup.mesh.size(setup.mesh.dp)
    # The loops of the forward and of the backward pass have a copy of the head each.
    copy = head_copy_bytes(Model(config, geometry.mesh))
    head = 2 * (logits_bytes(config, geometry, head_rows) + copy)
    sent = comm_buffer_bytes(sizes, layout, for_weights(method))
    gathered = model_states(sizes, layout, for_weights(method), True).gathered
    return {
        ACTIVATIONS: round(layers.activations),
        WORKSPACE: round(gathered + max(layers.working + head, sent)),
    }


def _pass_tokens(geometry: Geometry, local_rows: int, shares_prompts: bool = True) -> int:
    """Tokens on one device of a pass over rows of a ``dp`` rank."""
    layout, mesh = geometry.prompt_layout, geometry.mesh
    if not shares_prompts or local_rows % layout.group_size:
        layout = layout._replace(group_size=1)
    sections = layout.sections(local_rows, geometry.response_length)
    return geometry.num_tokens(*sections) // mesh.size(mesh.sequence)


def _layer_bytes(setup: Setup, model: Model, tokens: int, rows: int) -> int:
    """Temporary buffers of the layers of a network on one device in a pass without gradients.

    Args:
      tokens: on the device.
      rows: sequences that these tokens belong to.
    """
    geometry = replace(setup.geometry, mesh=model.mesh)
    sizes, layout, batch, method = planner_args(model.config, geometry, setup.run)
    batch = replace(batch, micro_rows=rows, micro_tokens=tokens)
    values = activation_bytes(sizes, layout, tokens, method, "none")
    scores = working_score_bytes(sizes, layout, batch, method)
    return round(values + scores * NUM_SAVED_SCORES / NUM_WORKING_SCORES)


def _scoring_bytes(setup: Setup, model: Model, rows: int) -> dict[str, int]:
    """Temporary buffers of a network's scoring pass on one device, rows on all devices."""
    geometry = replace(setup.geometry, mesh=model.mesh)
    local_rows = -(-rows // model.mesh.size(model.mesh.dp))
    tokens = _pass_tokens(geometry, local_rows)
    logits = 2 * logits_bytes(model.config, geometry, rows) + head_copy_bytes(model)
    return {LOGITS: logits, WORKSPACE: _layer_bytes(setup, model, tokens, local_rows)}


def _sampling_bytes(setup: Setup) -> dict[str, int]:
    """Temporary buffers of a prefill and of a decoding step on one device."""
    model, mesh = setup.model.without_adapters(), setup.rollout_mesh
    policy = Model(setup.model, setup.mesh)
    dp, tp = mesh.size(mesh.dp), mesh.size(mesh.tp)
    slots = setup.geometry.slots(setup.run.slots)
    # Logits, their noise and their probabilities, of rows that are sharded over tp.
    step = 3 * 4 * (slots // dp // tp) * model.vocab_size
    prompts = -(-min(slots, max(setup.recipe.prompts, MIN_PREFILL_PROMPTS)) // dp)
    rows = max(1, min(prompts, setup.run.prefill_tokens // max(setup.prompt_length, 1)))
    tokens = -(-rows * setup.prompt_length // tp)
    cache = cache_bytes(Model(model, mesh), rows * dp, setup.prompt_length)
    return {"decoding and prefill": max(step, cache + _layer_bytes(setup, policy, tokens, rows))}


def _checkpoint_bytes(setup: Setup) -> int:
    """Bytes on one device of the arrays that a checkpoint stores."""
    total = 0
    for model, optimizer in trained_networks(setup).values():
        specs = placement.stored_specs(model)
        stored_bytes = _local_bytes(shapes(model.config), model.mesh, specs)
        total += _total(select_trained(stored_bytes, table(model.config)))
        total += state_bytes(optimizer, model)
    policy_snapshots = [each for each in setup.frozen.values() if not each.from_file]
    if policy_snapshots and setup.model.lora is None:
        total += sum(weight_bytes(each.model, shards=True) for each in policy_snapshots)
    return total


def rollout_memory(setup: Setup) -> dict[str, int]:
    """Bytes that sampling needs on one of its devices; with disaggregation, on the group whose
    devices have more weights."""
    config, mesh = setup.model.without_adapters(), setup.rollout_mesh
    model, slots = Model(config, mesh), setup.geometry.slots(setup.run.slots)
    row_length = setup.prompt_length + setup.response_length
    rollout_bytes = {KV_CACHE: cache_bytes(model, slots, row_length)}
    rows = slots // mesh.size(mesh.dp) // setup.geometry.rollout_micro_batches
    partials = kernel_bytes(model, rows, cache_columns(row_length, model))
    if partials:
        rollout_bytes[DECODE_PARTIALS] = partials
    if setup.split is not None:
        experts = first_placement(config, setup.split, setup.run.rollout_expert_slots)
        return rollout_bytes | {ROLLOUT_POLICY: max(side_bytes(config, setup.split, experts))}
    is_copy = mesh != setup.mesh or setup.model.lora is not None
    return {
        UNSTACKED: unstacked_bytes(model, is_stored=is_copy),
        **rollout_bytes,
        ROLLOUT_POLICY: _copied_bytes(setup) if is_copy else 0,
    }


def _copied_bytes(setup: Setup) -> int:
    """Bytes on one device of the policy's weights that sampling copies: all on a layout of its own,
    else those that adapters are merged into (`jrl.rollout.resharding.rollout_policy`)."""
    config, mesh = setup.model.without_adapters(), setup.rollout_mesh
    sizes = _local_bytes(cast_shapes(config), mesh, placement.specs(Model(config, mesh)))
    shares = mesh == setup.mesh and not config.execution.fsdp
    copied = jax.tree.map(
        lambda weight, size: 0 if shares and not is_adapted(weight) else size,
        table(setup.model),
        sizes,
        is_leaf=is_adapted,
    )
    return _total(copied)


def unstacked_bytes(model: Model, *, is_stored: bool) -> int:
    """Bytes on one device of the weights that decoding copies
    (`jrl.rollout.decoding.mesh_backend.unstack_policy`).

    Args:
      model: without adapters.
      is_stored: true if the policy is a copy in the sharding that decoding needs.
    """
    config = model.config
    bytes_of_weights = _local_bytes(cast_shapes(config), model.mesh, placement.specs(model))
    total = _total(bytes_of_weights)
    if config.execution.fsdp and not is_stored:
        return total
    # Stacks that are scanned or read in place, and weights without layers, are not copied.
    return total - sum(jax.tree.leaves(unstack(bytes_of_weights, model, lambda size, index: 0)))


def weight_bytes(model: Model, *, shards: bool = False, frozen: bool = False) -> int:
    """Bytes of a network's weights on one device, as used in computation.

    Args:
      shards: true for the device's optimizer shards only.
      frozen: true for frozen weights only.
    """
    config = model.config
    specs_of = placement.shard_specs if shards else placement.specs
    bytes_of_weights = _local_bytes(cast_shapes(config), model.mesh, specs_of(model))
    return _total(select_frozen(bytes_of_weights, table(config)) if frozen else bytes_of_weights)


def _optimizer_bytes(optimizer: Optimizer, model: Model) -> dict[str, int]:
    """Bytes of the float32 masters and of the optimizer's state on one device, by kind."""
    # `shapes` are float32, `cast_shapes` have the dtypes of computation.
    config = model.config
    bytes_of_weights = _local_bytes(shapes(config), model.mesh, placement.shard_specs(model))
    shard = _total(select_trained(bytes_of_weights, table(config)))
    return {
        "float32 masters": shard if keeps_masters(config) else 0,
        "optimizer state": state_bytes(optimizer, model),
    }


def state_bytes(optimizer: Optimizer, model: Model) -> int:
    """Bytes of the optimizer's state of a network on one device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(abstract_state(optimizer, model))
    )


def gradient_bytes(model: Model, like: Transformer[jax.ShapeDtypeStruct], chunks: int = 1) -> int:
    """Bytes of the gradients of trained weights on one device, in the dtypes of `like`; gradients
    of layers are sharded under fsdp, and of one of `chunks` of them."""
    # Under fsdp a layer's gradient is reduce-scattered immediately; gradients of embedding and LM
    # head are unsharded until the end.
    unsharded = _local_bytes(like, model.mesh, placement.specs(model))
    layers = _local_bytes(like, model.mesh, placement.stored_specs(model)).layers
    layers = jax.tree.map(lambda size: size // chunks, layers)
    return _total(select_trained(replace(unsharded, layers=layers), table(model.config)))


def sent_bytes(model: Model, comm_dtype: str) -> int:
    """Bytes of the communication buffers of the largest gradient that is sent in bfloat16 across
    sequence-parallel groups (`sharding.compression`); 0 where gradients are sent in float32."""
    if comm_dtype == "float32":
        return 0
    dims = placement.shard_dims(model, comm_dtype)
    float32_bytes = _local_bytes(shapes(model.config), model.mesh, placement.specs(model))

    def bytes_sent(dim: ShardDim, float32: int) -> int:
        uncompressed_stages = [stage for stage in dim.stages if stage != dim.compressed]
        shard = float32 // math.prod(model.mesh.size(stage) for stage in uncompressed_stages)
        # Two copies, each of half the bytes.
        return shard if dim.compressed else 0

    return max(jax.tree.leaves(jax.tree.map(bytes_sent, dims, float32_bytes)))


def _total(bytes_of: Transformer[int]) -> int:
    return sum(jax.tree.leaves(bytes_of))


def _local_bytes(
    like: Transformer[jax.ShapeDtypeStruct],
    mesh: FoldedMesh,
    spec_tree: Transformer[PartitionSpec],
) -> Transformer[int]:
    """Bytes of each weight on one device."""
    # As stored: uneven pipeline stages are padded to equal depth.
    stored_shapes = jax.eval_shape(lambda weights: placement.in_chunks(weights, mesh), like)
    return placement.local_bytes(stored_shapes, spec_tree, mesh)


def cache_bytes(model: Model, slots: int, row_length: int) -> int:
    """Bytes of the KV cache on one device, see `moe.cache.Cache`.

    Args:
      model: on the mesh of sampling.
      slots: rows on all devices.
      row_length: tokens of a row.
    """
    config, mesh = model.config, model.mesh
    tp = mesh.size(mesh.tp)
    slots //= mesh.size(mesh.dp)
    row_length = cache_columns(row_length, model)
    if caches_latent(config):
        # Replicated over tp: every head needs all of it.
        assert config.mla is not None
        widths = config.mla.kv_lora_rank + config.mla.qk_rope_head_dim
    else:
        widths = config.num_kv_heads // tp * (config.head_dim + config.v_head_dim)
    itemsize = jax.numpy.dtype(config.dtype).itemsize
    attending = config.num_layers - len(delta_layers(config))
    return slots * (attending * row_length * widths * itemsize + _state_bytes(config, tp, itemsize))


def _state_bytes(config: ModelConfig, tp: int, itemsize: int) -> int:
    """Bytes of a row's states in the layers with Gated DeltaNet, whatever its length."""
    if config.delta is None:
        return 0
    delta = config.delta
    state = delta.num_value_heads // tp * delta.key_head_dim * delta.value_head_dim
    tail = delta.num_key_heads // tp * delta.content_dim * (delta.conv_width - 1)
    # The recurrent state is float32.
    return len(delta.layers) * (4 * state + itemsize * tail)


def logits_bytes(config: ModelConfig, geometry: Geometry, rows: int) -> int:
    """Bytes of the float32 logits on one device while `rows` responses are scored in one pass."""
    mesh, vocab_size = geometry.mesh, config.vocab_size
    # Of responses only: states before prompt tokens never reach the LM head.
    section = -(-rows // mesh.size(mesh.dp)), geometry.response_length
    tokens = geometry.num_tokens(section) // mesh.size(mesh.cp)
    width, chunk = -(-vocab_size // mesh.size(mesh.tp)), config.execution.vocab_chunk
    num_logits = tokens * (width if chunk is None else min(chunk, width))
    # Top-k and top-p need all logits of a row: rows are sharded over tp instead of the vocabulary.
    if sampling_of(geometry.recipe).truncates:
        num_logits = max(num_logits, tokens // mesh.size(mesh.tp) * vocab_size)
    return 4 * num_logits


def head_copy_bytes(model: Model) -> int:
    """Bytes of a tied head's transpose on a CPU device, ``itemsize x d_model x vocab / tp``: XLA
    copies it before the loop over `Execution.vocab_chunk` columns; 0 if one chunk has all."""
    config, mesh = model.config, model.mesh
    width = -(-config.vocab_size // mesh.size(mesh.tp))
    chunk = config.execution.vocab_chunk
    if mesh.platform != "cpu" or config.head != "tied" or chunk is None or chunk >= width:
        return 0
    return jax.numpy.dtype(config.dtype).itemsize * config.d_model * width


def choices_bytes(config: ModelConfig, tokens: int) -> int:
    """Bytes of the expert ids of `tokens`."""
    num_ids = tokens * config.num_expert_layers * config.experts_per_token
    return num_ids * choices_dtype(config.num_experts).itemsize


def stage_input_bytes(config: ModelConfig, geometry: Geometry) -> int:
    """Bytes of the layers' inputs that a pipeline stage keeps during an update, for all chunks in
    flight."""
    mesh = geometry.mesh
    sections = geometry.prompt_layout.sections(geometry.rows, geometry.response_length)
    tokens = geometry.num_tokens(*sections) // mesh.size(mesh.sequence)
    schedule = Schedule(mesh.layout.pp, geometry.num_micro_batches, mesh.layout.vpp)
    # Slot indices start at 0.
    chunks = 1 + max(map(max, schedule.slots()))
    # Dense first layers run with the embedding, outside of the chunks.
    layers = placement.stored_depth(config.num_layers - config.num_dense_layers, mesh)
    itemsize = jax.numpy.dtype(config.dtype).itemsize
    return chunks * layers * tokens * config.d_model * itemsize
