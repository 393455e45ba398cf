"""Windows of a record: their widths in samples, and medians over them."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from jrl.faults.outlier import nan_median


@dataclass(frozen=True)
class Grid:
    """Windows of a record in samples, from seconds and the time between two samples.

    Attributes:
      width: samples of a window.
      hop: samples from one window to the next.
      overlap: windows from one to the first that shares no sample with it.
      length: windows wholly inside the time of continuity; two more where a window is one or
        two samples.
      recent: windows of what was there just before.
      lag: windows between the two whose difference measures noise: a minute, at least `overlap`.
    """

    width: int
    hop: int
    overlap: int
    length: int
    recent: int
    lag: int

    @classmethod
    def from_seconds(
        cls,
        period: float | int,
        *,
        window: float | int,
        hop: float | int,
        continuity: float | int,
        recent: float | int,
    ) -> "Grid":
        """The grid of these seconds, see `jrl.faults.shift.ShiftDetector`."""
        num_hop = max(1, round(hop / period))
        width = max(1, round(window / period))
        step = num_hop * period
        overlap = -(-width // num_hop)
        return cls(
            width=width,
            hop=num_hop,
            overlap=overlap,
            # Every sample that a deviation touches counts in a window of one or two.
            length=max(1, round(continuity / step) + (1 if width < 3 else 1 - overlap)),
            recent=max(1, round(recent / step)),
            lag=max(overlap, round(60.0 / step)),
        )

    def count(self, num_samples: int) -> int:
        """Windows of a record."""
        return max(0, (num_samples - self.width) // self.hop + 1)

    def split(self, values: Float[np.ndarray, "row time"]) -> Float[np.ndarray, "row window width"]:
        """The samples of each window."""
        return np.lib.stride_tricks.sliding_window_view(values, self.width, axis=1)[:, :: self.hop]

    def medians(self, values: Float[np.ndarray, "row time"]) -> Float[np.ndarray, "row window"]:
        """Median of the samples of each window; NaN where there are none."""
        return nan_median(self.split(values), 2)

    def lower_quartiles(
        self, values: Float[np.ndarray, "row time"]
    ) -> Float[np.ndarray, "row window"]:
        """The value that a quarter of the samples of each window is below; NaN without samples."""
        ordered = np.sort(self.split(values), axis=2)  # NaN comes last
        index = np.isfinite(ordered).sum(axis=2) // 4
        return np.take_along_axis(ordered, index[:, :, None], 2)[:, :, 0]
