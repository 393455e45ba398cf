"""Supervisor of a run: what started its processes, and restarts them after a failure."""

from collections.abc import Mapping

DRAINED = 75
"""Exit status of a run that ended for a restart that leaves out a faulty machine (EX_TEMPFAIL of
sysexits.h). All of its processes have it."""

INTERRUPTED = 130
"""Exit status of a command that Ctrl-C ended (128 + SIGINT)."""


class Supervisor:
    """Supervisor that does nothing: of a run that a person started. Launchers derive theirs."""

    def step_ended(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Is told of every step; may be a collective, as all processes of a run call it. True, the
        same in all of them, if this process may end soon, as its machine is taken back: the run
        then saves a checkpoint."""
        return False


UNSUPERVISED = Supervisor()
