"""Prompts from files of several kinds, and their held-out share."""

import json

import pytest

from jrl.config import flags
from jrl.tasks.data.files import kind_of, prompts_of
from jrl.tasks.data.split import HeldOut, parse_heldout
from jrl.tasks.load import listed_names, load_task
from jrl.tasks.mixture import leave_out
from jrl.tasks.rewards import RewardSettings

ROWS = [{"prompt": f"{n}+{n}=", "answer": 2 * n, "level": [n, {"of": "x"}]} for n in range(40)]


def written(path, rows=ROWS):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def listed(path, heldout=None, kind="jsonl"):
    return prompts_of(kind, str(path), 0, None, parse_heldout(heldout))


def prompts(task):
    """Examples for training and held out."""
    heldout = [task.heldout(index).prompt for index in range(task.heldout_size)]
    train = [task.train(index).prompt for index in range(len(task.examples) - len(heldout))]
    return set(train), set(heldout)


def test_all_fields_are_kept(tmp_path):
    task = listed(written(tmp_path / "a.jsonl"))
    for number, example in enumerate(task.examples):
        assert example.record == {"answer": 2 * number, "level": [number, {"of": "x"}]}


def test_a_file_without_answers_needs_a_reward(tmp_path):
    rows = [{"prompt": row["prompt"], "level": 1} for row in ROWS]
    path = written(tmp_path / "a.jsonl", rows)
    assert {example.answer for example in listed(path).examples} == {""}
    with pytest.raises(ValueError, match=r'has no field "answer" \(it has .prompt., .level.\)'):
        load_task(f"jsonl:{path}", 0)
    (tmp_path / "own.py").write_text("def by(prompt, completion, level): return level == 1")
    task = load_task(f"jsonl:{path}", 0, rewards=RewardSettings((f"{tmp_path}/own.py:by",)))
    assert task.verify([task.train(0)], ["?"])[0].correct
    task.close()


@pytest.mark.parametrize(("given", "size"), [("7", 7), ("1", 1), ("39", 39)])
def test_a_number_is_held_out(tmp_path, given, size):
    train, heldout = prompts(listed(written(tmp_path / "a.jsonl"), given))
    assert len(heldout) == size and len(train) == 40 - size and not train & heldout


def test_held_out_share_keeps_prompts_of_smaller_share(tmp_path):
    path = written(tmp_path / "a.jsonl")
    (_, few), (train, many) = (prompts(listed(path, share)) for share in (None, "0.4"))
    assert few < many and not train & many
    assert few == prompts(listed(path, "0.1"))[1]


def test_a_file_is_held_out_and_never_trained_on(tmp_path):
    other = written(tmp_path / "b.jsonl", [*ROWS[:3], {"prompt": "new", "answer": 1}])
    task = listed(written(tmp_path / "a.jsonl"), str(other))
    train, heldout = prompts(task)
    assert task.num_shared == 3
    assert heldout == {"0+0=", "1+1=", "2+2=", "new"}
    assert train == {row["prompt"] for row in ROWS[3:]}
    with pytest.raises(ValueError, match=r"0 prompts to train on and 40 held out"):
        listed(tmp_path / "a.jsonl", str(tmp_path / "a.jsonl"))


@pytest.mark.parametrize("given", ["0", "1.5", "-3", "0.0", "inf", "nan"])
def test_held_out_choices_that_are_refused(given):
    with pytest.raises(ValueError, match=f"held_out={given} must be a share between 0 and 1, a n"):
        parse_heldout(given)


def test_all_of_a_list_is_held_out_to_evaluate_on(tmp_path):
    path = written(tmp_path / "a.jsonl")
    assert parse_heldout("1.0") == HeldOut(share=1.0) and not parse_heldout("1").everything
    task = listed(path, "1.0")
    # In the order of the file.
    assert [task.heldout(n).prompt for n in range(40)] == [row["prompt"] for row in ROWS]
    with pytest.raises(ValueError, match="has nothing to train on, as all its prompts are held o"):
        task.train(0)
    assert leave_out(task, lambda example: example.prompt == "7+7=") == 39
    assert task.heldout_size == 1 and task.heldout(0).prompt == "7+7="
    # A single row is enough, and rewards of one's own are tried on it.
    (tmp_path / "own.py").write_text("def by(prompt, completion, answer): return answer == 0")
    one = written(tmp_path / "one.jsonl", ROWS[:1])
    settings = RewardSettings((f"{tmp_path}/own.py:by",))
    task = load_task(f"jsonl:{one}", 0, held_out="1.0", rewards=settings)
    assert task.verify([task.heldout(0)], ["?"])[0].correct
    task.close()
    with pytest.raises(ValueError, match="has 0 examples; at least 1 is needed: write"):
        listed(written(tmp_path / "none.jsonl", []), "1.0")
    # Where prompts are drawn there is no end of them.
    usual, drawn = load_task("sort", 0), load_task("sort", 0, held_out="1.0")
    assert drawn.train(3) == usual.train(3) and drawn.heldout(3) == usual.heldout(3)


