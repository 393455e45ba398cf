"""Run folders written by hand, for pages."""

import json
import math

from jrl.runs import records
from jrl.runs.folder import RunFolder

HOSTILE = (
    '</script><script>document.title = "taken"</script><img src=x onerror=alert(1)> &amp; {{js}}'
)
NUM_STEPS = 24


def report_run(path, *, seed=0, steps=NUM_STEPS, more=()):
    """A run of some steps: an evaluation every ten, two samples a step.

    Args:
      more: metrics of all steps but the first; None leaves one out.
    """
    config = {
        "recipe": "grpo",
        "run": {"task": "sort", "model": "tiny", "seed": seed},
        "hyperparameters": {"learning_rate": 1e-3, "kl_coef": None},
    }
    with RunFolder.create(path, config) as folder:
        with records.Appender(folder.metrics_path) as file:
            for step in range(steps + 1):
                line = _metrics(step, seed) | (dict(more) if step else {})
                file.append(step, {name: x for name, x in line.items() if x is not None})
        with records.Appender(folder.samples_path) as file:
            for step in range(1, steps + 1):
                for number in range(2):
                    file.append(step, _sample(step, number))
        folder.versions_path.write_text(json.dumps({"jax": "0.10.2", "devices": "1 x cpu"}))
    return folder


def _metrics(step, seed):
    values = {"val/accuracy/sampled": 0.1 + step / 100} if step % 10 == 0 else {}
    if step:
        values |= {
            "critic/score/mean": 0.3 + 0.01 * step + 0.1 * seed,
            "actor/entropy": 1 / 3 + math.sin(step) / 7,
            "actor/grad_norm": math.nan if step == 3 else math.inf if step == 4 else 1.5,
            "training/total_tokens": 700.0 * step,
            "moe/max_load": 1.5,
            "moe/min_load": 0.5,
            "timing_s/gen": 0.25,
            "timing_s/update_actor": 0.5,
            "perf/time_per_step": 1.0,
        }
    return values


def _sample(step, number):
    sample = {
        "kind": "training",
        "prompt": f"prompt {step}=",
        "answer": "7",
        "completion": HOSTILE if step == 5 else f"completion {step} of {number}",
        "score": float(number),
        "reason": "correct" if number else "wrong",
        "length": step + number,
        "truncated": False,
    }
    if number:
        text = ["a", "<b>", "\u2028c"]
        sample["tokens"] = {
            "text": text,
            "of": 5,
            "advantage": [-1.0, 0.5, "NaN"],
            "entropy": [0.1, 0.2, 0.3],
            "gap": [0.5, 0.0, "NaN"],
            "sampler_logprob": [-1.5, -2.0, "NaN"],
        }
    return sample
