"""Fingerprint of the records of a run, and its comparison when the run is resumed."""

import json
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from annotations import unchecked

from jrl.runs import provenance
from jrl.tasks.data.chats import load_chats
from jrl.tasks.data.files import prompts_of
from jrl.tasks.data.fingerprint import data_fingerprints
from jrl.tasks.data.prompt_list import PromptList
from jrl.tasks.data.records import example_of
from jrl.tasks.data.split import HeldOut
from jrl.tasks.mixture import Mixture

ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1), "level": n} for n in range(12)]
FOLDER = SimpleNamespace(path="runs/a")


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def changed(index, **fields):
    return [row | fields if n == index else row for n, row in enumerate(ROWS)]


CHANGES = {
    "a line is appended": [*ROWS, {"prompt": "new", "answer": "1"}],
    "a line is gone": ROWS[:-1],
    "other lines": [{"prompt": f"{n}-1=", "answer": "1"} for n in range(12)],
    "another order": ROWS[::-1],
    "another answer": changed(4, answer="7"),
    "another prompt": changed(4, prompt="4+1 ="),
    "another field of a reward": changed(4, level=7),
}


def prompts(path):
    return data_fingerprints(prompts_of("jsonl", path, 0, answered=True))


def chats(path):
    return data_fingerprints(load_chats(f"jsonl:{path}", 0))


@pytest.mark.parametrize("load", [prompts, chats])
@pytest.mark.parametrize("name", CHANGES)
@unchecked()
def test_changed_data_file_is_refused(name, load, tmp_path):
    path = written(tmp_path / "a.jsonl", ROWS)
    before = json.loads(json.dumps(load(path)))
    assert load(path) == before
    provenance.check_data(load(path), FOLDER, 3, {"data": before})
    written(path, CHANGES[name])
    now, kind = load(path), "prompts" if load is prompts else "conversations"
    with pytest.raises(ValueError) as raised:
        provenance.check_data(now, FOLDER, 3, {"data": before})
    line = str(raised.value)
    assert f"jsonl:{path} has {len(CHANGES[name])} {kind} (hash " in line
    assert f"and had 12 {kind} (hash " in line and "at the checkpoint of step 3" in line
    assert "--weights runs/a" in line and "\n" not in line
    assert not provenance.same_records(now, {"data": before})


def test_fingerprint_is_the_same_in_another_writing(tmp_path):
    path = written(tmp_path / "a.jsonl", ROWS)
    before = prompts(path)
    path.write_text(json.dumps(ROWS, indent=1))
    assert prompts(path) == before


@unchecked()
def test_parquet_folder_that_gains_a_file_is_refused(tmp_path):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    before = data_fingerprints(prompts_of("parquet", tmp_path, 0, answered=True))
    pq.write_table(pa.Table.from_pylist([{"prompt": "x", "answer": "1"}]), tmp_path / "b.parquet")
    now = data_fingerprints(prompts_of("parquet", tmp_path, 0, answered=True))
    with pytest.raises(ValueError, match=r"has 13 prompts .* and had 12 prompts"):
        provenance.check_data(now, FOLDER, 1, {"data": before})


@unchecked()
def test_changed_file_of_heldout_prompts_is_refused(tmp_path):
    path, others = written(tmp_path / "a.jsonl", ROWS), tmp_path / "b.jsonl"
    found = []
    for answer in ("1", "2"):
        written(others, [{"prompt": "x", "answer": answer}])
        heldout = HeldOut(path=str(others))
        found.append(data_fingerprints(prompts_of("jsonl", path, 0, None, heldout, answered=True)))
    with pytest.raises(ValueError, match="has 13 prompts"):
        provenance.check_data(found[1], FOLDER, 1, {"data": found[0]})


@unchecked()
def test_fingerprints_of_a_mixture_are_those_of_its_lists(tmp_path):
    class Scored:
        def __init__(self, prompts):
            self.sources, self.name, self.heldout_size = (prompts,), prompts.name, 1

    lists = [
        prompts_of("jsonl", written(tmp_path / f"{n}.jsonl", rows), 0, answered=True)
        for n, rows in enumerate((ROWS, CHANGES["other lines"]))
    ]
    found = data_fingerprints(Mixture("both", [Scored(each) for each in lists], [1, 1]))
    assert found == data_fingerprints(lists[0]) | data_fingerprints(lists[1])


@unchecked()
def test_checkpoint_without_a_fingerprint_is_accepted_with_a_warning(tmp_path, capsys):
    now = prompts(written(tmp_path / "a.jsonl", ROWS))
    provenance.check_data(now, FOLDER, 3, {"settings": {}})
    assert "checkpoint of step 3 has no fingerprint of its data" in capsys.readouterr().err
    provenance.check_data({}, FOLDER, 3, {})  # of a task that generates its prompts
    assert capsys.readouterr().err == ""
    assert provenance.same_records(now, {})


def test_fine_tuning_and_reinforcement_are_not_compared(tmp_path):
    path = written(tmp_path / "a.jsonl", ROWS)
    assert provenance.same_records(prompts(path), {"data": chats(path)})


def test_values_that_json_cannot_hold_have_a_hash():
    rows = [{**row, "bytes": bytes([n]), "other": {(1, 2)}} for n, row in enumerate(ROWS)]
    found = [
        data_fingerprints(PromptList("own", [example_of(row, "f") for row in each], 0))
        for each in (rows, rows, [{**rows[0], "bytes": b"x"}, *rows[1:]])
    ]
    assert found[0] == found[1] != found[2]
