"""What samples.jsonl says of single tokens, against the sampler's own numbers and the metrics."""

import numpy as np
import pytest
from small_runs import finish

from jrl.report.metrics import without_timings
from jrl.runs.records import read, read_metrics
from jrl.text.tokenizer import Tokenizer
from jrl.trainer import token_records


@pytest.fixture
def training(grpo_run):
    """Samples of the last step, with the numbers of up to three tokens."""
    return [line for line in read(grpo_run / "samples.jsonl") if line["kind"] == "training"]


def test_tokens_are_bounded_and_spell_the_completion(training):
    assert len(training) == 4 and any(line["length"] > 3 for line in training)
    for line in training:
        tokens = line["tokens"]
        assert tokens["of"] == line["length"]
        count = min(line["length"], 3)
        for name in ("text", "advantage", "sampler_logprob", "gap", "entropy"):
            assert len(tokens[name]) == count, name
        # A policy that has learned nothing also samples special tokens, which have no text.
        assert line["completion"].startswith("".join(tokens["text"]).partition("<")[0])


def test_numbers_of_tokens_are_those_of_the_policy(training, grpo_run):
    # At most the entropy of a uniform distribution.
    most = np.log(Tokenizer((grpo_run / "tokenizer.model").read_bytes()).vocab_size)
    for line in training:
        tokens = line["tokens"]
        # Sampler and trainer differ by the rounding of float32.
        np.testing.assert_allclose(tokens["gap"], 0, atol=1e-5)
        assert all(x < 0 for x in tokens["sampler_logprob"])
        assert all(0 < x <= most + 1e-3 for x in tokens["entropy"])
        # GRPO gives each token of a response the same.
        assert len(set(tokens["advantage"])) == 1


@pytest.mark.slow
def test_the_better_of_two_completions_has_the_larger_advantage(finished):
    training = [line for line in finished("grpo").samples if line["kind"] == "training"]
    pairs = [(line["score"], line["tokens"]["advantage"][0]) for line in training]
    groups = np.reshape(pairs, (-1, 2, 2))  # group, sample, score or advantage
    np.testing.assert_array_equal(*np.sign(groups[:, 0] - groups[:, 1]).T)
    assert groups[..., 1].any()


@pytest.mark.slow
def test_nothing_else_changes(finished, tmp_path):
    run = finished("grpo")
    without = finish("grpo", tmp_path / "run", sample_tokens=0)
    samples = [{k: v for k, v in line.items() if k != "tokens"} for line in run.samples]
    assert samples == without.samples
    lines = [
        [without_timings(line) for line in read_metrics(each.folder.metrics_path)]
        for each in (run, without)
    ]
    assert lines[0] == lines[1]


def test_numbers_are_short():
    assert token_records._short(np.float32(1 / 3)) == 0.3333
    assert np.isnan(token_records._short(np.nan))
