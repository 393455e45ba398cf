"""Targets of `benchmarks.gpu`, their verdicts, and the pages that list them."""

import gc
import json
import re
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from benchmarks.gpu import decoding, layer, quarter, training
from benchmarks.gpu.ceilings import COPY
from benchmarks.gpu.decoding import bytes_of_column, bytes_of_step
from benchmarks.gpu.measure import with_ceilings
from benchmarks.gpu.networks import halved_to_fit, network
from benchmarks.gpu.parts import CEILINGS, PARTS, chosen, rows_of
from benchmarks.gpu.report import kept, line_of, markdown
from benchmarks.gpu.rows import Row, Settings, Work, difference, measured, result_of
from benchmarks.gpu.shapes import LLAMA_3B, MOE_4B, QWEN3_06B, QWEN3_A3B, QWEN3_A3B_OF_32
from benchmarks.gpu.targets import TARGETS, beside_best, best_of_ours, verdict
from benchmarks.gpu.timed_backend import Span, together
from moe.implementations import DEFAULTS
from moe.weights import initialise, num_active_parameters, num_parameters

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "README.md"
FORWARD = "grouped/mixtral/forward"


def row(name, form, milliseconds, **figures):
    return {"part": "p", "row": name, "form": form, "milliseconds": milliseconds, **figures}


def target(words):
    (result,) = [one for one in TARGETS if words in one.title]
    return result


def test_promises_are_open_until_their_rows_are_measured():
    failed = {"part": "grouped", "row": FORWARD, "form": "mosaic", "failed": "out of memory"}
    for rows in ([], [failed], [row(FORWARD, "torch", 1.0, of_dense=0.9)]):
        assert {verdict(one, rows) for one in TARGETS} == {("open", None)}
    assert {one.part for one in TARGETS} <= set(PARTS)


def test_the_dense_rate_is_that_of_our_kernel():
    rows = [row(FORWARD, "mosaic", 2.0, of_dense=0.69), row(FORWARD, "torch", 1.0, of_dense=0.9)]
    assert verdict(target("mixtral, forward: 70 %"), rows) == ("missed", 0.69)
    rows[0]["of_dense"] = 0.7
    assert verdict(target("mixtral, forward: 70 %"), rows) == ("reached", 0.7)


def test_the_best_alternative_is_the_fastest_of_all_others():
    rows = [row(FORWARD, form, ms) for form, ms in (("mosaic", 2.0), ("torch", 3.0), ("xla", 9.0))]
    assert beside_best(rows, FORWARD) == 1.5
    assert beside_best(rows, FORWARD, "torch") == pytest.approx(2 / 3)
    assert beside_best(rows[:1], FORWARD) is None
    assert verdict(target("mixtral, forward: ahead"), rows) == ("reached", 1.5)
    full = [{**one, "row": "layer/qwen3-30b-a3b/both"} for one in rows]
    full[0]["milliseconds"] = 2.1
    assert verdict(target("layer of experts"), full)[0] == "missed"
    # Any kernel of ours may be the one that is ahead.
    full.append(row("layer/qwen3-30b-a3b/both", "mosaic, plain router", 1.5))
    assert verdict(target("layer of experts"), full) == ("reached", 2.0)
    assert best_of_ours(full[1:3], "layer/qwen3-30b-a3b/both") is None


def test_training_and_decoding_are_judged_by_their_best_row():
    rows = [row("step/a", "x", 1.0, mfu=0.4), row("step/b", "x", 1.0, mfu=0.51)]
    assert verdict(target("50 % MFU"), rows) == ("reached", 0.51)
    name = "decode/3b active/256 rows, tokens 1 to 1000"
    rows = [row(name, "as it is", 9.0, of_copy=0.5), row(name, "mosaic", 9.0, of_copy=0.55)]
    assert verdict(target("256 rows, 3b active"), rows) == ("missed", 0.55)
    assert verdict(target("256 rows, 0.6b dense"), rows)[0] == "open"


def test_the_page_of_results_names_every_promise_and_the_command_that_fills_it():
    page = RESULTS.read_text()
    for one in TARGETS:
        lines = [line for line in page.splitlines() if line.startswith(f"| {one.title} |")]
        assert len(lines) == 1, one.title
        assert f"`python -m benchmarks.gpu --rows {one.part}" in lines[0]


def test_the_page_of_benchmarks_lists_the_parts_in_their_order():
    page = (RESULTS.parents[1] / "README.md").read_text()
    table = page[page.index("| part | content |") : page.index("* **Inputs** are random")]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert [name for cell in cells for name in re.findall("`(.*?)`", cell)] == list(PARTS)
    # Whether kernels are right is known whatever the rest takes.
    assert list(PARTS)[:2] == [CEILINGS, "cases"]


