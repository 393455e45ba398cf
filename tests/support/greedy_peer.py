"""Greedy completions of `transformers`, with an adapter of PEFT if one is given.

    python greedy_peer.py REQUESTS

REQUESTS is a JSON file: a list of {"checkpoint": DIR, "adapters": DIR or null, "prompts": [...],
"new_tokens": N}. Prints a JSON list of texts for each. Needs torch, transformers and peft.
"""

import json
import sys
from pathlib import Path
from typing import Any

import peft
import torch
import transformers


def completions(
    checkpoint: str, adapters: str | None, prompts: list[str], new_tokens: int
) -> list[str]:
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(checkpoint)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    if adapters is not None:
        model = peft.PeftModel.from_pretrained(model, adapters)
    model.eval()
    texts = []
    for prompt in prompts:
        text, special = prompt, True
        if tokenizer.chat_template is not None:
            turns = [{"role": "user", "content": prompt}]
            text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
            special = False  # the template has them
        ids = tokenizer(text, add_special_tokens=special, return_tensors="pt")
        ids = {name: ids[name] for name in ("input_ids", "attention_mask")}
        result = model.generate(**ids, max_new_tokens=new_tokens, do_sample=False)[0]
        new = result[ids["input_ids"].shape[1] :]
        texts.append(tokenizer.decode(new, skip_special_tokens=True))
    return texts


if __name__ == "__main__":
    requests = json.loads(Path(sys.argv[1]).read_text())
    print(json.dumps([completions(**request) for request in requests]))
