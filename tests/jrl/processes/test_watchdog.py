"""The watchdog, without its threads: what it says and does after so many seconds."""

from dataclasses import replace

import pytest

from jrl.processes.watchdog import GRACE, Record, Watchdog, WatchdogSettings


class Watched:
    """A watchdog, its lines and the ends that it asked for."""

    def __init__(self, folder, process=0, num_processes=2, deadline=None):
        settings = WatchdogSettings(process, num_processes, "here", folder / "stacks", deadline)
        self.lines, self.ends, self.beat = [], [], 0
        self.folder, self.texts = folder, {}
        self.dog = Watchdog(settings, None, self.end, self.lines.append)
        self.phase = self.dog.progress.phase

    def end(self, line, silent):
        self.lines.append(line)
        self.ends.append(silent)

    def second(self, *peers):
        """A second, with heartbeats of those peers."""
        self.beat += 1
        texts = {peer.process: replace(peer, beat=self.beat).to_text() for peer in peers}
        self.texts |= texts
        self.dog.receive(self.texts, 1.0)
        self.dog.tick(1.0)

    def seconds(self, number, *peers):
        for _ in range(number):
            self.second(*peers)

    def warm(self, *phases):
        for name in phases:
            with self.phase(name):
                pass


def peer(process=1, **values):
    return Record(process, "there", **{"phase": "update", "step": 3, **values})


@pytest.fixture
def watched(tmp_path):
    return Watched(tmp_path)


def test_a_frozen_process_is_named_and_ends_the_run(watched):
    watched.warm("update")
    with watched.phase("update"):
        watched.seconds(3, peer())
        watched.seconds(22)
        assert watched.lines == [] and not (watched.folder / "stacks").exists()
        watched.seconds(2)
        [line] = watched.lines
        assert line.startswith("warning: process 1 (host there) has sent no heartbeat for 23 s")
        assert "test_a_frozen_process" in (watched.folder / "stacks/process-0.txt").read_text()
        watched.seconds(21)
        assert watched.ends == [] and len(watched.lines) == 1
        watched.seconds(1)
    assert watched.ends == [1]  # it waits for none but the frozen one
    assert watched.lines[1].startswith("error: process 1 (host there) has sent no heartbeat for 46")


def test_a_process_that_comes_back_ends_nothing(watched):
    watched.seconds(3, peer())
    watched.seconds(30)
    watched.seconds(100, peer())
    assert watched.ends == []
    assert watched.lines[1:] == ["process 1 (host there) again made progress"]


def test_a_short_deadline_is_one_for_heartbeats_too(tmp_path):
    watched = Watched(tmp_path, deadline=10.0)
    watched.seconds(3, peer())
    watched.seconds(6)
    assert len(watched.lines) == 1
    watched.seconds(5)
    assert watched.ends == [1]


def test_without_an_answer_of_process_0_it_is_named(tmp_path):
    watched = Watched(tmp_path, process=1)
    watched.second(peer(0), peer(2))
    for _ in range(45):
        watched.dog.tick(1.0)  # and nothing is received
    assert watched.ends == [1]
    assert "process 0 (host there) has sent no heartbeat" in watched.lines[0]
    assert "process 2" not in watched.lines[0]


def test_one_that_makes_progress_is_never_late(watched):
    watched.warm("rollout")
    with watched.phase("rollout"):
        for _ in range(3):
            watched.seconds(299, peer(agreements=1))
            watched.dog.progress.heartbeat()
    assert watched.lines == []


def test_a_late_phase_is_named_and_ends_the_run_after_a_grace(watched):
    with watched.phase("reward"):
        watched.seconds(301, peer(phase="agreement", agreements=1))
        assert watched.lines == []
        watched.seconds(int(GRACE), peer(phase="agreement", agreements=1))
        [line] = watched.lines
        assert line.startswith("warning: process 0 (host here) has been in `reward` of step 0 for")
        assert "the others wait in `agreement`" in line
        watched.seconds(2, peer(phase="agreement", agreements=1))
    assert watched.ends == [0]


def test_the_others_name_it_too_but_one_speaks(tmp_path):
    spoken = []
    for process in (1, 2):
        watched = Watched(tmp_path, process, num_processes=3)
        watched.second(peer(0), peer(3 - process))
        watched.seconds(46, peer(3 - process))
        assert watched.ends == [1]
        spoken.append([line.partition(":")[0] for line in watched.lines])
    assert spoken == [["warning", "error"], ["error"]]


def test_the_first_time_in_a_phase_is_no_hang_that_ends_a_run(watched):
    with watched.phase("update"):
        for _ in range(20):
            watched.dog.tick(300.0)
    assert len(watched.lines) == 1 and watched.ends == []


@pytest.mark.parametrize(("deadline", "ends"), [(None, []), (20.0, [0])])
def test_one_process_alone_is_ended_only_on_request(tmp_path, deadline, ends):
    watched = Watched(tmp_path, num_processes=1, deadline=deadline)
    watched.warm("reward")
    with watched.phase("reward"):
        for _ in range(20):
            watched.dog.tick(20.0)
    assert watched.ends[:1] == ends
    assert watched.lines[0].startswith("warning: process 0 (host here) has been in `reward`")


def test_a_phase_that_took_long_may_take_longer(watched):
    watched.warm("update")
    with watched.phase("update"):
        for _ in range(4):
            watched.dog.tick(60.0)
        watched.dog.progress.heartbeat()
        for _ in range(30):
            watched.dog.tick(60.0)
    assert watched.lines == []


def test_status_is_of_this_process(watched):
    with watched.phase("reward"):
        assert watched.dog.status()[0] == "reward" and watched.dog.status()[2] is None
        watched.seconds(302, peer(phase="agreement", agreements=1))
        line = watched.dog.status()[2]
    assert line is not None and line.startswith("process 0 (host here) has been in `reward`")


def test_zero_watches_nothing(tmp_path):
    watched = Watched(tmp_path, deadline=0.0)
    with watched.dog:
        assert watched.dog.status()[2] is None
