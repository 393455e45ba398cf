"""The config.json files of published models: the network that each one is, or why it is refused.

published_configs.json has their options and values as the Hugging Face Hub serves them, or as the
version of `transformers` that a name says saved them; the options of vision parts are cut short.
"""

import json
import math
from pathlib import Path

import jax
import pytest

from moe import huggingface
from moe.architecture.feed_forward import ClampedSwiGLU
from moe.architecture.rope import LinearScaling, LlamaScaling, YarnScaling
from moe.config import GatedDeltaNet, MultiHeadLatentAttention
from moe.weights import axis_sizes, num_parameters, table

FILES = json.loads((Path(__file__).parent / "published_configs.json").read_text())

PLAIN = {
    "mla": None,
    "delta": None,
    "attention_gate": False,
    "qkv_bias": False,
    "attention_sinks": False,
    "attention_scale": None,
    "norm_placement": "before",
    "query_key_norm": None,
    "num_experts": 0,
    "activation": "silu",
    "num_dense_layers": 0,
    "embedding_scale": 1.0,
    "head": "untied",
    "rope_scaling": None,
    "rope_interleaved": False,
    "rotary_dim": None,
    "window_rope_base": None,
    "nope_layers": (),
    "sliding_window": None,
    "full_attention_layers": (),
    "norm_epsilon": 1e-5,
    "router_scores": "softmax",
    "dtype": "bfloat16",
}
"""Fields of a network that has none of the features of the architectures below."""
LATENT = MultiHeadLatentAttention(
    kv_lora_rank=512, q_lora_rank=1536, qk_rope_head_dim=64, v_head_dim=128
)
GROUPED = {"router_scores": "sigmoid", "selection_bias": True, "renormalise": True}
FAMILIES = {
    "llama": {},
    "mistral": {},
    "mixtral": {"num_experts": 8, "experts_per_token": 2, "renormalise": True},
    "qwen2": {"qkv_bias": True, "norm_epsilon": 1e-6},
    "qwen2_moe": {
        "qkv_bias": True,
        "norm_epsilon": 1e-6,
        "shared_expert_gate": True,
        "renormalise": False,
    },
    "qwen3": {"query_key_norm": "head", "norm_epsilon": 1e-6},
    "qwen3_moe": {
        "query_key_norm": "head",
        "norm_epsilon": 1e-6,
        "num_experts": 128,
        "experts_per_token": 8,
        "renormalise": True,
        "d_ff": 0,
    },
    "qwen3_next": {
        "query_key_norm": "head",
        "norm_epsilon": 1e-6,
        "attention_gate": True,
        "shared_expert_gate": True,
        "renormalise": True,
    },
    "smollm3": {"norm_epsilon": 1e-6},
    "olmo3": {
        "norm_placement": "after",
        "query_key_norm": "projection",
        "norm_epsilon": 1e-6,
        "sliding_window": 4096,
    },
    "olmoe": {
        "query_key_norm": "projection",
        "num_experts": 64,
        "experts_per_token": 8,
        "renormalise": False,
    },
    "deepseek_v3": {"norm_epsilon": 1e-6, "mla": LATENT, "rope_interleaved": True, **GROUPED},
    "kimi_k2": {"norm_epsilon": 1e-6, "mla": LATENT, "rope_interleaved": True, **GROUPED},
    "glm4_moe": {"qkv_bias": True, "rotary_dim": 64, "experts_per_token": 8, **GROUPED},
    "gpt_oss": {
        "qkv_bias": True,
        "attention_out_bias": True,
        "attention_sinks": True,
        "activation": ClampedSwiGLU(1.702, 7.0),
        "expert_bias": True,
        "router_bias": True,
        "sliding_window": 128,
        "experts_per_token": 4,
    },
    "gemma3_text": {
        "norm_placement": "both",
        "query_key_norm": "head",
        "norm_epsilon": 1e-6,
        "activation": "gelu_tanh",
        "embedding_scale": None,
        "head": "tied",
        "window_rope_base": 1e4,
    },
}
"""What every network of an architecture has beyond `PLAIN`."""

