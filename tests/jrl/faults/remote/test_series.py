"""Of which machine and of which GPU a series is, and times that cannot be."""

import numpy as np
import pytest

from jrl.faults.remote.exporters import build_fleet
from jrl.faults.remote.machines import machines_of
from jrl.faults.remote.series import Series, gpus_of

NAME = "DCGM_FI_DEV_GPU_TEMP"


def series(start=0.0, number=4, name=NAME, values=None, **labels):
    times = start + 15.0 * np.arange(number)
    values = np.full(number, 40.0) if values is None else np.array(values, float)
    return Series({"__name__": name, **labels}, times, values)


def names(*all_of_them, label=None):
    return machines_of(all_of_them, label)


@pytest.mark.parametrize("label", ["Hostname", "hostname"])
def test_hosts_behind_one_address_are_machines_of_their_own(label):
    hosts = [series(instance="gateway:9400", **{label: host}) for host in ("n1", "n2", "n1")]
    assert names(*hosts) == ["n1", "n2", "n1"]
    # What has no host is the address's; what is named otherwise, or by the user, stays.
    assert names(*hosts, series(instance="gateway:9100"))[-1] == "gateway"
    assert names(*hosts, label="instance") == ["gateway:9400"] * 3
    assert (
        names(*(Series({**h.labels, "node": "n"}, h.times, h.values) for h in hosts)) == ["n"] * 3
    )


def test_one_host_behind_an_address_is_named_by_the_address():
    one = series(instance="10.0.0.1:9400", Hostname="dcgm-exporter-x7")
    other = series(instance="10.0.0.2:9400", Hostname="dcgm-exporter-k2")
    assert names(one, other, series(instance="10.0.0.1:9100")) == [
        *("10.0.0.1", "10.0.0.2", "10.0.0.1")
    ]


def test_several_hosts_of_one_address_are_compared_as_several():
    fleet = build_fleet([series(instance="gw:9400", Hostname=f"n{i}", gpu="0") for i in range(4)])
    assert fleet.machines == ("n0", "n1", "n2", "n3") and fleet.metrics == ("gpu0/temperature",)


def test_a_machine_at_a_new_address_is_known_by_its_gpus():
    old = [series(instance="10.0.0.1:9400", gpu=str(i), UUID=f"GPU-{i}") for i in range(2)]
    new = [series(60, instance="10.0.0.9:9400", gpu=str(i), UUID=f"GPU-{i}") for i in range(2)]
    other = series(number=8, instance="10.0.0.2:9400", gpu="0", UUID="GPU-7")
    assert names(*old, other, *new) == ["10.0.0.9", "10.0.0.9", "10.0.0.2", *["10.0.0.9"] * 2]
    fleet = build_fleet([*old, other, *new])
    assert fleet.machines == ("10.0.0.2", "10.0.0.9") and np.isfinite(fleet.values[1]).all()
    # And at a third one; a host's name that changes with its pod is the same case.
    third = series(120, instance="10.0.0.4:9400", gpu="0", UUID="GPU-0")
    assert names(*old, *new, third) == ["10.0.0.4"] * 5
    pods = [
        series(60.0 * at, instance="gw:9400", Hostname=f"pod-{at}", gpu="0", UUID="GPU-0")
        for at in range(2)
    ]
    assert names(*pods) == ["pod-1"] * 2


def test_machines_that_report_at_one_time_stay_two():
    a = series(instance="a", gpu="0", UUID="GPU-0")
    b = series(45, instance="b", gpu="0", UUID="GPU-0")
    assert names(a, b) == ["a", "b"]
    # A GPU that was put into another machine, which was there before.
    earlier = series(instance="c", gpu="1", UUID="GPU-5")
    later = series(90, instance="c", gpu="0", UUID="GPU-0")
    assert names(a, earlier, later) == ["a", "c", "c"]


def test_a_gpu_keeps_its_column_where_a_reset_numbers_anew():
    name = "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL"
    parts = [
        series(0, name=name, values=[7] * 4, instance="a", gpu="0", UUID="GPU-x"),
        series(0, name=name, values=[0] * 4, instance="a", gpu="1", UUID="GPU-y"),
        series(60, name=name, values=[0] * 4, instance="a", gpu="0", UUID="GPU-y"),
        series(60, name=name, values=[7] * 4, instance="a", gpu="1", UUID="GPU-x"),
    ]
    fleet = build_fleet(parts)
    assert fleet.metrics == ("gpu0/ecc/uncorrected", "gpu1/ecc/uncorrected")
    assert fleet.values[0].tolist() == [[0.0] * 8, [7.0] * 8]


def test_gpus_without_numbers_are_told_apart_by_their_uuids():
    parts = [series(instance="a", UUID=f"GPU-{i}") for i in ("b", "a")]
    assert gpus_of(parts, ["a", "a"]) == ["1", "0"]
    assert gpus_of([series(instance="a")], ["a"]) == [None]
    assert build_fleet(parts).metrics == ("gpu0/temperature", "gpu1/temperature")


def test_codes_of_parts_of_a_gpu_are_not_added():
    parts = [
        series(name="DCGM_FI_DEV_XID_ERRORS", values=values, instance="a", gpu="0", GPU_I_ID=part)
        for part, values in (("1", [0, 31, 79, 45]), ("2", [0, 31, 13, 79]))
    ]
    assert build_fleet(parts).values[0, 0].tolist() == [0, 31, 79, 79]


YEAR = 365 * 86400.0


@pytest.mark.parametrize("away", [-YEAR, YEAR, 8 * 86400, 1e12, -1e12, 4e17])
@pytest.mark.parametrize("inside", [False, True], ids=["machine", "sample"])
def test_times_that_are_days_away_are_refused_before_memory_is_taken(away, inside):
    fleet = [series(1.8e9, instance=f"n{i}", gpu="0") for i in range(12)]
    lost = fleet[5]
    if inside:
        times = np.sort(np.append(lost.times, 1.8e9 + away))
        fleet[5] = Series(lost.labels, times, np.append(lost.values, 40.0))
    else:
        fleet[5] = Series(lost.labels, lost.times + away, lost.values)
    with pytest.raises(ValueError, match=r"^'n5' has samples of .* days away .* set its clock"):
        build_fleet(fleet)


def test_a_fleet_that_rested_for_days_is_read():
    fleet = [series(1.8e9 + at, instance=f"n{i}") for i in range(3) for at in (0, 5 * 86400)]
    assert build_fleet(fleet, period=15.0).num_samples == 28804
