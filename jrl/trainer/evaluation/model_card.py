"""Model card (README.md) of what a run made, from the run's own records."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from jrl.published.base_name import is_hub_name, license_in
from jrl.runs.folder import RunFolder

LOADING = {
    "adapters": """\
```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("FOLDER")
base = AutoModelForCausalLM.from_pretrained("{base}")
model = PeftModel.from_pretrained(base, "FOLDER")
```

```bash
vllm serve {base} --enable-lora --lora-modules policy=FOLDER
jrl serve {here} --lora FOLDER
```
""",
    "checkpoint": """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("FOLDER")
model = AutoModelForCausalLM.from_pretrained("FOLDER")
```

```bash
vllm serve FOLDER
jrl serve FOLDER
```
""",
}
LIBRARY = {"adapters": "peft", "checkpoint": "transformers"}


@dataclass(frozen=True)
class CardSubject:
    """Subject of a card.

    Attributes:
      kind: "adapters" or "checkpoint".
      base: name of the published checkpoint that the run started from; None for a preset.
      step: of the weights.
    """

    kind: str
    base: str | None
    step: int


def model_card(folder: RunFolder, subject: CardSubject) -> str:
    """The text of README.md: base and its license, data, reward, recipe, steps, accuracy, versions,
    loading."""
    config = folder.config()
    run, license = config["run"], license_in(folder.origin_path)
    base, recipe = subject.base, str(config["recipe"])
    facts = {
        "base": base or f"the preset {run['model']}, with random weights",
        **({"license of the base": " ".join(license.values())} if license else {}),
        **_file_of_weights(str(run["model"])),
        "data": run["task"],
        "reward": ", ".join(run.get("reward") or ()) or "the task's own",
        "recipe": recipe,
        "steps": f"{subject.step} of {run['steps']}",
        **_adapter_facts(run),
        **_evaluations([line for line in folder.metrics() if line["step"] <= subject.step]),
    }
    if recipe == "sft":
        del facts["reward"]
    head = {"library_name": LIBRARY[subject.kind], "tags": ["jrl", recipe], **license}
    if base is not None and is_hub_name(base):
        head["base_model"] = base
    lines = [f"{name}: {json.dumps(value)}" for name, value in head.items()]
    versions = folder.versions()
    table = [f"| {name} | {_cell(value)} |" for name, value in facts.items()]
    named = base or "BASE"
    return "\n".join(
        (
            *("---", *lines, "---", ""),
            f"# {folder.path.resolve().name}",
            "",
            "Trained with [jrl](https://pypi.org/project/jrl-reasoning).",
            *("", "| | |", "|---|---|", *table, ""),
            "## Loading",
            "",
            "FOLDER is the folder of this file.",
            "",
            LOADING[subject.kind].format(base=named, here=_here(named)),
            "## Versions",
            "",
            ", ".join(f"{name} {version}" for name, version in versions.items()) + ".",
            "",
        )
    )


def _file_of_weights(model: str) -> dict[str, str]:
    """The GGUF file or its package, whose weights are quantised ones of the base."""
    is_file = model.startswith("pip:") or model.endswith(".gguf")
    return {"weights of the base": PurePath(model).name} if is_file else {}


def _here(base: str) -> str:
    """The base as a command of jrl takes it: a downloaded folder for a name of the Hub."""
    return base.rpartition("/")[2] if is_hub_name(base) else base


def _adapter_facts(run: Mapping[str, Any]) -> dict[str, str]:
    rank = run.get("lora_rank")
    return {} if rank is None else {"adapters": f"LoRA of rank {rank}"}


def _evaluations(lines: Sequence[Mapping[str, float | int]]) -> dict[str, str]:
    """Held-out results before and after; of supervised runs the loss."""
    evaluated = [line for line in lines if "val/accuracy/sampled" in line or "val/nll" in line]
    if not evaluated:
        return {"held-out": "not evaluated"}
    first, last = evaluated[0], evaluated[-1]
    when = f"step {first['step']} and step {last['step']}"
    if "val/nll" in last:
        change = f"{first['val/nll']:.3f} → {last['val/nll']:.3f} nats a token"
        return {f"held-out loss, {when}": change}
    return {
        f"held-out accuracy, {mode}, {when}": " → ".join(
            _with_error(line, f"val/accuracy/{mode}") for line in (first, last)
        )
        for mode in ("sampled", "greedy")
    }


def _with_error(line: Mapping[str, float | int], name: str) -> str:
    """An accuracy with its standard error over the prompts, if their number is recorded."""
    accuracy, prompts = line[name], line.get("val/prompts")
    if prompts is None:
        return f"{accuracy:.3f}"
    error = (accuracy * (1 - accuracy) / prompts) ** 0.5
    return f"{accuracy:.3f} ± {error:.3f} ({prompts:.0f} prompts)"


def _cell(value: object) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")