LLAMA31, LLAMA32 = (LlamaScaling(factor, 1.0, 4.0, 8192) for factor in (8.0, 32.0))
OLMO_YARN = YarnScaling(8.0, 8192, 32.0, 1.0, attention_factor=1.2079441541679836)
OSS_YARN = YarnScaling(32.0, 4096, 32.0, 1.0, truncate=False)
V3_YARN = YarnScaling(40.0, 4096, 32.0, 1.0, rotary_temperature=1.0, score_temperature=1.0)
K2_YARN = YarnScaling(32.0, 4096, 1.0, 1.0, rotary_temperature=1.0, score_temperature=1.0)
TIED = {"head": "tied"}


def full(num_layers, period):
    """Every `period`-th layer, which have no window."""
    return tuple(range(period - 1, num_layers, period))


def network(parameters, head_dim, rope_base, **fields):
    return parameters, {"head_dim": head_dim, "rope_base": rope_base, **fields}


LLAMA_8B = network(8_030_261_248, 128, 5e5, num_kv_heads=8, rope_scaling=LLAMA31)
LLAMA_1B = network(1_235_814_400, 64, 5e5, rope_scaling=LLAMA32, **TIED)
QWEN2_7B, QWEN2_32B = 7_615_616_512, 32_763_876_352
QWEN3_4B = 4_022_468_096
QWEN3_8B = network(8_190_735_360, 128, 1e6)
QWEN3_30B = 30_532_122_624
NEXT = network(
    81_324_862_720 - 1_650_471_424,
    256,
    1e7,
    delta=GatedDeltaNet(tuple(n for n in range(48) if n % 4 != 3), 16, 32, 128, 128, 4),
    rotary_dim=64,
    num_experts=512,
    experts_per_token=10,
    d_expert=512,
    d_ff=512,
)
OLMO_7B = network(
    7_298_011_136,
    128,
    5e5,
    rope_scaling=OLMO_YARN,
    window_rope_base=5e5,
    full_attention_layers=full(32, 4),
)
OLMOE = network(6_919_161_856, 128, 1e4, d_expert=1024)
V3 = network(
    671_026_419_200,
    192,
    1e4,
    rope_scaling=V3_YARN,
    num_experts=256,
    experts_per_token=8,
    num_expert_groups=8,
    expert_groups_per_token=4,
    num_dense_layers=3,
    routed_scaling=2.5,
)
MOONLIGHT = network(
    15_960_110_208,
    192,
    5e4,
    mla=MultiHeadLatentAttention(
        kv_lora_rank=512, q_lora_rank=None, qk_rope_head_dim=64, v_head_dim=128
    ),
    num_experts=64,
    experts_per_token=6,
    d_ff=2 * 1408,
    num_dense_layers=1,
    routed_scaling=2.446,
    norm_epsilon=1e-5,
)
GLM_AIR = network(
    110_468_824_832 - 3_616_573_568,
    128,
    1e6,
    num_experts=128,
    num_dense_layers=1,
    routed_scaling=1.0,
)
GLM = network(
    358_337_791_296 - 5_539_962_272,
    128,
    1e6,
    num_experts=160,
    num_dense_layers=3,
    routed_scaling=2.5,
    query_key_norm="head",
)
OSS = {"rope_scaling": OSS_YARN, "dtype": "float32"}
OSS_20B = network(
    20_914_757_184, 64, 1.5e5, num_experts=32, full_attention_layers=full(24, 2), **OSS
)
GEMMA_270M = network(
    268_098_176, 256, 1e6, sliding_window=512, full_attention_layers=full(18, 6), num_kv_heads=1
)
GEMMA_1B = network(999_885_952, 256, 1e6, sliding_window=512, full_attention_layers=full(26, 6))
FLOAT32 = {"dtype": "float32"}  # where the file says float16

