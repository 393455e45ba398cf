import re

import pytest

from jrl.runs import records

STEPS = range(6)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def lines(steps, run=7.0):
    return [b'{"step": %d, "a": %r}\n' % (step, step / run) for step in steps]


def write(path, *content):
    path.write_bytes(b"".join(content))


@pytest.fixture
def mark(path):
    """Of the checkpoint of step 3; two more lines follow it."""
    write(path, *lines(range(4)))
    result = records.read_offset(path)
    write(path, *lines(STEPS))
    return result


def go_back(path, mark, *, every_step=True):
    records.truncate(path, mark, 3, every_step=every_step)


@pytest.mark.parametrize("more", [b"", b'{"step": 4', b"\xff\n[\n", b"".join(lines([4, 5]))])
def test_lines_after_the_mark_are_dropped(path, mark, more):
    write(path, *lines(range(4)), more)
    go_back(path, mark)
    assert path.read_bytes() == b"".join(lines(range(4)))
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([0, 2, 3, 4, 5], "{}:2 is of step 2 where step 1 is expected; the checkpoint of step 3"),
        ([0, 1, 1, 2, 3, 4], "{}:3 is of step 1 where step 2 is expected"),
        ([1, 2, 3, 4, 5], "{}:1 is of step 1 where step 0 is expected"),
        ([0, 1, 3, 2, 4, 5], "{}:3 is of step 3 where step 2 is expected"),
        ([0, 1, 2], "{} ends with line 3, before the one of step 3"),
        ([], "{} ends with line 0, before the one of step 0"),
    ],
)
def test_lost_doubled_and_swapped_lines_are_named(path, mark, steps, message):
    write(path, *lines(steps))
    before = path.read_bytes()
    with pytest.raises(ValueError, match=re.escape(message.format(path))) as caught:
        go_back(path, mark)
    assert "Put the file back as it was, or start a new run" in str(caught.value)
    assert path.read_bytes() == before


def test_a_damaged_line_is_named(path, mark):
    bad = lines(STEPS)
    bad[2] = bad[2][:9] + b"\n"
    write(path, *bad)
    with pytest.raises(ValueError, match=r"metrics\.jsonl:3 is not a JSON object with an integer"):
        go_back(path, mark)


def test_lines_of_another_run_are_noticed(path, mark):
    write(path, *lines(STEPS, run=7.5))
    with pytest.raises(ValueError, match=r"metrics\.jsonl: the first \d+ bytes were changed, or "):
        go_back(path, mark)


def test_changed_digit_is_noticed(path, mark):
    content = bytearray(path.read_bytes())
    content[-80] ^= 1
    write(path, bytes(content))
    with pytest.raises(ValueError, match=r"metrics\.jsonl"):
        go_back(path, mark)


def test_a_missing_file_is_noticed_unless_there_was_none(path, mark):
    path.unlink()
    with pytest.raises(ValueError, match=r"metrics\.jsonl is missing; the checkpoint of step 3"):
        go_back(path, mark)
    go_back(path, records.read_offset(path))
    assert not path.exists()


def test_samples_have_several_lines_a_step_or_none(path):
    write(path, *lines([0, 0, 2, 2]))
    result = records.read_offset(path)
    write(path, *lines([0, 0, 2, 2, 4]))
    go_back(path, result, every_step=False)
    assert path.read_bytes() == b"".join(lines([0, 0, 2, 2]))
    write(path, *lines([0, 2, 0, 2]))
    with pytest.raises(ValueError, match=r"metrics\.jsonl:3 is of step 0 after one of step 2"):
        go_back(path, result, every_step=False)
    for steps in ([0, 2, 4, 4], [0, 2], []):
        write(path, *lines(steps))
        with pytest.raises(ValueError, match=r"metrics\.jsonl: the first \d+ bytes were changed"):
            go_back(path, result, every_step=False)
