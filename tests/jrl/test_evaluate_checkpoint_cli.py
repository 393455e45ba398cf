"""A published model evaluated on a file: all of it, in slots that fit, with its completions."""

import json
import re
from dataclasses import replace

import pytest
from chat_checkpoint import QUESTIONS
from command_runs import one_line
from served import write_checkpoint

from jrl.config.run import RunConfig
from jrl.evaluate import main
from jrl.recipes import Grpo
from jrl.rollout.decoding import engine
from jrl.trainer.setup import fit
from jrl.trainer.setup.fit import evaluation_slots
from jrl.trainer.setup.memory import cache_bytes
from jrl.trainer.setup.setup import build_setup
from moe.config import Model

# Rows as in public data sets: other names, a number and a text as answers.
ROWS = [{"question": q, "info": {"gold": a}} for q, a in QUESTIONS]
LENGTH = 4
# As by default, so that the other tests' programs are used again.
ALL_SLOTS = "--slots=8"


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A checkpoint with a chat template, and a file."""
    folder = tmp_path_factory.mktemp("given")
    checkpoint = write_checkpoint(folder / "model")
    path = folder / "problems.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*ROWS, ROWS[0]]))
    return checkpoint, path


@pytest.fixture(scope="module")
def flags(given):
    checkpoint, path = given
    fields = ["--prompt-field=question", "--answer-field=info.gold"]
    sizes = ["--k=2", "--prompt-length=60", f"--response-length={LENGTH}"]
    sizes += ["--verifiers=1", "--devices=1"]
    return [f"hf:{checkpoint}", f"--task=jsonl:{path}", *fields, *sizes]


@pytest.fixture(scope="module")
def simple(flags, tmp_path_factory):
    """The flags with a reward that starts faster than what compares formulas."""
    path = tmp_path_factory.mktemp("own") / "own.py"
    path.write_text("def by(prompt, completion, **record): return len(completion)")
    return [*flags, f"--reward={path}:by"]


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_every_row_is_evaluated_and_all_completions_are_written(flags, tmp_path, capsys):
    written = tmp_path / "made" / "samples.jsonl"
    kept = [f"--samples={written}", f"--json={tmp_path / 'numbers.json'}", "--show=2"]
    assert main([*flags, *kept]) == 0
    found = json.loads((tmp_path / "numbers.json").read_text())
    assert (found["prompts"], found["prompts_there"], found["everything"]) == (4, 4, True)
    records = read(written)
    assert [r["kind"] for r in records] == ["sampled"] * 8 + ["greedy"] * 4
    places = [(r["number"], r["sample"]) for r in records]
    assert places == [(n, s) for n in range(4) for s in range(2)] + [(n, 0) for n in range(4)]
    for record in records:
        question, answer = QUESTIONS[record["number"]]
        assert (record["prompt"], float(record["answer"])) == (question, float(answer))
        assert record["reason"] in ("correct", "wrong", "unevaluated", "unparsable")
        assert record["score"] == (record["reason"] == "correct")
        assert question in record["conversation"] and record["length"] <= LENGTH
    for kind, name in (("sampled", "score/sampled"), ("greedy", "score/greedy")):
        scores = [r["score"] for r in records if r["kind"] == kind]
        assert found[name] == pytest.approx(sum(scores) / len(scores))
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0].startswith("evaluating hf:")
    assert "dropped 1 records with a duplicate prompt" in lines[1]
    assert lines[2].startswith("turns end with <|im_end|>, as the chat template writes them")
    assert re.match(r"8 completions of at most 4 tokens, 8 at a time \(--slots\), with", lines[3])
    assert "all 4 prompts, 2 completions each at temperature 1.0" in lines
    # Of the first two prompts one each.
    assert "Ann has 3" in out and "A box" in out and "Two cars" not in out


@pytest.fixture
def made(monkeypatch):
    """The slots and the dtype of each engine that is made."""
    engines, init = [], engine.Engine.__init__

    def noted(self, backend, **options):
        engines.append((options["slots"], backend.decoder.config.dtype))
        init(self, backend, **options)

    monkeypatch.setattr(engine.Engine, "__init__", noted)
    return engines


@pytest.mark.slow
def test_slots_are_those_asked_for_and_change_no_token(simple, made, tmp_path, capsys):
    texts = []
    for more in ([], ["--slots=3"]):
        path = tmp_path / "samples.jsonl"
        assert main([*simple, f"--samples={path}", "--show=0", *more]) == 0
        texts.append([record["completion"] for record in read(path)])
    assert made == [(8, "float32"), (3, "float32")] and texts[0] == texts[1]
    assert "3 at a time" in capsys.readouterr().out


def test_slots_that_cannot_be_are_refused(simple, monkeypatch, capsys):
    assert main([*simple, "--slots=3", "--layout=dp2", "--devices=2"]) == 2
    assert "slots=3 does not divide over dp x tp = 2" in one_line(capsys.readouterr())
    monkeypatch.setattr(fit, "device_memory", lambda mesh: 1000)
    assert main([*simple, "--slots=4"]) == 2
    assert "slots=4 need a KV cache of" in one_line(capsys.readouterr())


# Another dtype is other programs.
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_templates_tokenizers_and_dtypes_are_as_in_training(
    dtype, given, simple, made, tmp_path, capsys
):
    checkpoint, _ = given
    template, path = tmp_path / "short.jinja", tmp_path / "samples.jsonl"
    template.write_text("{{ messages[0].content }} {{ mood }}>")
    tokenizer = f"--tokenizer={checkpoint / 'tokenizer.json'}"
    named = [f"--chat-template={template}", '--chat-template-kwargs={"mood": "brief"}', tokenizer]
    few = ["--prompts=1", "--k=1", "--show=0", f"--samples={path}", ALL_SLOTS]
    assert main([*simple, *named, f"--dtype={dtype}", *few]) == 0
    assert made == [(8, dtype)]
    first = read(path)[0]
    assert first["conversation"].startswith(f"{QUESTIONS[0][0]} brief>")
    assert "1 of 4 prompts" in capsys.readouterr().out
    assert main([*simple, "--chat-template=none", *few]) == 0
    assert "conversation" not in read(path)[0]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--prompt-field=problem"], 'has no field "problem"'),
        (["--prompt-field=problem"], "--prompt-field question"),
        (["--tokenizer=none.json"], "none.json: cannot be read"),
        (["--chat-template=none.jinja"], "none.jinja"),
    ],
)
def test_what_an_error_names_is_a_flag(simple, more, message, capsys):
    assert main([*simple, *more]) == 2
    assert message in one_line(capsys.readouterr())


def test_answers_that_are_not_there_name_the_flag(flags, capsys):
    """Of a task that compares with them: a reward of one's own needs none."""
    assert main([*flags, "--answer-field=gold"]) == 2
    assert "--answer-field" in one_line(capsys.readouterr())