NETWORKS = {
    "huggyllama/llama-7b": network(
        6_738_415_616, 128, 1e4, num_kv_heads=32, norm_epsilon=1e-6, **FLOAT32
    ),
    "meta-llama/Llama-2-7b-hf": network(6_738_415_616, 128, 1e4, num_kv_heads=32, **FLOAT32),
    "meta-llama/Llama-2-70b-hf": network(68_976_648_192, 128, 1e4, num_kv_heads=8, **FLOAT32),
    "codellama/CodeLlama-7b-hf": network(6_738_546_688, 128, 1e6),
    "meta-llama/Meta-Llama-3-8B": network(8_030_261_248, 128, 5e5, num_kv_heads=8),
    "meta-llama/Llama-3.1-8B": LLAMA_8B,
    "meta-llama/Llama-3.2-1B-Instruct": LLAMA_1B,
    "meta-llama/Llama-3.2-1B-Instruct, saved by transformers 5": LLAMA_1B,
    "meta-llama/Llama-3.2-3B": network(3_212_749_824, 128, 5e5, rope_scaling=LLAMA32, **TIED),
    "meta-llama/Llama-3.3-70B-Instruct": network(70_553_706_496, 128, 5e5, rope_scaling=LLAMA31),
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": LLAMA_8B,
    "unsloth/Llama-3.2-1B-Instruct": LLAMA_1B,
    "unsloth/phi-4": network(14_659_507_200, 128, 2.5e5, num_kv_heads=10),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": network(1_100_048_384, 64, 1e4, num_kv_heads=4),
    "HuggingFaceTB/SmolLM2-135M-Instruct": network(134_515_008, 64, 1e5, **TIED),
    "HuggingFaceTB/SmolLM2-360M-Instruct": network(361_821_120, 64, 1e5, **TIED),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": network(1_711_376_384, 64, 1.3e5, **TIED),
    "01-ai/Yi-1.5-6B": network(6_061_035_520, 128, 5e6, norm_epsilon=1e-6),
    "01-ai/Yi-1.5-34B": network(34_388_917_248, 128, 5e6, norm_epsilon=1e-6),
    "mistralai/Mistral-7B-v0.1": network(7_241_732_096, 128, 1e4, sliding_window=4096),
    "mistralai/Mistral-7B-v0.3": network(7_248_023_552, 128, 1e6),
    "mistralai/Mistral-7B-Instruct-v0.3, all of to_dict of transformers 4.38": network(
        7_248_023_552, 128, 1e6
    ),
    "mistralai/Mistral-Nemo-Base-2407": network(12_247_782_400, 128, 1e6),
    "mistralai/Ministral-8B-Instruct-2410": network(8_019_808_256, 128, 1e8, sliding_window=32768),
    "mistralai/Mixtral-8x7B-v0.1": network(46_702_792_704, 128, 1e6),
    "mistralai/Mixtral-8x22B-v0.1": network(140_620_634_112, 128, 1e6),
    "Qwen/Qwen2-1.5B-Instruct": network(1_543_714_304, 128, 1e6, **TIED),
    "Qwen/Qwen2.5-0.5B": network(494_032_768, 64, 1e6, **TIED),
    "Qwen/Qwen2.5-1.5B": network(1_543_714_304, 128, 1e6, **TIED),
    "Qwen/Qwen2.5-1.5B, saved by transformers 5": network(1_543_714_304, 128, 1e6, **TIED),
    "Qwen/Qwen2.5-3B": network(3_085_938_688, 128, 1e6, **TIED),
    "Qwen/Qwen2.5-7B-Instruct": network(QWEN2_7B, 128, 1e6),
    "Qwen/Qwen2.5-14B": network(14_770_033_664, 128, 1e6, norm_epsilon=1e-5),
    "Qwen/Qwen2.5-32B": network(QWEN2_32B, 128, 1e6, norm_epsilon=1e-5),
    "Qwen/Qwen2.5-72B": network(72_706_203_648, 128, 1e6, norm_epsilon=1e-5),
    "Qwen/Qwen2.5-Math-7B": network(QWEN2_7B, 128, 1e4),
    "Qwen/Qwen2.5-Coder-7B-Instruct": network(QWEN2_7B, 128, 1e6),
    "Qwen/QwQ-32B": network(QWEN2_32B, 128, 1e6, norm_epsilon=1e-5),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": network(1_777_088_000, 128, 1e4),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": network(QWEN2_7B, 128, 1e4),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": network(QWEN2_32B, 128, 1e6, norm_epsilon=1e-5),
    "Qwen/Qwen1.5-MoE-A2.7B-Chat": network(
        14_315_784_192, 128, 1e6, num_experts=60, experts_per_token=4, d_ff=5632
    ),
    "Qwen/Qwen2-57B-A14B": network(
        57_408_658_944, 128, 1e6, num_experts=64, experts_per_token=8, d_ff=20480
    ),
    "Qwen/Qwen3-0.6B": network(596_049_920, 128, 1e6, **TIED),
    "Qwen/Qwen3-1.7B": network(1_720_574_976, 128, 1e6, **TIED),
    "Qwen/Qwen3-4B": network(QWEN3_4B, 128, 1e6, **TIED),
    "Qwen/Qwen3-4B-Thinking-2507": network(QWEN3_4B, 128, 5e6, **TIED),
    "Qwen/Qwen3-8B": QWEN3_8B,
    "Qwen/Qwen3-8B-FP8": QWEN3_8B,
    "Qwen/Qwen3-14B": network(14_768_307_200, 128, 1e6),
    "Qwen/Qwen3-32B": network(32_762_123_264, 128, 1e6),
    "a Qwen3-0.6B-Base fine-tuned in float32, saved by transformers 4.54": network(
        596_049_920, 128, 1e6, **TIED, **FLOAT32
    ),
    "Qwen/Qwen3-30B-A3B": network(QWEN3_30B, 128, 1e6),
    "Qwen/Qwen3-30B-A3B-Thinking-2507": network(QWEN3_30B, 128, 1e7),
    "Qwen/Qwen3-235B-A22B-Instruct-2507": network(235_093_634_560, 128, 5e6),
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": network(QWEN3_30B, 128, 1e7),
    "Qwen/Qwen3-Coder-480B-A35B-Instruct": network(480_154_875_392, 128, 1e7, num_experts=160),
    "Qwen/Qwen3-Next-80B-A3B-Thinking": NEXT,
    "Qwen/Qwen3-Next-80B-A3B-Thinking, saved by transformers 5": NEXT,
    "HuggingFaceTB/SmolLM3-3B": network(3_075_098_624, 128, 5e6, nope_layers=full(36, 4), **TIED),
    "allenai/Olmo-3-7B-Think": OLMO_7B,
    "allenai/Olmo-3-7B-Think, saved by transformers 5": OLMO_7B,
    "allenai/Olmo-3.1-32B-Instruct": network(
        32_233_522_176,
        128,
        5e5,
        rope_scaling=OLMO_YARN,
        window_rope_base=5e5,
        full_attention_layers=full(64, 4),
    ),
    "allenai/OLMoE-1B-7B-0924": OLMOE,
    "allenai/OLMoE-1B-7B-0125-Instruct": OLMOE,
    "deepseek-ai/DeepSeek-R1": V3,
    "deepseek-ai/DeepSeek-V3.1": V3,
    "moonshotai/Kimi-K2-Instruct": network(
        1_026_408_232_448,
        192,
        5e4,
        rope_scaling=K2_YARN,
        num_experts=384,
        experts_per_token=8,
        num_dense_layers=1,
        routed_scaling=2.827,
    ),
    "moonshotai/Moonlight-16B-A3B": MOONLIGHT,
    "moonshotai/Moonlight-16B-A3B, saved by transformers 5": MOONLIGHT,
    "zai-org/GLM-4.5-Air": GLM_AIR,
    "zai-org/GLM-4.5-Air, saved by transformers 5": GLM_AIR,
    "zai-org/GLM-4.5": GLM,
    "zai-org/GLM-4.6": GLM,
    "openai/gpt-oss-20b": OSS_20B,
    "openai/gpt-oss-20b, saved by transformers 5": OSS_20B,
    "openai/gpt-oss-120b": network(
        116_829_156_672, 64, 1.5e5, num_experts=128, full_attention_layers=full(36, 2), **OSS
    ),
    "unsloth/gpt-oss-20b-BF16": (OSS_20B[0], {**OSS_20B[1], "dtype": "bfloat16"}),
    "google/gemma-3-270m-it": GEMMA_270M,
    "google/gemma-3-270m-it, saved by transformers 5": GEMMA_270M,
    "google/gemma-3-1b-it": GEMMA_1B,
    "unsloth/gemma-3-1b-it": GEMMA_1B,
    "the text network of google/gemma-3-4b-it, saved by transformers 4.57": network(
        3_880_263_168,
        256,
        1e6,
        sliding_window=1024,
        full_attention_layers=full(34, 6),
        rope_scaling=LinearScaling(8.0),
    ),
}
"""Parameters by the Hub's count, less a layer that predicts further tokens (what is subtracted),
quantisation scales and a tied head that is stored again; and what tells the network from others."""

