"""What `transformers` generates from an export, greedily, as test_export_cli.py records it.

    python tests/jrl/greedy_of_transformers.py EXPORT

Needs torch and transformers. Prints the prompt that its chat template makes, and what follows.
"""

import sys

import torch
import transformers

QUESTION = [{"role": "user", "content": "Half of 9 litres are used. How many are left?"}]
NEW_TOKENS = 24


def main(folder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    # The other implementations need widths that are multiples of four.
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager"
    ).eval()
    text = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    # Ends come from the export's generation_config.json.
    out = model.generate(**ids, max_new_tokens=NEW_TOKENS, do_sample=False)[0].tolist()
    prompt = ids["input_ids"].shape[1]
    print(f"PROMPT = {out[:prompt]}\nCOMPLETION = {out[prompt:]}")
    print(f"ends {model.generation_config.eos_token_id}, {model.generation_config.temperature=}")


if __name__ == "__main__":
    main(sys.argv[1])
