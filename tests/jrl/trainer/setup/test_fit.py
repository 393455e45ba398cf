"""Sizes of a run that fit the memory that is free."""

from dataclasses import replace

import pytest

from jrl.config.run import RunConfig
from jrl.recipes import Grpo, Ppo
from jrl.train import main
from jrl.trainer.setup import fit as fitting
from jrl.trainer.setup.fit import fit, with_settings
from jrl.trainer.setup.memory import run_memory
from jrl.trainer.setup.setup import build_setup
from sharding.folding import fold_abstract

GIB = 2**30


@pytest.fixture
def free(monkeypatch):
    """Sets the bytes that a device has free."""

    def set_free(num_bytes):
        monkeypatch.setattr(fitting, "free_memory", lambda mesh: num_bytes)

    return set_free


@pytest.fixture(scope="module")
def setup():
    return build_setup(RunConfig(response_length=400, warm_start_steps=0), Grpo())


def without_process(setup):
    memory = run_memory(setup)
    return memory, memory.permanent["programs and libraries"]


def test_fit_keeps_defaults_with_enough_memory(setup, free):
    for num_bytes in (None, 64 * GIB):
        free(num_bytes)
        fitted = fit(setup, Grpo())
        assert fitted.setup is setup and not fitted.chosen and not fitted.line
    # A limit of the run comes before what is free.
    small = replace(setup, run=replace(setup.run, memory_limit=1.5))
    assert fit(small, Grpo()).chosen


@pytest.mark.parametrize("case", ["all fit", "too little memory", "cpu", "set", "resumed"])
def test_fit_raises_the_vocabulary_chunk_on_gpus_with_memory_for_all_logits(setup, free, case):
    # A vocabulary of several chunks; rows whose logits are the largest of what an update needs.
    execution = replace(setup.model.execution, vocab_chunk=2**14)
    model = replace(setup.model, vocab_size=2**18, execution=execution)
    mesh = setup.mesh if case == "cpu" else fold_abstract(setup.mesh.layout, "gpu")
    setup = replace(setup, model=model, mesh=mesh)
    if case == "set":
        setup = replace(setup, run=replace(setup.run, vocab_chunk=2**14))
    needed = run_memory(setup).peak
    room = 1.05 if case == "too little memory" else 64
    free(int(room * needed / fitting.LOGITS_FRACTION))
    fitted = fit(setup, Grpo(), chooses=case != "resumed")
    if case != "all fit":
        assert fitted.setup is setup and not fitted.chosen
        return
    assert fitted.chosen == {"vocab_chunk": 2**18}
    assert fitted.setup.run.vocab_chunk == fitted.setup.model.execution.vocab_chunk == 2**18
    assert run_memory(fitted.setup).peak > needed
    assert fitted.line.startswith("memory: --vocab-chunk 262144: no logit is computed twice")


@pytest.mark.parametrize("share", [0.9, 0.7, 0.5])
def test_fit_lowers_what_the_peak_needs(setup, free, share):
    memory, process = without_process(setup)
    num_bytes = int(process + share * (memory.peak - process))
    free(num_bytes)
    fitted = fit(setup, Grpo())
    needed = run_memory(fitted.setup)
    assert needed.peak <= fitting.MEMORY_FRACTION * num_bytes
    assert fitted.chosen and set(fitted.chosen) <= {
        "prefill_tokens",
        "slots",
        "micro_batch",
        "vocab_chunk",
    }
    assert all(
        f"--{name.replace('_', '-')} {v}" in fitted.line for name, v in fitted.chosen.items()
    )
    # Recorded, the choices are the run's own: it is built again as it is.
    run, recipe = (with_settings(each, fitted.chosen) for each in (setup.run, Grpo()))
    again = build_setup(run, recipe)
    assert run_memory(again) == needed
    assert again.geometry.num_micro_batches == fitted.setup.geometry.num_micro_batches
    free(None)
    assert fit(again, recipe).setup is again


def test_fit_refuses_sizes_that_were_set(free):
    recipe = Grpo(micro_batch=64)
    setup = build_setup(
        RunConfig(response_length=400, warm_start_steps=0, slots=512, vocab_chunk=None), recipe
    )
    memory, process = without_process(setup)
    free(int(process + 0.6 * (memory.peak - process)))
    with pytest.raises(ValueError, match=r"does not fit: update needs .* --micro-batch \d+ would"):
        fit(setup, recipe)
    # A resumed run keeps its defaults.
    setup = build_setup(RunConfig(response_length=400, warm_start_steps=0), Grpo())
    with pytest.raises(ValueError, match="--micro-batch"):
        fit(setup, Grpo(), chooses=False)
    free(1000)
    with pytest.raises(ValueError, match="Try --remat full"):
        fit(setup, Grpo())


def test_phases_of_a_run_with_a_critic():
    setup = build_setup(RunConfig(), replace(Ppo(), kl_coef=0.1))
    memory = run_memory(setup)
    assert set(memory.phases) == {"sampling", "update", "scoring", "warm start"}
    assert {"weights", "critic", "reference"} <= memory.permanent.keys()
    assert memory.peak == max(memory.peaks.values()) == memory.peaks[memory.largest]


def test_dry_run_of_a_run_that_does_not_fit(capsys):
    sizes = ["--micro-batch=64", "--slots=512", "--response-length=400"]
    assert main(["--dry-run", "--memory-limit=1", *sizes]) == 2
    shown = capsys.readouterr()
    assert "does not fit" in shown.err and "Memory per device" in shown.out