ONE_OF = r"model_type='{}' is not supported; supported: one of llama, mistral, .*qwen3_next\.$"
TEXT = (
    r"model_type='{}' is not supported; supported: the text network in it alone \(text_config, "
    r"model_type='{}'\), saved as a checkpoint of its own\.$"
)
QUANTISED = r"quantization_config=.*'{}'.* is not supported; supported: quant_method fp8 or mxfp4"
REFUSED = {
    "google/gemma-2-2b-it": ONE_OF.format("gemma2"),
    "microsoft/phi-4": ONE_OF.format("phi3"),
    "deepseek-ai/DeepSeek-V2-Lite": ONE_OF.format("deepseek_v2"),
    "zai-org/GLM-4.7-Flash": ONE_OF.format("glm4_moe_lite"),
    "internlm/internlm2_5-7b-chat": ONE_OF.format("internlm2"),
    "state-spaces/mamba-130m-hf": ONE_OF.format("mamba"),
    "openai-community/gpt2": ONE_OF.format("gpt2"),
    # Models of text and images, whose text networks are not supported either.
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": ONE_OF.format("llama4"),
    "Qwen/Qwen2.5-VL-7B-Instruct": ONE_OF.format("qwen2_5_vl"),
    "Qwen/Qwen3-VL-235B-A22B-Thinking": ONE_OF.format("qwen3_vl_moe"),
    "mistralai/Ministral-3-3B-Reasoning-2512": ONE_OF.format("mistral3"),
    # And those whose are.
    "google/gemma-3-4b-it": TEXT.format("gemma3", "gemma3_text"),
    "llava-hf/llava-1.5-7b-hf": TEXT.format("llava", "llama"),
    "moonshotai/Kimi-K2.5": TEXT.format("kimi_k25", "kimi_k2"),
    "google/embeddinggemma-300m": r"use_bidirectional_attention=True is not supported",
    # `transformers` does not read this factor, and vLLM multiplies by it.
    "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B": r"supported: parameters without attn_factor\.$",
    "a Llama stretched by NTK scaling": r"rope_type='dynamic' is not supported; supported: def",
    "Qwen/Qwen2.5-7B-Instruct-AWQ": QUANTISED.format("awq"),
    "unsloth/Llama-3.2-1B-Instruct-bnb-4bit": QUANTISED.format("bitsandbytes"),
    "Qwen/Qwen2.5-7B-Instruct-1M": r"not supported: dual_chunk_attention_config={.*--ignore-opt",
    "humain-ai/ALLaM-7B-Instruct-preview": r"not supported: internal_version='.*--ignore-options",
}


