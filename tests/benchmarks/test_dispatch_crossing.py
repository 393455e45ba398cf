"""Crossing of two implementations of dispatch, and the flag that the benchmark recommends."""

import pytest

from benchmarks.dispatch import rate_of, report


def rows(*seconds):
    """An exchange that takes so long while an all-gather takes 10, and sends a tenth more each
    time."""
    return [
        {"k": k, "seconds": {"all_gather": 10.0, "ragged": taken}, "sent, all-gather 1": k / 10}
        for k, taken in enumerate(seconds, 1)
    ]


@pytest.mark.parametrize(
    ("seconds", "rate"),
    [
        # A third of the way from 9 to 12.
        ((4.0, 9.0, 12.0), 0.2 + 0.1 / 3),
        ((4.0, 10.0, 12.0), 0.2),
        ((11.0, 12.0), None),
        # Never slower: as fast as what it sends at most.
        ((4.0, 5.0, 6.0), 0.3),
    ],
)
def test_crossing_rate_is_bytes_at_equal_time(seconds, rate):
    result = rate_of(rows(*seconds), "ragged")
    assert result == (None if rate is None else pytest.approx(rate))


def test_crossing_report_names_the_flag():
    figures = {
        "device": "8 x H",
        "exchange": "ragged",
        "dtype": "bfloat16",
        "tokens": 1,
        "width": 2,
    }
    measured = {**figures, "rows": rows(4.0, 12.0), "exchange_rate": 0.175}
    assert report(measured).endswith("equal time where ragged sends 18%: --exchange-rate 0.17")
    slow = {**figures, "rows": rows(11.0), "exchange_rate": None}
    assert report(slow).endswith("faster here: --dispatch all_gather, not ragged.")
