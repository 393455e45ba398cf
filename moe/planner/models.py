"""Sizes of models (published ones, networks, checkpoints), and the weights of one device."""

import functools
import math
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path

from moe.config import ModelConfig
from moe.planner.method import Method, Storage
from sharding.folding import Layout


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention: keys and values come from one vector per token.

    Args:
      rank: width of that vector.
      query_rank: width of the one that queries come from; 0 makes them directly.
      rope_dim: elements of a key that all heads share, part of `ModelSizes.head_dim`.
      value_dim: width of a value head.
    """

    rank: int
    query_rank: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a decoder-only transformer with SwiGLU.

    Args:
      num_layers: blocks.
      d_model: width of the residual stream.
      num_heads: query heads.
      num_kv_heads: key and value heads.
      head_dim: width of a head.
      vocab_size: token ids.
      num_experts: experts of a layer; 0 makes every layer dense.
      experts_per_token: experts that a token is sent to.
      d_expert: hidden width of one expert.
      d_ff: hidden width of the dense layer, or of the shared expert; 0 is none.
      num_dense_layers: the first blocks, with a dense layer in place of experts.
      dense_d_ff: hidden width of those.
      tied: logits come from the embedding.
      capacity_factor: experts take at most this multiple of what even routing sends them from one
        device; None drops nothing.
      query_key_norm: queries and keys have norms.
      latent: makes attention multi-head latent attention; None is grouped-query attention.
      window: tokens that a query sees in the layers with a window; 0 is all of them.
      num_window_layers: layers with a window.
    """

    num_layers: int
    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    num_experts: int = 0
    experts_per_token: int = 0
    d_expert: int = 0
    d_ff: int = 0
    num_dense_layers: int = 0
    dense_d_ff: int = 0
    tied: bool = False
    capacity_factor: float | None = None
    query_key_norm: bool = False
    latent: LatentAttention | None = None
    window: int = 0
    num_window_layers: int = 0

    def __post_init__(self):
        for name in (
            *("num_layers", "d_model", "num_heads", "num_kv_heads", "head_dim", "vocab_size"),
            *(("experts_per_token", "d_expert") if self.num_experts else ("d_ff",)),
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")

    @property
    def queries(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def value_dim(self) -> int:
        """Width of a value head."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def outputs(self) -> int:
        """Width of attention's output, of all heads."""
        return self.num_heads * self.value_dim

    @property
    def keys(self) -> int:
        """Width of all key heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def values(self) -> int:
        """Width of all value heads."""
        return self.num_kv_heads * self.value_dim

    @property
    def latents(self) -> int:
        """Width of the vectors that latent attention expands."""
        latent = self.latent
        return 0 if latent is None else latent.query_rank + latent.rank + latent.rope_dim

    def cached(self, tp: int) -> float:
        """Numbers of a token in the KV cache of a layer, on each of ``tp`` ranks: keys and values
        of its heads, or the latent vector, which every rank has."""
        if self.latent is not None:
            return self.latent.rank + self.latent.rope_dim
        return (self.keys + self.values) / tp

    @property
    def num_main_layers(self) -> int:
        """Blocks after the first ones with a dense layer."""
        return self.num_layers - self.num_dense_layers

    @property
    def num_expert_layers(self) -> int:
        """Blocks that have experts."""
        return self.num_main_layers if self.num_experts else 0

    @property
    def keeps_projected(self) -> bool:
        """True if rematerialisation by name keeps the first products, before norms and further
        products, in the place of queries, keys and values."""
        return self.query_key_norm or self.latent is not None

    @property
    def projected(self) -> int:
        """Width of the first products on the way to queries, keys and values."""
        if self.latent is None:
            return self.queries + self.keys + self.values
        return self.latents + (0 if self.latent.query_rank else self.queries)

    @property
    def attention_parameters(self) -> int:
        """Matrices of one attention layer."""
        return self.projection_parameters + self.d_model * self.outputs

    @property
    def projection_parameters(self) -> int:
        """Matrices of queries, keys and values of one attention layer."""
        h, latent = self.d_model, self.latent
        if latent is None:
            return h * (self.queries + self.keys + self.values)
        queries = latent.query_rank * (h + self.queries) if latent.query_rank else h * self.queries
        content = self.keys - self.num_kv_heads * latent.rope_dim
        return queries + h * (latent.rank + latent.rope_dim) + latent.rank * (content + self.values)

    @property
    def expert_parameters(self) -> int:
        """Matrices of the routed experts of one layer."""
        return 3 * self.num_experts * self.d_model * self.d_expert

    @property
    def dense_parameters(self) -> int:
        """Matrices that process every token, of all layers: attention and dense layers."""
        hidden = self.num_main_layers * self.d_ff + self.num_dense_layers * self.dense_d_ff
        return self.num_layers * self.attention_parameters + 3 * self.d_model * hidden

    @property
    def routed_parameters(self) -> int:
        """Matrices of the experts that a token is sent to, of all layers."""
        hidden = self.num_expert_layers * self.experts_per_token * self.d_expert
        return 3 * self.d_model * hidden

    @property
    def parameters(self) -> int:
        """Numbers in all matrices and norms."""
        norms = 2 * self.num_layers * self.d_model + self.d_model
        embedding_and_head = self.vocab_size * self.d_model * (1 if self.tied else 2)
        router = self.d_model * self.num_experts
        experts = self.num_expert_layers * (self.expert_parameters + router)
        return self.dense_parameters + experts + norms + embedding_and_head

    @property
    def layer_width(self) -> int:
        """Hidden units per token in one of the layers after the dense first ones."""
        routed = self.experts_per_token * self.d_expert if self.num_experts else 0
        return routed + self.d_ff

    def seen(self, time: int) -> float:
        """Twice the mean number of tokens that a query sees, summed over layers.

        It is `time` for a layer with causal attention, and ``w (2 - w / time)`` with a window of w.
        """
        windows = self.num_window_layers if 0 < self.window < time else 0
        in_window = self.window * (2 - self.window / time)
        return (self.num_layers - windows) * time + windows * in_window

    def training_flops(self, time: int) -> float:
        """Floating-point operations of one trained token in sequences of `time`.

        ``6 (L (h (q + 2 kv) + q h) + sum_layers 3 h f + h V) + 6 L q time``, as
        `moe.config.training_flops` counts them, and Megatron-Core. Latent attention has its own
        matrices in the place of the first term, and the mean width of queries and outputs as q.
        """
        width = self.num_main_layers * self.layer_width + self.num_dense_layers * self.dense_d_ff
        weights = self.num_layers * self.attention_parameters
        weights += 3 * self.d_model * width + self.d_model * self.vocab_size
        return 6.0 * weights + 3.0 * (self.queries + self.outputs) * self.seen(time)


LATENT = LatentAttention(rank=512, query_rank=1536, rope_dim=64, value_dim=128)

PRESETS = {
    # Layers, width, query heads, key/value heads, width of a head, vocabulary; experts, those of a
    # token, hidden units of one; of the shared expert.
    "mixtral-8x22b": ModelSizes(56, 6144, 48, 8, 128, 32768, 8, 2, 16384),
    # Each expert cut into eight, and eight chosen of the 64.
    "mixtral-8x22b-g8t8": ModelSizes(56, 6144, 48, 8, 128, 32768, 64, 8, 2048),
    "llama3-8x70b": ModelSizes(80, 8192, 64, 8, 128, 128256, 8, 2, 28672),
    "qwen2-57b-a14b": ModelSizes(28, 3584, 28, 4, 128, 151936, 64, 8, 2560, d_ff=20480),
    "mixtral-8x7b": ModelSizes(32, 4096, 32, 8, 128, 32000, 8, 2, 14336),
    # Its name needs a shared expert as wide as the others, which the paper does not mention.
    "megascale-352b": ModelSizes(60, 4096, 32, 8, 128, 65536, 32, 3, 14336, d_ff=14336),
    "phi-3.5-moe": ModelSizes(32, 4096, 32, 8, 128, 32064, 16, 2, 6400),
    "qwen3-235b-a22b": ModelSizes(94, 4096, 64, 4, 128, 151936, 128, 8, 1536, query_key_norm=True),
    "qwen3-30b-a3b": ModelSizes(48, 2048, 32, 4, 128, 151936, 128, 8, 768, query_key_norm=True),
    "deepseek-v3": ModelSizes(
        *(61, 7168, 128, 128, 192, 129280, 256, 8, 2048, 2048),
        num_dense_layers=3,
        dense_d_ff=18432,
        latent=LATENT,
    ),
    "kimi-k2": ModelSizes(
        *(61, 7168, 64, 64, 192, 163840, 384, 8, 2048, 2048),
        num_dense_layers=1,
        dense_d_ff=18432,
        latent=LATENT,
    ),
    "gpt-oss-20b": ModelSizes(
        *(24, 2880, 64, 8, 64, 201088, 32, 4, 2880), window=128, num_window_layers=12
    ),
    "gpt-oss-120b": ModelSizes(
        *(36, 2880, 64, 8, 64, 201088, 128, 4, 2880), window=128, num_window_layers=18
    ),
    "llama2-70b": ModelSizes(80, 8192, 64, 8, 128, 32000, d_ff=28672),
    "llama3.1-8b": ModelSizes(32, 4096, 32, 8, 128, 128256, d_ff=14336),
    "llama3.1-70b": ModelSizes(80, 8192, 64, 8, 128, 128256, d_ff=28672),
    "llama3.1-405b": ModelSizes(126, 16384, 128, 8, 128, 128256, d_ff=53248),
    # 14.84 B parameters, by the report on KempnerForge; its 7B is Llama-3.1-8B.
    "kempner-13b": ModelSizes(40, 5120, 40, 8, 128, 128256, d_ff=17920),
    "dbrx": ModelSizes(40, 6144, 48, 8, 128, 100352, 16, 4, 10752),
    # The paper gives its name and 317 B parameters; these sizes come to that.
    "scaled-moe": ModelSizes(48, 8192, 64, 8, 128, 32000, 32, 4, 8192),
}
"""Liu et al., "MoE Parallel Folding", 2025, section 4 (https://arxiv.org/abs/2504.14960); Jin et
al., "MegaScale-MoE", 2025, table 1 (https://arxiv.org/abs/2505.11432); the config.json of Qwen3,
DeepSeek-V3, Kimi-K2, Llama and gpt-oss, without layers that predict further tokens; Zhu et al.,
"MegaScale-Infer", 2025, for DBRX and Scaled-MoE (https://arxiv.org/abs/2504.02263)."""


def sizes_of(config: ModelConfig) -> ModelSizes:
    """Sizes of a network; biases, norms of heads and after layers, sinks and gates are left out.

    Raises:
      ValueError: for Gated DeltaNet, which the planner does not describe.
    """
    if config.delta is not None:
        layers = f"{len(config.delta.layers)} of {config.num_layers} layers"
        raise ValueError(
            f"the planner does not support Gated DeltaNet (delta), which {layers} have."
        )
    derived = {"tied", "query_key_norm", "latent", "window", "num_window_layers"}
    same = {field.name for field in fields(ModelSizes)} - derived
    if config.num_experts == 0:
        same -= {"experts_per_token", "d_expert"}
    latent = config.mla and LatentAttention(
        config.mla.kv_lora_rank,
        config.mla.q_lora_rank or 0,
        config.mla.qk_rope_head_dim,
        config.mla.v_head_dim,
    )
    has_window = config.sliding_window is not None
    return ModelSizes(
        **{name: getattr(config, name) for name in same},
        tied=config.head != "untied",
        query_key_norm=config.query_key_norm is not None,
        latent=latent,
        window=config.sliding_window or 0,
        num_window_layers=has_window * (config.num_layers - len(config.full_attention_layers)),
    )


def sizes_from(path: str | Path, ignore: Collection[str] = ()) -> ModelSizes:
    """The sizes that a checkpoint's config.json states, of every family that `moe` reads.

    Args:
      path: the checkpoint's directory, or its config.json.
      ignore: options that are passed over although they are not known.

    Raises:
      ValueError: if the file is not of a supported network, or the planner does not describe it.
    """
    if find_spec("safetensors") is None:
        raise ValueError(
            f'{path} needs safetensors, which is not installed: run pip install -e ".[hf]".'
        )
    # The reader needs safetensors, an extra.
    from moe.huggingface import config_from

    try:
        return sizes_of(config_from(path, ignore=ignore))
    except ValueError as error:
        line = " ".join(str(error).split())
        raise ValueError(line if str(path) in line else f"{path}: {line}") from error


@dataclass(frozen=True)
class WeightGroup:
    """Weights of one device that share a replica group.

    Attributes:
      what: in words.
      parameters: on the device, of all its layers.
      replicas: logical axes over which they are replicated.
      in_layers: they belong to the equal layers, which full sharding gathers one by one.
      depth: number of layers they belong to; 0 for none.
      is_precise: they are norms or routers, which may stay float32 (`Method.stored_precise`).
    """

    what: str
    parameters: int
    replicas: tuple[str, ...]
    in_layers: bool = True
    depth: int = 0
    is_precise: bool = False

    def stored(self, method: Method) -> Storage:
        """Bytes of each of them."""
        return method.stored_precise if self.is_precise else method.stored

    def group(self, layout: Layout) -> int:
        """Size of the replica group."""
        return math.prod(getattr(layout, axis) for axis in self.replicas)

    def shard_size(self, layout: Layout) -> int:
        """Parameters of one shard if they are sharded over the group (ZeRO)."""
        return -(-self.parameters // self.group(layout))


@functools.lru_cache(maxsize=1024)
def single_chunk(layout: Layout) -> Layout:
    """The layout with one chunk of layers on each stage."""
    return layout if layout.vpp == 1 else replace(layout, vpp=1)


def weight_layout(model: ModelSizes, layout: Layout) -> Layout:
    """The layout with one chunk a stage if a device then has the same weights: a cache key."""
    reduced = single_chunk(layout)
    is_same = layers_on_device(model, reduced) == layers_on_device(model, layout)
    return reduced if is_same else layout


@functools.lru_cache(maxsize=1024)
def weight_groups(model: ModelSizes, layout: Layout) -> tuple[WeightGroup, ...]:
    """All weights of one device.

    Attention and dense layers are sharded over ``tp``, experts over ``ep`` and ``etp``, layers over
    ``pp``, and rows of the embedding and columns of the head over ``tp`` if it divides them; norms
    and routers are replicated. Every stage has embedding, head and the first dense layers, and
    chunks that are all as deep as the deepest.
    """
    h, tp = model.d_model, layout.tp
    layers = layers_on_device(model, layout)
    routed = layers if model.num_experts else 0
    tp_sharded, tp_replicated = ("dp", "cp"), ("dp", "cp", "tp")
    num_first = model.num_dense_layers
    all_stages_replicated = ("pp", *tp_replicated)
    all_stages_sharded = ("pp", *tp_sharded)
    shards_tables = shards_vocabulary(model, layout)
    tables = (1 if model.tied else 2) * model.vocab_size * h // (tp if shards_tables else 1)
    in_layer = functools.partial(WeightGroup, depth=layers)
    in_first = functools.partial(WeightGroup, in_layers=False, depth=num_first)
    outside = functools.partial(WeightGroup, in_layers=False)
    norms = layers * 2 * h + routed * h * model.num_experts
    experts = routed * model.expert_parameters // (layout.ep * layout.etp)
    first = num_first * (model.attention_parameters + 3 * h * model.dense_d_ff) // tp
    table_replicas = all_stages_sharded if shards_tables else all_stages_replicated
    groups = [
        in_layer("attention", layers * model.attention_parameters // tp, tp_sharded),
        in_layer("dense layers", layers * 3 * h * model.d_ff // tp, tp_sharded),
        in_layer("norms and routers", norms, tp_replicated, is_precise=True),
        in_layer("experts", experts, ("edp",)),
        in_first("first dense layers", first, all_stages_sharded),
        in_first(
            "norms of first layers", num_first * 2 * h, all_stages_replicated, is_precise=True
        ),
        outside("embedding and head", tables, table_replicas),
        outside("last norm", h, all_stages_replicated, is_precise=True),
    ]
    return tuple(group for group in groups if group.parameters)


def layers_on_device(model: ModelSizes, layout: Layout) -> int:
    """Layers of a pipeline stage, after the dense first ones; of the deepest if stages differ."""
    return layout.vpp * -(-model.num_main_layers // (layout.pp * layout.vpp))


def layers_on_deepest_stage(model: ModelSizes, layout: Layout) -> float:
    """`layers_on_device` with their share of the dense first layers."""
    return model.num_layers * layers_on_device(model, layout) / model.num_main_layers


def shards_vocabulary(model: ModelSizes, layout: Layout) -> bool:
    """True if ``tp`` divides the vocabulary: else each of its ranks has all rows and columns."""
    return model.vocab_size % layout.tp == 0


def parameters_on_device(model: ModelSizes, layout: Layout) -> int:
    """Number of parameters on a device, as they are used."""
    return sum(group.parameters for group in weight_groups(model, layout))


@functools.lru_cache(maxsize=1024)
def sharded_parameters(model: ModelSizes, layout: Layout) -> int:
    """Number of parameters whose optimizer state a device keeps (ZeRO)."""
    return sum(group.shard_size(layout) for group in weight_groups(model, layout))