def test_every_kernel_of_a_network_is_in_a_form_that_is_measured():
    trained = [one.execution for one in training.TRAINED]
    for forms, fields in (
        (layer.FORMS.values(), {"experts"}),
        (trained, {"experts", "attention"}),
    ):
        assert {name for one in forms for name in one if one[name] == "mosaic"} == fields
    # Default kernels are compared with the plain path of every field that has one.
    assert decoding.FORMS["plain"].keys() == DEFAULTS.keys() - {"attention"}
    assert not decoding.FORMS["as it is"]


def test_questions_fit_a_quarter_of_an_hour_and_select_rows():
    assert quarter.START + quarter.limits() <= 14 * 60
    assert max(map(quarter.limits, zip(quarter.CALLS))) <= 10 * 60
    for question in quarter.QUESTIONS:
        settings = Settings(small=False, seed=0, only=question.only)
        labels = [
            f"{row.name} {row.form}" for part in question.parts for row in rows_of(part, settings)
        ]
        assert labels and all(any(name in label for label in labels) for name in question.only)
        # Ceilings first: all that a call measures is set beside them.
        first = next(one for one in quarter.QUESTIONS if one.call == question.call)
        assert first.parts == (CEILINGS,)


def test_answer_keeps_the_prediction_and_hands_on_the_ceilings(monkeypatch, tmp_path):
    asked = []

    def measure(parts, torch, settings, until):
        asked.append((parts, settings.only))
        about = {"device": "H200", "small": settings.small, "versions": {"jax": "1"}}
        return about, [row(COPY, "negation", 1.0)], replace(settings, copy=4e12)

    monkeypatch.setattr(quarter, "measure", measure)
    question = quarter.QUESTIONS[1]
    about, answer, settings = quarter.ask(question, "python", Settings(False, 0))
    assert settings.copy == 4e12 and answer["prediction"] == question.prediction
    quarter.ask(question, "python", Settings(True, 0))
    assert asked == [(question.parts, question.only), (question.parts, ())]
    figures = {"date": "2026-11-29", "seed": 0, **about, "questions": [answer]}
    quarter.write(tmp_path, "first", figures)
    written = json.loads((tmp_path / "quarter-2026-11-29-first.json").read_text())
    assert written["questions"][0]["rows"] == answer["rows"] and written["versions"] == {"jax": "1"}
    shown = (tmp_path / "quarter-2026-11-29-first.md").read_text()
    assert question.prediction in shown and "negation" in shown


def test_medians_of_clocks_pass_over_lines_without_numbers():
    lines = "1980, 700.5\n[N/A], 3\n1200, 650.0\n1755, 690.25\n"
    assert quarter.medians(lines) == {"clocks_sm": 1755, "power_draw": 690.25}
    assert quarter.medians("no devices were found\n") == {}


def test_ceilings_are_the_largest_of_their_forms():
    rows = [row(COPY, form, 1.0, gigabytes_per_s=rate) for form, rate in (("a", 4.0), ("b", 3.0))]
    settings = with_ceilings(Settings(False, 0), [*rows, {"row": COPY, "form": "c", "failed": "x"}])
    assert settings.copy == 4e9 and settings.dense is None


def test_rows_are_selected_by_parts_of_name_and_form():
    settings = Settings(small=True, seed=0, only=["forward blocks", "nothing"])
    assert [one.name for one in rows_of("grouped", settings)] == ["grouped/small/forward"]
    assert len(list(rows_of(CEILINGS, settings))) == 4


def test_chosen_parts_exclude_tilings_by_default():
    assert "tilings" not in chosen(None) and set(chosen(None)) == set(PARTS) - {"tilings"}
    assert chosen(["tilings", "layer"]) == [CEILINGS, "layer", "tilings"]


def test_markdown_lists_rates_failures_and_verdicts():
    rows = [
        row(FORWARD, "mosaic", 2.0, teraflops=480.0, of_dense=0.6, difference=2e-3),
        row(FORWARD, "torch", 3.0, teraflops=320.0, of_dense=0.4),
        {"part": "layer", "row": "layer/x", "form": "mosaic", "failed": "out of memory"},
        {"part": "layer", "row": "layer/x", "form": "blocks", "left_out": "time was over"},
        {"part": "cases", "row": "cases/x", "form": "mosaic", "needs": "an NVIDIA GPU"},
    ]
    about = {"device": "H100", "platform": "cuda", "small": False, "versions": {"jax": "1"}}
    page = markdown(kept({**about, "date": "2026-11-22", "seed": 5, "seconds": 9.0}, rows))
    first = "| grouped/mixtral/forward | mosaic | 2 | 480 TFLOP/s | 0.60 of the dense rate | 1.50 |"
    assert first + " difference 0.002 |" in page
    for text in ("failed: out of memory", "left out: time was over", "needs an NVIDIA GPU"):
        assert text in page and any(text in line_of(one) for one in rows)
    assert "mixtral, forward: 70 % of the dense rate | 0.60 | missed |" in page
    assert "jax 1" in page and "seed 5" in page


