"""Table of the supported `transformers` architectures: their options and tensor names in our terms.

An architecture is described in both directions. A configuration that cannot be expressed is
detected by writing it and reading it back.
"""

from moe.huggingface.families.deepseek import read_deepseek, write_deepseek
from moe.huggingface.families.dense import (
    read_llama,
    read_mistral,
    read_qwen2,
    read_qwen3,
    write_llama,
    write_mistral,
    write_qwen2,
    write_qwen3,
)
from moe.huggingface.families.family import Family
from moe.huggingface.families.gemma import (
    GEMMA3_NAMES,
    LAST_NORM,
    read_gemma3,
    write_gemma3,
)
from moe.huggingface.families.glm import read_glm4_moe, write_glm4_moe
from moe.huggingface.families.gpt_oss import (
    GPT_OSS_NAMES,
    GPT_OSS_SCALING,
    read_gpt_oss,
    write_gpt_oss,
)
from moe.huggingface.families.heterogeneous import (
    NEXT_LAST_NORM,
    QWEN3_NEXT_NAMES,
    read_olmo3,
    read_qwen3_next,
    read_smollm3,
    write_olmo3,
    write_qwen3_next,
    write_smollm3,
)
from moe.huggingface.families.mixtures import (
    read_mixtral,
    read_olmoe,
    read_qwen2_moe,
    read_qwen3_moe,
    write_mixtral,
    write_olmoe,
    write_qwen2_moe,
    write_qwen3_moe,
)
from moe.huggingface.families.tensor_names import (
    LATENT_ATTENTION,
    NORMS_AFTER,
    PROJECTED_EXPERTS,
    QKV_BIASES,
    QUERY_KEY_NORMS,
    SELECTION_BIAS,
    dense_names,
    expert_names,
)

FAMILIES = (
    Family("LlamaForCausalLM", "llama", read_llama, write_llama, {}),
    Family("MistralForCausalLM", "mistral", read_mistral, write_mistral, {}),
    Family("Qwen2ForCausalLM", "qwen2", read_qwen2, write_qwen2, QKV_BIASES),
    Family("Qwen3ForCausalLM", "qwen3", read_qwen3, write_qwen3, QUERY_KEY_NORMS),
    Family(
        "MixtralForCausalLM",
        "mixtral",
        read_mixtral,
        write_mixtral,
        expert_names("block_sparse_moe", "w1", "w3", "w2"),
    ),
    Family(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        read_qwen2_moe,
        write_qwen2_moe,
        {
            **QKV_BIASES,
            **PROJECTED_EXPERTS,
            **dense_names("mlp.shared_expert"),
            "shared_gate": "mlp.shared_expert_gate.weight",
        },
    ),
    Family(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        read_qwen3_moe,
        write_qwen3_moe,
        {**QUERY_KEY_NORMS, **PROJECTED_EXPERTS},
        fused_in_peft=True,
    ),
    Family(
        "OlmoeForCausalLM",
        "olmoe",
        read_olmoe,
        write_olmoe,
        {**QUERY_KEY_NORMS, **PROJECTED_EXPERTS},
        defaults={"rms_norm_eps": 1e-5},  # which the files of 2024 do not have
    ),
    Family(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        read_deepseek,
        write_deepseek,
        {**LATENT_ATTENTION, **PROJECTED_EXPERTS, **dense_names("mlp.shared_experts")},
        also=("kimi_k2",),
        predicts_further=True,
        fused_in_peft=True,
    ),
    Family(
        "Olmo3ForCausalLM",
        "olmo3",
        read_olmo3,
        write_olmo3,
        {**QUERY_KEY_NORMS, **NORMS_AFTER},
    ),
    Family("SmolLM3ForCausalLM", "smollm3", read_smollm3, write_smollm3, {}),
    Family(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        read_glm4_moe,
        write_glm4_moe,
        {
            **QKV_BIASES,
            **QUERY_KEY_NORMS,
            **PROJECTED_EXPERTS,
            **SELECTION_BIAS,
            **dense_names("mlp.shared_experts"),
        },
        predicts_further=True,
        fused_in_peft=True,
    ),
    Family(
        "GptOssForCausalLM",
        "gpt_oss",
        read_gpt_oss,
        write_gpt_oss,
        {**QKV_BIASES, **GPT_OSS_NAMES},
        defaults={"rope_scaling": GPT_OSS_SCALING},
    ),
    Family(
        "Gemma3ForCausalLM",
        "gemma3_text",
        read_gemma3,
        write_gemma3,
        GEMMA3_NAMES,
        last_norm=LAST_NORM,
    ),
    Family(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        read_qwen3_next,
        write_qwen3_next,
        QWEN3_NEXT_NAMES,
        last_norm=NEXT_LAST_NORM,
        predicts_further=True,
        fused_in_peft=True,
    ),
)
"""All that are supported. A network that several can express is written as the first of them."""