def written(folder, options):
    (folder / "config.json").write_text(json.dumps(options))
    return folder


def parameters_of(config):
    """`moe.weights.num_parameters` without tracing a program."""
    sizes, weights = axis_sizes(config), jax.tree.leaves(table(config))
    return sum(math.prod(sizes[axis] for axis in weight.axes.split()) for weight in weights)


def test_every_file_is_in_one_of_the_tables():
    assert sorted(NETWORKS) == sorted(FILES["read"])
    assert sorted(REFUSED) == sorted(FILES["refused"])
    assert len(NETWORKS) >= 50


@pytest.mark.parametrize("name", NETWORKS)
def test_a_published_file_is_read_as_its_network(name, tmp_path):
    options = FILES["read"][name]
    config = huggingface.config_from(written(tmp_path, options))
    parameters, fields = NETWORKS[name]
    expected = {**PLAIN, **FAMILIES[options["model_type"]], **fields}
    assert {field: getattr(config, field) for field in expected} == expected
    assert parameters_of(config) == parameters
    assert config.max_positions == options["max_position_embeddings"]


def test_parameters_are_counted_as_the_network_counts_them(tmp_path):
    config = huggingface.config_from(written(tmp_path, FILES["read"]["openai/gpt-oss-20b"]))
    assert num_parameters(config) == parameters_of(config)