@pytest.mark.slow
def test_a_share_may_be_held_out_all_the_same(simple, tmp_path, capsys):
    path = tmp_path / "samples.jsonl"
    few = ["--k=1", "--show=0", f"--samples={path}", ALL_SLOTS]
    assert main([*simple, "--held-out=2", *few]) == 0
    assert "all 2 held-out prompts" in capsys.readouterr().out
    assert len({record["prompt"] for record in read(path)}) == 2


def test_a_device_without_memory_names_what_evaluation_has(simple, monkeypatch, capsys):
    def full(*given):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes.\nmore")

    monkeypatch.setattr(engine, "empty_pool", full)
    assert main(simple) == 1
    assert one_line(capsys.readouterr()).endswith("lower --slots or --response-length.")


@pytest.fixture
def setup(given):
    checkpoint, path = given
    run = RunConfig(
        model=f"hf:{checkpoint}",
        task=f"jsonl:{path}",
        steps=0,
        held_out="1.0",
        verifiers=1,
        prompt_field="question",
        answer_field="info.gold",
    )
    made = build_setup(run, Grpo())
    yield made
    made.task.close()


def test_slots_have_room_in_the_memory(setup, monkeypatch):
    columns = setup.prompt_length + setup.response_length
    row = cache_bytes(Model(setup.model, setup.rollout_mesh), 1, columns)
    assert evaluation_slots(setup, 3)[0] == 3
    assert evaluation_slots(setup, 10**6)[0] == 512
    monkeypatch.setattr(fit, "CPU_CACHE_BYTES", 7 * row + 1)
    slots, line = evaluation_slots(setup, 10**6)
    assert slots == 7 and "1,000,000 completions" in line and "as many as fit" in line
    # One row there is, though it has no room: the device may say no.
    monkeypatch.setattr(fit, "CPU_CACHE_BYTES", 1)
    assert evaluation_slots(setup, 100)[0] == 1
    chosen = replace(setup, run=replace(setup.run, slots=40))
    assert evaluation_slots(chosen, 10**6)[0] == 40