def test_work_rate_is_relative_to_the_ceilings():
    settings = Settings(small=True, seed=0, copy=8e9, dense=4e12)
    assert Work(3e9, "bytes").rate(0.75, settings) == {"gigabytes_per_s": 4.0, "of_copy": 0.5}
    assert Work(1e12, "operations").rate(0.5, settings) == {"teraflops": 2.0, "of_dense": 0.5}
    assert Work(1e12, "operations").rate(0.5, Settings(True, 0)) == {"teraflops": 2.0}


def test_a_difference_that_is_too_large_or_no_number_is_refused():
    assert difference(jnp.ones(4), jnp.ones(4)) == 0
    for result in (1.02 * jnp.ones(4), jnp.ones(4).at[2].set(jnp.nan)):
        with pytest.raises(ValueError, match="differs from float32 by"):
            difference(result, jnp.ones(4))


def test_a_row_says_why_it_has_no_figures(monkeypatch):
    monkeypatch.setattr(gc, "collect", lambda: 0)  # a second each among all that tests leave behind

    def run():
        raise RuntimeError("RESOURCE_EXHAUSTED: too large\nand more")

    named = {"row": "a", "form": "b"}
    assert result_of(Row("a", "b", run)) == {**named, "failed": "RESOURCE_EXHAUSTED: too large"}
    assert result_of(Row("a", "b", run, "a GPU")) == {**named, "needs": "a GPU"}
    assert result_of(Row("a", "b", lambda: {"milliseconds": 1.0}))["milliseconds"] == 1.0


def test_measured_compares_before_timing():
    def wrong(found):
        raise ValueError("differs")

    settings, x = Settings(small=True, seed=0), (jnp.ones(8),)
    with pytest.raises(ValueError, match="differs"):
        measured(lambda x: -x, x, Work(64, "bytes"), settings, wrong)
    figures = measured(lambda x: -x, x, Work(64, "bytes"), settings, lambda found: 0.25)
    assert figures["difference"] == 0.25 and figures["milliseconds"] > 0


def test_rows_are_halved_until_there_is_memory():
    tried = []

    def run(rows):
        tried.append(rows)
        if rows > 2:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return {"milliseconds": 1.0}

    assert halved_to_fit(run, 8) == {"rows": 2, "milliseconds": 1.0} and tried == [8, 4, 2]
    with pytest.raises(RuntimeError, match="too little"):
        halved_to_fit(lambda rows: (_ for _ in ()).throw(RuntimeError("too little")), 8)


def test_benchmark_shapes_have_their_parameters():
    billions = {
        "dense": (LLAMA_3B, 3.21, 3.21),
        "experts": (MOE_4B, 3.583, 0.676),
        "qwen dense": (QWEN3_06B, 0.596, 0.596),
        "qwen": (QWEN3_A3B, 30.53, 3.35),
        "of 32": (QWEN3_A3B_OF_32, 8.78, 3.34),
    }
    for sizes, full, active in billions.values():
        assert num_parameters(network(sizes)) / 1e9 == pytest.approx(full, rel=5e-3)
        assert num_active_parameters(network(sizes)) / 1e9 == pytest.approx(active, rel=5e-3)


def test_together_leaves_out_compiling_spans():
    first, second, third = (
        Span(9.0, True, 7, 3, 10.0),
        Span(1.0, False, 8, 4, 20.0),
        Span(2.0, False, 9, 5, 30.0),
    )
    assert together([first, second, third]) == Span(3.0, False, 17, 9, 50.0)
    assert together([first, first]) == Span(18.0, True, 14, 6, 20.0)


def test_a_decoding_step_reads_the_weights_that_its_rows_meet():
    sizes = {"vocab_size": 10, "num_layers": 2, "d_model": 6, "num_heads": 2, "num_kv_heads": 1}
    experts = {"num_experts": 4, "experts_per_token": 1, "d_expert": 3}
    config = network({**sizes, **experts, "head_dim": 4})
    weights = jax.eval_shape(lambda: initialise(config, jax.random.key(0)))
    weights = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), weights)
    tree = [leaf.size * 2 for leaf in jax.tree.leaves(weights)]
    of_experts = 2 * 4 * 3 * 6 * 3 * 2
    met = sum(tree) - 60 * 2  # the embedding's rows are few, and the head is another matrix
    assert bytes_of_step(config, weights, 1) == pytest.approx(met - 0.75 * of_experts)
    assert bytes_of_step(config, weights, 1000) == pytest.approx(met)
    # Keys and values, two layers, one head of 4 numbers of two bytes.
    assert bytes_of_column(config) == 2 * 2 * 4 * 2
