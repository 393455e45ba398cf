"""Times one full GRPO step of TRL's `GRPOTrainer` on a CPU, as the peer of this library's step.

A step is everything from the end of one optimizer update to the end of the next: 32 prompts of
the task "sort 8 digits", 8 completions of at most 10 tokens for each, a dense reward in Python,
group advantages, forward, backward, clipping at norm 1 and AdamW at 1e-3, in float32. The model is
a Llama of 0.45 M random weights and the tokenizer is made here; nothing is downloaded or logged.

Three phases add up to the step: *generation* (tokenise, `generate`, decode), *scoring* (rewards,
advantages, padding) and *update* (the rest: forward, backward, optimizer, the trainer's own loop).
The first step also pays for lazy initialisation and stands apart from the medians.

Tokens are counted without padding: *generated* ones up to and including the end of sequence,
*trained* ones are those of prompts and completions together. vLLM and GPUs are left out.
"""

import argparse
import itertools
import json
import operator
import os
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

PROMPTS, SAMPLES, DIGITS, MAX_NEW_TOKENS = 32, 8, 8, 10
SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
VOCABULARY = (*SPECIAL.values(), *"0123456789> ")
ON_A_CPU: dict[str, Any] = {
    "lr_scheduler_type": "constant",
    "max_grad_norm": 1.0,
    "beta": 0.0,  # and so no reference model
    "loss_type": "grpo",
    "use_cpu": True,
    "bf16": False,  # on by default, as is activation checkpointing
    "activation_checkpointing": False,
    "dataloader_pin_memory": False,
    "logging_strategy": "no",
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}
"""Settings of `GRPOConfig` that do not depend on the model."""
PACKAGES = ("torch", "trl", "transformers", "accelerate", "datasets", "tokenizers", "numpy")


def sort_examples(count: int) -> dict[str, list[str]]:
    """Returns `count` prompts such as ``"31415926>"`` and their answers ``"11234569"``."""
    generator = random.Random(0)
    rows = ["".join(generator.choices("0123456789", k=DIGITS)) for _ in range(count)]
    return {"prompt": [row + ">" for row in rows], "answer": ["".join(sorted(row)) for row in rows]}


def character_tokenizer() -> Any:
    """Builds a tokenizer with one token per character and padding on the left."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {token: index for index, token in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=SPECIAL["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **SPECIAL)


def random_model() -> Any:
    """Builds a Llama of four layers and width 96: RoPE, SwiGLU, untied embeddings, float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(  # its default ids, <s> 1 and </s> 2, are those of VOCABULARY
        vocab_size=len(VOCABULARY),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config)


def timed(function: Callable, seconds: list[float]) -> Callable:
    """Returns `function`, each call of which appends its duration to `seconds`."""

    def call(*args: Any) -> Any:
        start = time.perf_counter()
        output = function(*args)
        seconds.append(time.perf_counter() - start)
        return output

    return call


def measure(steps: int) -> dict[str, Any]:
    """Trains for `steps` steps and returns what was measured, one entry per step in each list."""
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback, set_seed
    from trl import GRPOConfig, GRPOTrainer

    ends, rollout, generation, generated, trained, rewards = [], [], [], [], [], []

    class StepClock(TrainerCallback):
        """Notes when training begins and when each optimizer step ends."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

        on_step_end = on_train_begin

    def right_digits(prompts, completions, completion_ids, answer, **_: Any) -> list[float]:
        """Returns the fraction of positions that hold the right digit; counts tokens by the way."""
        generated.append(sum(map(len, completion_ids)))
        trained.append(generated[-1] + sum(map(len, prompts)))  # one token per character
        pairs = zip(completions, answer, strict=True)
        scores = [sum(map(operator.eq, *pair)) / DIGITS for pair in pairs]
        rewards.append(statistics.fmean(scores))
        return scores

    set_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=PROMPTS * SAMPLES,  # one generation, one optimizer step
            num_generations=SAMPLES,
            max_completion_length=MAX_NEW_TOKENS,
            learning_rate=1e-3,
            **ON_A_CPU,
        )
        trainer = GRPOTrainer(
            model=random_model(),
            reward_funcs=right_digits,
            args=settings,
            train_dataset=Dataset.from_dict(sort_examples(PROMPTS * steps)),
            processing_class=character_tokenizer(),
            callbacks=[StepClock()],
        )
        trainer.remove_callback(PrinterCallback)
        trainer._generate = timed(trainer._generate, generation)
        rollout_method = trainer._generate_and_score_completions
        trainer._generate_and_score_completions = timed(rollout_method, rollout)
        trainer.train()
    step = [after - before for before, after in itertools.pairwise(ends)]
    seconds = {
        "step": step,
        "generation": generation,
        "scoring": list(map(operator.sub, rollout, generation)),
        "update": list(map(operator.sub, step, rollout)),
    }
    tokens = {"generation": generated, "update": trained}
    parameters = sum(weight.numel() for weight in trainer.model.parameters())
    return {"parameters": parameters, "seconds": seconds, "tokens": tokens, "mean_reward": rewards}


def summarise(seconds: list[float], tokens: list[int] | None) -> dict[str, float]:
    """Reduces one phase to its first step, and the minimum and median over all later steps."""
    first, *later = seconds
    row = {"first": first, "minimum": min(later), "median": statistics.median(later)}
    if tokens is not None:
        row["tokens_per_second"] = statistics.median(map(operator.truediv, tokens[1:], later))
    return row


def main() -> None:
    """Fixes the threads before torch is loaded, measures and reports."""
    parser = argparse.ArgumentParser(description="Times TRL's GRPO step on a CPU.")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch (default: 1)")
    parser.add_argument("--steps", type=int, default=30, help="GRPO steps (default: 30)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the figures to OUT")
    options = parser.parse_args()
    if options.threads < 1 or options.steps < 2:
        parser.error(f"--threads {options.threads} must be >= 1, --steps {options.steps} >= 2")
    os.environ |= {"OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"}
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the tokenizer has a thread pool of its own
    warnings.simplefilter("ignore", FutureWarning)  # TRL still uses old names of transformers
    start = time.perf_counter()
    try:
        import torch
        from trl import GRPOConfig, GRPOTrainer  # noqa: F401 (trl loads each name on demand)
    except ModuleNotFoundError as error:
        raise SystemExit(f'peer_trl.py needs {error.name}: pip install -e ".[peer]"') from None
    record: dict[str, Any] = {"peer": "trl", "import_seconds": time.perf_counter() - start}
    torch.set_num_threads(options.threads)

    record |= {"threads": options.threads, "versions": {name: version(name) for name in PACKAGES}}
    record |= measure(options.steps)
    record["summary"] = {
        phase: summarise(seconds, record["tokens"].get(phase))
        for phase, seconds in record["seconds"].items()
    }
    print(
        f"TRL {version('trl')}, torch {version('torch')}, {options.threads} thread(s), "
        f"{record['parameters']:,} parameters, {PROMPTS * SAMPLES} completions per step, "
        f"import {record['import_seconds']:.1f} s"
    )
    print(f"{'seconds':12}{'first':>9}{'minimum':>9}{'median':>9}{'tokens/s':>10}")
    for phase, row in record["summary"].items():
        rate = f"{row['tokens_per_second']:10,.0f}" if "tokens_per_second" in row else ""
        print(f"{phase:12}{row['first']:9.3f}{row['minimum']:9.3f}{row['median']:9.3f}{rate}")
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
