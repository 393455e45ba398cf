"""Result of one detection pass over a fleet, for every detector."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float, Int

from jrl.faults.fleet import Alarm

NO_MACHINE = -1
"""Row that stands for no machine."""
INCOMPARABLE = 4
"""Exit status where nothing could be compared: no alarm says nothing then."""


@dataclass(frozen=True)
class Trace:
    """The machine farthest from the others over time, in one metric.

    Attributes:
      times: Unix time of each moment, in seconds.
      scores: the greatest score of any machine; NaN where none was computed.
      leader: row of the machine that has it, or `NO_MACHINE` where it is below the threshold.
      threshold: score from which a machine is an outlier.
    """

    times: Float[np.ndarray, "moment"]
    scores: Float[np.ndarray, "moment"]
    leader: Int[np.ndarray, "moment"]
    threshold: float | int


@dataclass(frozen=True)
class Report:
    """Alarms of a detection pass and the scores behind them.

    Attributes:
      alarms: the outlier machines, the most certain first.
      notes: what could not be compared and why, one line each.
      comparable: true if anything was compared; without alarms, false means "nothing is known".
      machines: names of the rows of `traces`.
      traces: by metric, in the order of the search.
    """

    alarms: list[Alarm]
    notes: tuple[str, ...] = ()
    comparable: bool = True
    machines: tuple[str, ...] = ()
    traces: Mapping[str, Trace] = field(default_factory=dict)