def test_nothing_is_trained_where_all_is_held_out():
    with pytest.raises(ValueError, match=r"held_out=1\.0 leaves nothing to train on, and is"):
        flags.parse_arguments(["--task=jsonl:a.jsonl", "--held-out=1.0"])


def test_files_and_own_tasks_are_lists():
    assert listed_names("2 sort + 1 jsonl:a.jsonl + own.py:make + gym:leg_counting") == {
        "jsonl:a.jsonl",
        "own.py:make",
    }
    assert not listed_names("guess")


def test_held_out_choices_that_do_not_fit_the_task(tmp_path):
    assert parse_heldout("test.jsonl") == HeldOut(path="test.jsonl")
    with pytest.raises(ValueError, match="held_out=40 leaves nothing to train on"):
        listed(written(tmp_path / "a.jsonl"), "40")
    with pytest.raises(ValueError, match=r"held_out=a\.jsonl is for a list of prompts, and task=s"):
        load_task("sort", 0, held_out="a.jsonl")
    task = load_task("sort", 0, held_out="5")
    assert task.heldout_size == 5
    usual = load_task("sort", 0)
    assert [task.heldout(n) for n in range(5)] == [usual.heldout(n) for n in range(5)]


def test_prompts_that_are_too_long_are_left_out_and_counted(tmp_path):
    task = listed(written(tmp_path / "a.jsonl"))
    train, heldout = prompts(task)
    short = {*(sorted(train)[:8]), *(sorted(heldout)[:2])}
    number = leave_out(task, lambda example: example.prompt not in short)
    assert number == 10
    assert prompts(task) == (train - short, heldout - short)
    with pytest.raises(ValueError, match=r"of 30 prompts 30 are too long.*raise --prompt-length"):
        leave_out(task, lambda example: False)


def test_parquet_files_and_folders_of_them(tmp_path):
    import pyarrow
    from pyarrow import parquet

    for name, rows in (("0", ROWS[:25]), ("1", ROWS[25:])):
        parquet.write_table(pyarrow.Table.from_pylist(rows_of(rows)), tmp_path / f"{name}.parquet")
    assert kind_of(tmp_path) == kind_of(tmp_path / "0.parquet") == "parquet"
    folder = listed(tmp_path, kind="parquet")
    assert [example.prompt for example in folder.examples] == [row["prompt"] for row in ROWS]
    assert folder.examples[3].record == {"answer": 6, "level": 3}
    assert folder.examples[3].answer == "6"
    assert len(listed(tmp_path / "0.parquet", kind="parquet").examples) == 25
    (tmp_path / "0.parquet").write_text("no table")
    with pytest.raises(ValueError, match=r"0\.parquet: cannot be read \(.*\): give a Parquet file"):
        listed(tmp_path / "0.parquet", kind="parquet")


def rows_of(rows):
    return [{**row, "level": row["level"][0]} for row in rows]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the library, at its import
def test_folders_of_datasets(tmp_path):
    import datasets

    whole = datasets.Dataset.from_list(rows_of(ROWS))
    whole.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": whole, "test": whole.select([2, 1])}).save_to_disk(
        str(tmp_path / "splits")
    )
    assert kind_of(tmp_path / "one") == "dataset"
    examples = listed(tmp_path / "one", kind="dataset").examples
    assert [example.prompt for example in examples] == [row["prompt"] for row in ROWS]
    task = listed(tmp_path / "splits" / "train", str(tmp_path / "splits" / "test"), "dataset")
    assert prompts(task)[1] == {"2+2=", "1+1="}
    with pytest.raises(ValueError, match=r"holds the splits .*splits/train, .*: give one of them"):
        listed(tmp_path / "splits", kind="dataset")
    with pytest.raises(ValueError, match=r"absent: cannot be read"):
        listed(tmp_path / "absent", kind="dataset")


@pytest.mark.parametrize(("kind", "library"), [("parquet", "pyarrow"), ("dataset", "datasets")])
def test_a_missing_library_is_named(monkeypatch, kind, library):
    monkeypatch.setattr("jrl.tasks.data.files.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=rf"{kind}:a needs {library}, .* -e \"\.\[data\]\""):
        listed("a", kind=kind)