@pytest.mark.parametrize("name", REFUSED)
def test_a_published_file_is_refused_for_a_true_reason(name, tmp_path):
    with pytest.raises(ValueError, match=REFUSED[name]) as caught:
        huggingface.config_from(written(tmp_path, FILES["refused"][name]))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "changes", "fields"),
    [
        ("meta-llama/Llama-2-7b-hf", {"num_key_value_heads": None}, {"num_kv_heads": 32}),
        ("openai/gpt-oss-20b", {"rope_scaling": ...}, {"rope_scaling": OSS_YARN}),
        ("openai/gpt-oss-20b", {"rope_scaling": None}, {"rope_scaling": None}),
        ("deepseek-ai/DeepSeek-R1", {"first_k_dense_replace": ...}, {"num_dense_layers": 3}),
        # Of a kind of scaling it is a part, and counts more than that beside the factor.
        (
            "meta-llama/Llama-3.1-8B",
            {"original_max_position_embeddings": 4096},
            {"rope_scaling": LlamaScaling(8.0, 1.0, 4.0, 4096)},
        ),
        (
            "meta-llama/Llama-2-7b-hf",
            {"original_max_position_embeddings": 4096},
            {"rope_scaling": None},
        ),
    ],
)
def test_what_a_file_leaves_out_is_what_transformers_takes(name, changes, fields, tmp_path):
    options = {**FILES["read"][name], **changes}
    kept = {option: value for option, value in options.items() if value is not ...}
    config = huggingface.config_from(written(tmp_path, kept))
    assert {field: getattr(config, field) for field in fields} == fields


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "use_qk_norm", False),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "shared_expert_intermediate_size", 512),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "qkv_bias", True),
        ("meta-llama/Llama-3.1-8B", "is_encoder_decoder", True),
        ("meta-llama/Llama-3.1-8B", "add_cross_attention", True),
        ("meta-llama/Llama-3.1-8B", "pruned_heads", {"0": [1]}),
        ("Qwen/Qwen2.5-0.5B", "use_mrope", True),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "rope_interleaved", True),
    ],
)
def test_what_would_be_another_network_is_refused_by_name(name, option, value, tmp_path):
    folder = written(tmp_path, {**FILES["read"][name], option: value})
    with pytest.raises(ValueError, match=rf"not supported.*{option}|{option}=.*not supported"):
        huggingface.config_from(folder)


def test_names_of_ones_own_are_passed_over_when_they_are_ignored(tmp_path):
    for name, ignored, other in (
        ("humain-ai/ALLaM-7B-Instruct-preview", "internal_version", "meta-llama/Llama-2-7b-hf"),
        (
            "Qwen/Qwen2.5-7B-Instruct-1M",
            "dual_chunk_attention_config",
            "Qwen/Qwen2.5-7B-Instruct",
        ),
    ):
        folder = written(tmp_path, FILES["refused"][name])
        config = huggingface.config_from(folder, ignore=[ignored])
        similar = huggingface.config_from(written(tmp_path, FILES["read"][other]))
        assert (config.num_layers, config.d_model) == (similar.num_layers, similar.d_model)


def test_options_that_are_off_are_the_only_ones_listed(tmp_path):
    """What `transformers` writes into every file is no news."""
    listed = {
        option
        for options in FILES["read"].values()
        for option in huggingface.idle_options(written(tmp_path, options))
    }
    assert listed == {"rope_interleaved=false", "use_mrope=false"}
