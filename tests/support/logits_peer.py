"""Logits of `transformers` for a sequence of tokens, with an adapter of PEFT if one is given.

    python logits_peer.py CHECKPOINT TOKENS [ADAPTERS]

TOKENS is a JSON list of ids. Prints a JSON list of the logits at the last position, and on a line
before it the text of the tokens by the folder's tokenizer. Needs torch, transformers and peft.
"""

import json
import sys
from typing import Any

import peft
import torch
import transformers

if __name__ == "__main__":
    checkpoint, tokens, *adapters = sys.argv[1:]
    ids = json.loads(tokens)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(*adapters or [checkpoint])
    for folder in adapters:
        model = peft.PeftModel.from_pretrained(model, folder)
    print(json.dumps(tokenizer.decode(ids)))
    with torch.no_grad():
        logits = model.eval()(input_ids=torch.tensor([ids])).logits[0, -1]
    print(json.dumps(logits.tolist()))
