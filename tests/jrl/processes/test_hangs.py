import pytest

from jrl.processes.progress import Progress
from jrl.processes.watchdog import Record, deadline_of, describe, find_hang

SILENCE = 20.0


def record(process, phase="update", **values):
    return Record(process, f"node{process}", phase, step=12, **{"deadline": 300.0, **values})


def found(*records):
    hang = find_hang(records, SILENCE)
    return None if hang is None else (hang.processes, hang.is_silent)


def test_processes_in_time_are_no_hang():
    assert found() is None
    assert found(record(0, idle=299.0), record(1, idle=2.0)) is None
    # Who waits is not late, however long, while the other has time.
    assert found(record(0, "agreement", agreements=8, idle=900.0), record(1, agreements=7)) is None
    checkpoint = record(1, "checkpoint", agreements=7, idle=900.0, deadline=1800.0)
    assert found(record(0, "agreement", agreements=8, idle=900.0), checkpoint) is None
    # In the same collective: one of them is known to make progress.
    assert found(record(0, idle=900.0), record(1, idle=1.0)) is None


def test_those_that_have_not_arrived_are_late():
    waits = [record(n, "agreement", agreements=8, idle=310.0) for n in (0, 2)]
    assert found(*waits, record(1, "reward", agreements=7, idle=301.0)) == ((1,), False)
    assert found(record(0, idle=301.0)) == ((0,), False)
    assert found(record(0, idle=301.0), record(1, idle=302.0)) == ((0, 1), False)


def test_a_process_without_heartbeats_is_late_whatever_it_did():
    assert found(record(0), record(1, silence=19.0)) is None
    assert found(record(0), record(1, silence=21.0)) == ((1,), True)
    # Nor does it hide behind others that are late.
    late = record(0, agreements=1, idle=999.0)
    assert found(late, record(1, agreements=2, silence=21.0)) == ((1,), True)
    # While it compiles or loads, Python may not run.
    assert found(record(0), record(1, silence=79.0, is_slow=True)) is None
    assert found(record(0), record(1, silence=81.0, is_slow=True)) == ((1,), True)


def test_a_process_that_has_left_the_run_is_not_late():
    assert found(record(0), record(1, silence=99.0, has_ended=True)) is None
    assert found(record(0, idle=301.0), record(1, has_ended=True)) == ((0,), False)


@pytest.mark.parametrize(
    ("records", "line"),
    [
        (
            [record(0, "agreement", agreements=1), record(1, "reward", idle=323.4)],
            "process 1 (host node1) has been in `reward` of step 12 for 323 s, waiting for "
            "verifiers or rewards; the others wait in `agreement`; stacks of all threads: runs/a",
        ),
        (
            [record(0, "agreement", outer="rollout"), record(1, silence=23.0)],
            "process 1 (host node1) has sent no heartbeat for 23 s: frozen, or the machine or the "
            "link is down; last in `update` of step 12; the others wait in `agreement` "
            "(`rollout`); stacks of all threads: runs/a",
        ),
        (
            [record(0, idle=400.0), record(1, idle=312.0)],
            "all 2 processes have been in `update` of step 12 for 312 s without progress: a "
            "collective, a link or a device hangs; stacks of all threads: runs/a",
        ),
        (
            [record(0, "checkpoint", idle=2000.0, deadline=1800.0)],
            "process 0 (host node0) has been in `checkpoint` of step 12 for 2000 s, writing or "
            "reading files; stacks of all threads: runs/a",
        ),
        (
            [record(0), record(1, silence=40.0), record(2, part="mini-batch 2", silence=50.0)],
            "process 1 (host node1), process 2 (host node2) have sent no heartbeat for 40 s: "
            "frozen, or the machine or the link is down; last in `update` of step 12; the others "
            "wait in `update`; stacks of all threads: runs/a",
        ),
    ],
)
def test_the_line_names_process_host_phase_step_and_seconds(records, line):
    hang = find_hang(records, SILENCE)
    assert hang is not None
    assert describe(hang, "runs/a") == line


def test_deadline_of_phase_and_longest_silence():
    progress, seconds = Progress(), []

    def deadline(longest=0.0):
        seconds.append(deadline_of(progress.position(), 100.0, longest))

    for _ in range(2):
        for phase in ("update", "checkpoint", "agreement"):
            with progress.phase(phase):
                deadline()
    with progress.phase("update"):
        deadline(longest=9.0)
        deadline(longest=11.0)
    assert seconds == [1200, 1200, 100, 100, 600, 100, 100, 110]


def test_records_are_read_back_by_other_versions_too():
    sent = record(1, idle=3.5, is_slow=True)
    assert Record.from_text(sent.to_text()) == sent
    assert Record.from_text(sent.to_text()[:-1] + ', "later": 1}') == sent
