"""What `transformers` generates, greedily, from what the chain of each family exports.

    python tests/jrl/greedy_of_families.py FOLDER [NAME...]          records it, in the file beside
    python tests/jrl/greedy_of_families.py --check FOLDER [NAME...]  compares it with the file

Needs torch, transformers, peft and this repository on the path. A family goes through the chain of
tests/support/family_chain.py in ``FOLDER/NAME``, unless it has. With PEFT the adapters beside the
taught checkpoint must give what the merged one gives.
"""

import argparse
import json
import sys
from datetime import datetime
from pathlib import Path
from unittest.mock import patch

import peft
import torch
import transformers
from transformers.utils import chat_template_utils

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from family_chain import DAY, NEW_TOKENS, QUESTION, go_through
from family_files import FAMILIES

RECORD = Path(__file__).with_suffix(".json")
NEAR = 0.01
"""Logits that are as close may change places with the versions of what computes them."""
MOVED = 0.1
"""By how much adapters change a logit at least."""


class Clock(datetime):
    """Stands still."""

    @classmethod
    def now(cls, tz=None):
        return cls.fromisoformat(DAY)


def model_of(folder):
    """The model of a checkpoint in float32."""
    # The other implementations need widths that are multiples of four.
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def generated(model, folder):
    """Prompt, completion and the logits that its tokens were chosen by."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with patch.object(chat_template_utils, "datetime", Clock):
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": QUESTION}],
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        )
    prompt = inputs["input_ids"]
    mask = torch.ones_like(prompt)
    # Ends come from the export's generation_config.json.
    out = model.generate(prompt, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False)
    with torch.no_grad():
        logits = model(out).logits[0, prompt.shape[1] - 1 : -1]
    ids = out[0].tolist()
    return ids[: prompt.shape[1]], ids[prompt.shape[1] :], logits


def of_family(folder):
    """Prompt and completions of the exports in the folder of a family."""
    exports = {way: folder / way for way in ("taught", "adapted")}
    found, chosen_by = {}, {}
    for way, export in exports.items():
        found["prompt"], found[way], chosen_by[way] = generated(model_of(export), export)
        logits = chosen_by[way]
        best = logits.topk(2, dim=-1).values
        margin = float((best[:, 0] - best[:, 1]).min())
        if margin < NEAR:
            raise ValueError(f"{export}: two tokens are likeliest, but for {margin:.1e}")
    base = model_of(exports["taught"])
    beside = peft.PeftModel.from_pretrained(base, folder / "grpo" / "adapters").eval()
    _, completion, of_peft = generated(beside, exports["taught"])
    if completion != found["adapted"] or not of_peft.allclose(chosen_by["adapted"], atol=1e-4):
        raise ValueError(f"{folder}: adapters with PEFT are not the merged network")
    same = completion == found["taught"]
    if same and of_peft.allclose(chosen_by["taught"], atol=MOVED):
        raise ValueError(f"{folder}: adapters learned nothing")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", help="families; all by default")
    arguments = parser.parse_args()
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    equal = True
    for name in arguments.names or FAMILIES:
        folder = arguments.folder / name
        if not folder.exists():
            folder.mkdir(parents=True)
            go_through(name, folder)
        found = of_family(folder)
        same = found == record.get(name)
        equal &= same
        print(f"{name}: {'as recorded' if same else 'differs from the record'}")
        record[name] = found
    if arguments.check:
        sys.exit(0 if equal else 1)
    write(record)


def write(record):
    """A line for each family."""
    lines = (f"  {json.dumps(name)}: {json.dumps(record[name])}" for name in sorted(record))
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
