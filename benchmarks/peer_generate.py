"""Times `generate` of transformers, the peer of our decoding.

Run by `rollout.py`, whose dense models it takes as Llamas: float32, random weights, SDPA attention,
sampling at temperature 1 from the whole distribution, no token of which ends a response.
"""

import argparse
import json
import os
from typing import Any

from rollout import CACHES, DENSE, NEW, PROMPT, timed


def random_model(model: str) -> Any:
    """The model of `DENSE`, random weights, float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = DENSE[model]
    config = LlamaConfig(
        vocab_size=shape["vocab_size"],
        hidden_size=shape["d_model"],
        intermediate_size=shape["d_ff"],
        num_hidden_layers=shape["num_layers"],
        num_attention_heads=shape["num_heads"],
        num_key_value_heads=shape["num_kv_heads"],
        head_dim=shape["head_dim"],
        max_position_embeddings=PROMPT + NEW,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the calls after the first, by the number of rows."""
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    model = random_model(options.model)
    seconds = {}
    for rows in options.peer_rows:
        prompts = torch.randint(0, model.config.vocab_size, (rows, PROMPT))

        def call(prompts: Any = prompts) -> None:
            with torch.inference_mode():
                tokens = model.generate(
                    prompts,
                    attention_mask=torch.ones_like(prompts),
                    do_sample=True,
                    temperature=1.0,
                    top_k=0,
                    top_p=1.0,
                    min_new_tokens=NEW,
                    max_new_tokens=NEW,
                    cache_implementation=options.cache,
                )
            assert tokens.shape == (len(prompts), PROMPT + NEW)

        seconds[str(rows)] = timed(call)
    parameters = sum(weight.numel() for weight in model.parameters())
    return {"seconds": seconds, "parameters": parameters}


def main() -> None:
    parser = argparse.ArgumentParser(description="Times transformers' generate")
    parser.add_argument("--model", choices=list(DENSE), required=True)
    parser.add_argument("--cache", choices=CACHES, default="dynamic")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peer-rows", type=int, nargs="+", default=[64, 1])
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
