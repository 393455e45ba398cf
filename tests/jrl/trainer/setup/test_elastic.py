"""Restarts on fewer processes: the layout with a smaller dp, or the reason why there is none."""

from dataclasses import replace

import jax
import pytest
from small_runs import small_recipe, small_run, small_setup

from jrl.trainer.setup.elastic import build_elastic_setup, restart_without
from sharding.folding import Layout

DEVICES = jax.device_count()


def restart(layout, minimum=1, processes=4, process=1, run=None, **recipe):
    recipe = small_recipe(**{"prompts": 12, "mini_batch": 24, "micro_batch": None, **recipe})
    setup = small_setup(recipe, small_run(layout=layout, **(run or {})))
    return restart_without(setup, process, processes, minimum)


def flags(restart):
    return dict(zip(restart.flags[::2], restart.flags[1::2], strict=True))


@pytest.mark.parametrize(
    ("layout", "processes", "continues", "smaller"),
    [
        ("dp4", 4, (0, 2, 3), "dp3"),
        ("tp2 dp4 / ep2", 4, (0, 2, 3), "tp2 dp3 / ep2"),
        ("dp4 / ep2", 4, (0, 2), "dp2 / ep2"),  # ep2 does not divide dp3
        ("tp2 dp2 / ep4", 2, None, None),  # nor ep4 tp2 dp1
        ("tp2 dp2 / ep2", 2, (0,), "tp2 / ep2"),
        ("cp2 dp2", 2, (0,), "cp2"),
        ("tp4 dp1", 2, None, None),
    ],
)
def test_dp_is_reduced_and_the_other_axes_stay(layout, processes, continues, smaller):
    if smaller is None:
        with pytest.raises(ValueError, match="no layout with a smaller dp is legal: on 1 "):
            restart(layout, processes=processes)
        return
    found = restart(layout, processes=processes)
    assert found.processes == continues
    assert found.layout == flags(found)["--layout"] == str(Layout.parse(smaller))


def test_the_mini_batch_has_to_divide():
    assert restart("dp4", mini_batch=8).processes == (0, 2)  # not by dp3
    with pytest.raises(ValueError, match=r"on 3 processes mini_batch=8 does not divide over dp=3"):
        restart("dp4", minimum=3, mini_batch=8)


def test_fewer_processes_than_the_minimum_are_refused():
    with pytest.raises(ValueError, match="it would leave 3 processes, and min_processes=4 are"):
        restart("dp4", minimum=4)


def test_devices_have_no_more_rows_and_slots_than_before():
    found = flags(restart("dp4", micro_batch=8, run={"devices": 4, "slots": 8}))
    assert found["--micro-batch"] == "6"  # two rows on each device
    assert (found["--devices"], found["--slots"]) == ("3", "6")
    found = flags(restart("dp4", micro_batch=12, mini_batch=12))
    assert found == {"--layout": str(Layout.parse("dp3")), "--micro-batch": "6"}


def test_the_rollout_layout_shrinks_too():
    found = flags(restart("dp4", run={"rollout_layout": "tp2 dp2"}, process=0, processes=2))
    assert Layout.parse(found["--rollout-layout"]) == Layout.parse("tp2 dp1")
    with pytest.raises(ValueError, match=r"3 devices do not divide by tp x cp x pp = 2"):
        restart("dp4", minimum=3, run={"rollout_layout": "tp2 dp2"})


def start(layout, minimum=1, run=None, **recipe):
    """Setup on the devices that there are."""
    recipe = small_recipe(**{"prompts": 24, "mini_batch": 48, "micro_batch": None, **recipe})
    run = replace(small_run(layout=layout, task="sort", **(run or {})), min_processes=minimum)
    setup = build_elastic_setup(run, recipe)
    setup.task.close()
    return setup


def test_a_start_with_fewer_devices_reduces_dp(capsys):
    size = {"prompts": 4 * DEVICES, "mini_batch": 8 * DEVICES, "micro_batch": 2 * DEVICES}
    layout = f"tp2 dp{DEVICES} / ep2"
    run = {"slots": 4 * DEVICES, "rollout_layout": f"dp{2 * DEVICES}"}
    setup = start(layout, run=run, **size)
    line = capsys.readouterr().out
    devices = f"there are {DEVICES} of {2 * DEVICES} devices"
    assert line == f"layout {setup.run.layout!r} in place of {layout!r}: {devices}\n"
    assert setup.mesh.layout == Layout.parse(f"tp2 dp{DEVICES // 2} / ep2")
    assert Layout.parse(setup.run.rollout_layout) == Layout.parse(f"dp{DEVICES}")
    # Two rows of a micro-batch on each device of dp and two slots, and the mini-batch as it was.
    assert (setup.geometry.rows, setup.run.slots) == (2, 2 * DEVICES)
    assert setup.recipe.mini_batch_size == 8 * DEVICES


def test_a_start_with_enough_devices_keeps_the_layout(capsys):
    assert start("dp2").mesh.layout == Layout.parse("dp2")
    assert capsys.readouterr().out == ""


def test_the_smaller_micro_batch_is_checked():
    # Of 3 x DEVICES rows, two on each device of the larger layout, and one of the smaller.
    size = {"prompts": 6 * DEVICES, "mini_batch": 3 * DEVICES, "micro_batch": 3 * DEVICES}
    run = {"two_batch_overlap": True, "model": "tiny", "packing": False}
    with pytest.raises(ValueError, match="two_batch_overlap=True has nothing to halve"):
        start(f"dp{3 * DEVICES // 2}", run=run, **size)


@pytest.mark.parametrize(
    ("layout", "minimum", "message"),
    [
        (f"dp{2 * DEVICES}", None, f"needs {2 * DEVICES} devices and there are {DEVICES}: choose"),
        (f"dp{2 * DEVICES}", 2, "in 1 processes; a smaller one needs min_processes=2 of them"),
        (f"tp{DEVICES + 1}", 1, f"{DEVICES} devices do not divide by tp x cp x pp"),
    ],
)
def test_starts_that_are_refused(layout, minimum, message):
    with pytest.raises(ValueError, match=message):
        start(layout, minimum)
