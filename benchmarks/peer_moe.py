"""Times one training step of a small mixture of experts in `transformers`, the peer of ours.

Run by `moe_step.py`, which says what a step is. Attention is SDPA, AdamW is fused, and the experts
are computed by the implementation asked for.
"""

import argparse
import json
import os
import time
from typing import Any

from moe_step import COMMON, PEERS, SHAPES


def random_model(model: str, experts: str, positions: int) -> Any:
    """The model of `SHAPES`, random weights, float32."""
    from torch import nn
    from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    shape = COMMON | SHAPES[model]
    settings = {
        "vocab_size": shape["vocab_size"],
        "hidden_size": shape["d_model"],
        "num_hidden_layers": shape["num_layers"],
        "num_attention_heads": shape["num_heads"],
        "num_key_value_heads": shape["num_kv_heads"],
        "head_dim": shape["head_dim"],
        "num_experts_per_tok": shape["experts_per_token"],
        "max_position_embeddings": positions,
        "output_router_logits": True,
        "router_aux_loss_coef": shape["load_balance_coef"],
        "use_cache": False,
        "attn_implementation": "sdpa",
        "experts_implementation": experts,
    }
    if model == "mixtral":
        width, count = shape["d_expert"], shape["num_experts"]
        return MixtralForCausalLM(
            MixtralConfig(**settings, intermediate_size=width, num_local_experts=count)
        )
    settings |= {"moe_intermediate_size": shape["d_expert"], "num_experts": shape["num_experts"]}
    built = Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings, norm_topk_prob=True))
    for layer in built.model.layers:
        layer.self_attn.q_norm = layer.self_attn.k_norm = nn.Identity()
    return built


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the steps after the first two."""
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    model = random_model(options.model, options.experts, options.time).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4, fused=True)
    seconds, loss = [], torch.zeros(())
    for _ in range(options.steps + 2):
        tokens = torch.randint(0, COMMON["vocab_size"], (options.batch, options.time))
        began = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - began)
    parameters = sum(weight.numel() for weight in model.parameters())
    return {"seconds": seconds[2:], "parameters": parameters, "loss": float(loss)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Times a training step of MoE models in transformers"
    )
    parser.add_argument("--model", choices=list(SHAPES), required=True)
    parser.add_argument("--experts", choices=PEERS, default="grouped_mm")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--time", type=int, default=512)
    options = parser.parse_args()
    # Before torch starts: its pool is sized by the processors it may use.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    os.environ |= {"OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"}
    print(json.dumps(measure(options)))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
