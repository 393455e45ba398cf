"""TRL's GRPO step, and `generate` and the loss of transformers, on a published checkpoint: the peer
of `beside_trl.py`, which starts this with a request and asks for one turn after the other.

    python peer_real_model.py REQUEST

REQUEST is a JSON file: "kind" ("train", "generate" or "loss"), "checkpoint" (a folder) and
"threads". To train and to generate: "prompts" (lists of token ids) and "response_length"; to train
also "steps", "samples", "rows" of a forward and backward pass, "learning_rate", "answers" and
"lora" (arguments of PEFT's `LoraConfig`, or null). For a loss: "tokens", "valid" and "mask", rows
of equal length. Each line on stdin starts a turn, and each ends with a JSON line on stdout: wall
and processor seconds, tokens, and the tokens or the loss themselves.
"""

import argparse
import json
import os
import sys
import tempfile
import time
import warnings
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from peer_trl import ON_A_CPU

PACKAGES = ("torch", "trl", "transformers", "peft")


class Turns:
    """A line on stdin begins a measurement, and a line on stdout ends it."""

    def begin(self) -> None:
        """Waits for the other side."""
        if not sys.stdin.readline():
            raise SystemExit(0)
        self._began = time.perf_counter(), time.process_time()

    def end(self, **figures: Any) -> None:
        """Prints the measurement."""
        wall, processor = time.perf_counter(), time.process_time()
        figures["wall"], figures["processor"] = wall - self._began[0], processor - self._began[1]
        print(json.dumps(figures), flush=True)


def loaded(checkpoint: str) -> tuple[Any, Any]:
    """Model in float32 and tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(checkpoint)


def train(request: dict[str, Any], turns: Turns) -> None:
    """Steps of `GRPOTrainer` on the prompts in their order."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import PrinterCallback, TrainerCallback, set_seed
    from trl import GRPOConfig, GRPOTrainer

    set_seed(0)
    model, tokenizer = loaded(request["checkpoint"])
    prompts = [tokenizer.decode(ids) for ids in request["prompts"]]
    if [tokenizer(text)["input_ids"] for text in prompts] != request["prompts"]:
        raise SystemExit("the tokenizer reads other tokens than those of the request")
    sampled: list[int] = []

    class Steps(TrainerCallback):
        """A step from its first micro-batch, with the generation, to the end of the optimizer's."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            turns.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            turns.end(tokens=sampled.pop())

    def states_the_answer(completions, completion_ids, answer, **_: Any) -> list[float]:
        """Returns 1 for completions with the answer, else 0; counts tokens by the way."""
        sampled.append(sum(map(len, completion_ids)))
        return [float(right in text) for text, right in zip(completions, answer, strict=True)]

    per_step = len(prompts) // request["steps"] * request["samples"]
    lora = request["lora"]
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder,
            max_steps=request["steps"],
            per_device_train_batch_size=request["rows"],
            gradient_accumulation_steps=per_step // request["rows"],  # one optimizer step
            num_generations=request["samples"],
            max_completion_length=request["response_length"],
            learning_rate=request["learning_rate"],
            shuffle_dataset=False,
            **ON_A_CPU,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=states_the_answer,
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": prompts, "answer": request["answers"]}),
            processing_class=tokenizer,
            callbacks=[Steps()],
            peft_config=None if lora is None else LoraConfig(**lora),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()


def generate(request: dict[str, Any], turns: Turns) -> None:
    """Greedy completions of all prompts by `generate`, in one batch with padding on the left."""
    import torch

    model, tokenizer = loaded(request["checkpoint"])
    model.eval()
    longest, end = max(map(len, request["prompts"])), tokenizer.eos_token_id
    padding = [longest - len(prompt) for prompt in request["prompts"]]
    ids = torch.tensor(
        [[end] * n + prompt for n, prompt in zip(padding, request["prompts"], strict=True)]
    )
    valid = torch.tensor([[0] * n + [1] * (longest - n) for n in padding])
    while True:
        turns.begin()
        with torch.inference_mode():
            both = model.generate(
                ids,
                attention_mask=valid,
                do_sample=False,
                max_new_tokens=request["response_length"],
                pad_token_id=end,
            )
        # Behind the end of a row is padding.
        found = [up_to(row, end) for row in both[:, longest:].tolist()]
        turns.end(tokens=sum(map(len, found)), ids=found)


def up_to(ids: list[int], end: int) -> list[int]:
    """Ids up to the first end, included."""
    return ids[: ids.index(end) + 1] if end in ids else ids


def loss(request: dict[str, Any], turns: Turns) -> None:
    """The model's own loss, in nats, over the tokens in the mask."""
    import torch

    model, _ = loaded(request["checkpoint"])
    model.eval()
    tokens, valid, mask = (torch.tensor(request[name]) for name in ("tokens", "valid", "mask"))
    labels = torch.where(mask, tokens, -100)  # what transformers leaves out
    while True:
        turns.begin()
        with torch.inference_mode():
            found = model(input_ids=tokens, attention_mask=valid.long(), labels=labels).loss
        turns.end(tokens=int(mask.sum()), loss=float(found))


def main() -> None:
    """Fixes the threads before torch is loaded, and serves one request."""
    parser = argparse.ArgumentParser(description="Steps of TRL on a published checkpoint")
    parser.add_argument("request", type=Path, help="JSON file")
    request = json.loads(parser.parse_args().request.read_text())
    # Before torch starts: its pool is sized by the processors it may use.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: request["threads"]])
    os.environ |= {"OMP_NUM_THREADS": str(request["threads"]), "HF_HUB_OFFLINE": "1"}
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    warnings.simplefilter("ignore", FutureWarning)  # TRL still uses old names of transformers
    import torch

    torch.set_num_threads(request["threads"])
    versions = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):  # generation needs no TRL
            versions[name] = version(name)
    print(json.dumps(versions), flush=True)
    {"train": train, "generate": generate, "loss": loss}[request["kind"]](request, Turns())


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
