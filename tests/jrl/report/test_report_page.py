"""The page report.html contains the values of the run's files."""

import json
import math
import re

import pytest
from report_runs import HOSTILE, report_run

from jrl.report import __main__ as command
from jrl.report.page import UPLOT, fit_samples, page_data, render_page, thin, write_page
from jrl.runs import records


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Nothing may be written to it."""
    return report_run(tmp_path_factory.mktemp("page") / "run")


def embedded(page):
    """The data of a page, found as a browser does: up to the first end of the element."""
    result = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert result is not None
    return json.loads(result[1])


def test_page_values_equal_the_files(run, tmp_path):
    path = write_page([run], tmp_path / "deep" / "report.html")
    (result,) = embedded(path.read_text())["runs"]
    lines = records.read_metrics(run.metrics_path)
    assert result["steps"] == [line["step"] for line in lines]
    names = {name for line in lines for name in line} - {"step"}
    assert result["metrics"].keys() == names
    for name, column in result["metrics"].items():
        values = [None if x is None else float(x) for x in column]
        for value, line in zip(values, lines, strict=True):
            wanted = line.get(name)
            assert value == wanted or (math.isnan(value or 0) and math.isnan(wanted)), name
    assert result["samples"] == records.read_samples(run.samples_path)
    assert result["config"] == run.config()
    assert result["versions"] == {"jax": "0.10.2", "devices": "1 x cpu"}


def test_nothing_of_a_run_can_end_the_element_it_stands_in(run):
    title = "<b>&{{data}}"
    page = render_page(page_data([run]), title)
    assert any(s["completion"] == HOSTILE for s in embedded(page)["runs"][0]["samples"])
    assert "onerror=alert" in page and "<img" not in page and "<b>&" not in page
    assert "<title>&lt;b&gt;&amp;{{data}}</title>" in page
    # The data, the library and the program: no more elements than the template has.
    assert page.count("<script") == page.count("</script>") == 3


def test_the_page_is_small_and_asks_for_nothing(run):
    page = render_page(page_data([run]), "run")
    assert len(page.encode()) < 200_000
    assert "default-src 'none'" in page
    assert not re.findall(r'(?:src|href)="(?!#|data:)', page)
    assert f"(v{UPLOT})" in page  # as the library says itself


def test_long_runs_are_thinned_evenly_and_keep_evaluations():
    lines = [
        {"step": step} | ({"val/accuracy/sampled": 0.5} if step == 7 else {}) for step in range(41)
    ]
    steps = [line["step"] for line in thin(lines, 11)]
    assert steps == [0, 4, 7, 8, 12, 16, 20, 24, 28, 32, 36, 40]
    assert thin(lines[:11], 11) == lines[:11]


def test_samples_that_do_not_fit_are_left_out_by_steps():
    samples = [{"step": step, "text": "x" * 50} for step in range(9) for _ in range(2)]
    size = 2 * len(json.dumps(samples[0]))
    kept = [sample["step"] for sample in fit_samples(samples, 5 * size)]
    assert kept == [0, 0, 2, 2, 4, 4, 6, 6, 8, 8]
    assert fit_samples(samples, 9 * size) == samples
    assert fit_samples([], 1) == []


def test_samples_of_a_suspicion_come_first():
    samples = [{"step": step, "kind": "training", "text": "x" * 50} for step in range(9)]
    samples[3]["kind"] = "suspicious"
    size = len(json.dumps(samples[3]))
    assert [sample["step"] for sample in fit_samples(samples, 2 * size)] == [3, 8]


def test_a_suspicion_is_said_with_its_reasons(tmp_path):
    with report_run(tmp_path / "run", steps=2) as folder:
        assert page_data([folder])["runs"][0]["suspicion"] is None
        with records.Appender(folder.metrics_path) as file:
            for step in range(3, 13):
                late = float(step > 8)
                line = {"critic/score/mean": late, "response_length/mean": 50 - 40 * late}
                file.append(step, {**line, "reward/suspicion": float(step > 10)})
    result = page_data([folder])["runs"][0]["suspicion"]
    assert result["step"] == 11
    assert result["reasons"][0].endswith("while lengths fell from 50 to 10")


def test_runs_of_one_name_are_told_apart(tmp_path):
    folders = [report_run(tmp_path / where / "run", steps=2) for where in ("a", "b")]
    assert [run["name"] for run in page_data(folders)["runs"]] == ["a/run", "b/run"]
    with pytest.raises(ValueError, match="name a folder twice: give each once"):
        page_data([folders[0], folders[0]])


def test_report_command_writes_the_page(run, tmp_path, capsys, monkeypatch):
    other, out = report_run(tmp_path / "other", seed=1, steps=3), tmp_path / "out.html"
    assert command.main([str(run.path), str(other.path), "--out", str(out)]) == 0
    assert [r["name"] for r in embedded(out.read_text())["runs"]] == ["run", "other"]
    assert command.main([str(other.path)]) == 0
    assert other.report_path.is_file()
    monkeypatch.chdir(tmp_path)
    assert command.main([str(run.path), str(other.path)]) == 0
    assert (tmp_path / "report.html").is_file()
    capsys.readouterr()
    assert command.main([str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
    other.metrics_path.unlink()
    assert command.main([str(other.path)]) == 2
    assert "has no metrics.jsonl" in capsys.readouterr().err


def test_profiles_are_linked_from_where_the_page_is(tmp_path):
    with report_run(tmp_path / "a:run #1", steps=2) as folder:
        recording = folder.profiles_path / "plugins/profile/step-2"
        recording.mkdir(parents=True)
        operations = [{"name": HOSTILE, "program": "jit_f", "seconds": 0.5}]
        content = {"first": 2, "last": 3, "process": 0, "seconds": 1.0, "operations": operations}
        (recording / "operations.json").write_text(json.dumps(content))
        (recording / "host.trace.json.gz").touch()
        trace = "profiles/plugins/profile/step-2/host.trace.json.gz"
        for path, address in [
            (folder.report_path, f"./{trace}"),
            (tmp_path / "out.html", f"./a%3Arun%20%231/{trace}"),
        ]:
            page = write_page([folder], path).read_text()
            assert embedded(page)["runs"][0]["profiles"] == [{**content, "trace": address}]
            assert page.count("<script") == 3
        (recording / "operations.json").write_text("{")
        with pytest.raises(ValueError, match=r"operations\.json.*delete it"):
            write_page([folder], folder.report_path)


def test_page_of_a_run_without_a_step(tmp_path):
    with report_run(tmp_path / "run", steps=0) as folder:
        folder.metrics_path.unlink()
        folder.samples_path.unlink()
        data = embedded(write_page([folder], folder.report_path, running=True).read_text())
    assert data["drawn"].startswith("20") and data["metrics"] == {}
    assert data["runs"][0]["steps"] == data["runs"][0]["samples"] == []


def test_page_data_names_differences_of_rounding_and_parts_that_were_0(tmp_path):
    more = {"actor/ppo_kl": 2e-7, "sampling/k3_kl": 0.5, "actor/nll": 1e-9, "reward/format": 0.0}
    with report_run(tmp_path / "run", steps=2, more=more) as folder:
        folder.write_stopped(2, {"val/accuracy/sampled": 0.75})
        data = page_data([folder])
    assert [n for n, metric in data["metrics"].items() if metric["rounding"]] == ["actor/ppo_kl"]
    assert data["runs"][0]["zeros"] == ["format"]
    # The evaluation of a stopped run is in its last line, though not in metrics.jsonl.
    assert data["runs"][0]["metrics"]["val/accuracy/sampled"] == [0.1, None, 0.75]
