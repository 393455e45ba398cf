import math
import subprocess
import sys

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from jrl.report import plots
from jrl.runs import records


def write_run(path, names, num_steps=30):
    with records.Appender(path) as file:
        for step in range(num_steps):
            values = {name: 0.5 + 0.01 * step for name in names if not name.startswith("val/")}
            if step % 10 == 0:
                values |= {name: 0.1 * step / 10 for name in names if name.startswith("val/")}
            file.append(step, values)
    return path


def names(paths):
    return [path.name for path in paths]


def test_only_panels_with_metrics_are_drawn(tmp_path):
    metrics = write_run(tmp_path / "metrics.jsonl", ["critic/score/mean", "val/accuracy/greedy"])
    paths = plots.plot_run(metrics, tmp_path / "a" / "plots", title="Sorting")
    assert names(paths) == ["overview.png", "reward.png", "accuracy.png"]
    assert sorted(names(paths)) == sorted(names((tmp_path / "a" / "plots").iterdir()))


@pytest.mark.slow
def test_every_panel_and_the_size_of_the_overview(tmp_path):
    # Panels of a run of reinforcement that has no reference.
    others = {"reference_kl", "nll", "token_accuracy"}
    panels = [panel for panel in plots.PANELS if panel.file not in others]
    shown = [line.metric for panel in panels for line in panel.lines]
    metrics = write_run(tmp_path / "metrics.jsonl", shown)
    paths = plots.plot_run(metrics, tmp_path)
    files = [panel.file for panel in panels]
    assert names(paths) == ["overview.png", *(f"{file}.png" for file in files)]
    with Image.open(paths[0]) as picture:
        assert picture.size == (3200, 1800)  # 1600 x 900 at 2x
    for path in paths[1:]:
        with Image.open(path) as picture:
            assert picture.size == (1600, 900)


@pytest.mark.slow
def test_pictures_are_the_same_for_the_same_metrics(tmp_path):
    metrics = write_run(tmp_path / "metrics.jsonl", ["actor/entropy"])
    one = plots.plot_run(metrics, tmp_path / "one")[0].read_bytes()
    assert plots.plot_run(metrics, tmp_path / "two")[0].read_bytes() == one


@pytest.mark.slow
def test_the_level_of_the_warm_start_is_drawn(tmp_path, monkeypatch):
    metrics = write_run(tmp_path / "metrics.jsonl", ["val/accuracy/sampled"])
    levels = []
    monkeypatch.setattr(Axes, "axhline", lambda axes, level, **given: levels.append(level))
    plots.plot_run(metrics, tmp_path / "plots")
    first = records.read_metrics(metrics)[0]["val/accuracy/sampled"]
    assert levels == [first] * 2  # in the overview and alone


def test_differences_of_rounding_are_written_and_not_drawn(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(Figure, "supxlabel", lambda figure, text, **given: written.append(text))
    with records.Appender(tmp_path / "metrics.jsonl") as file:
        for step in (1, 2):
            file.append(
                step, {"actor/ppo_kl": -3e-7 * step, "actor/kl_loss": 0.1, "actor/nll": 1e-7}
            )
    shown = names(plots.plot_run(tmp_path / "metrics.jsonl", tmp_path / "plots"))
    assert shown == ["overview.png", "nll.png", "reference_kl.png"]
    assert written == ["Differences of rounding alone: KL from the sampling policy"]


def test_plots_without_metrics_draw_nothing(tmp_path):
    metrics = write_run(tmp_path / "metrics.jsonl", ["actor/lr"])
    assert plots.plot_run(metrics, tmp_path / "plots") == []
    assert not (tmp_path / "plots").exists()


@pytest.mark.slow
def test_one_step_constant_and_nonfinite_values_are_drawn(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with records.Appender(path) as file:
        file.append(1, {"actor/entropy": math.nan, "critic/vf_explained_var": -1e9})
        file.append(2, {"actor/entropy": 0.0, "actor/pg_clipfrac": math.inf})
    shown = names(plots.plot_run(path, tmp_path / "plots"))
    assert shown == ["overview.png", "entropy.png", "explained_variance.png"]


def test_smoothing_keeps_constants_lines_and_length():
    np.testing.assert_allclose(plots.smooth([2.0] * 11, width=3), 2.0, rtol=1e-12)
    line = np.arange(40.0)
    smoothed = plots.smooth(line.tolist(), width=3)
    assert len(smoothed) == 40
    # Symmetric weights leave a line where the whole window lies inside.
    np.testing.assert_allclose(smoothed[6:-6], line[6:-6], rtol=1e-12)
    noise = np.random.default_rng(0).normal(size=200)
    assert np.std(plots.smooth(noise.tolist(), width=8)) < 0.5 * np.std(noise)


# `test_help_comes_before_anything_heavy` asks it of the command.
@pytest.mark.slow
def test_the_module_loads_no_matplotlib():
    program = "import sys, jrl.report.plots; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
