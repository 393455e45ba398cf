"""What samples.jsonl says of single tokens, against the sampler's own numbers and the metrics."""

import numpy as np
import pytest
from small_runs import finish

from jrl.report.metrics import without_timings
from jrl.runs.records import read_metrics
from jrl.trainer import token_records


@pytest.fixture
def run(finished):
    """One with the numbers of up to three tokens."""
    return finished("grpo")


def training(run):
    return [line for line in run.samples if line["kind"] == "training"]


def test_tokens_are_bounded_and_spell_the_completion(run):
    lines = training(run)
    assert len(lines) == 4 and any(line["length"] > 3 for line in lines)
    for line in lines:
        tokens = line["tokens"]
        assert tokens["of"] == line["length"]
        count = min(line["length"], 3)
        for name in ("text", "advantage", "sampler_logprob", "gap", "entropy"):
            assert len(tokens[name]) == count, name
        written, whole = "".join(tokens["text"]), line["completion"]
        assert written == whole[:3] or written.startswith(whole)  # and then what ended it


def test_numbers_of_tokens_are_those_of_the_policy(run):
    for line in training(run):
        tokens = line["tokens"]
        # Sampler and trainer differ by the rounding of float32.
        np.testing.assert_allclose(tokens["gap"], 0, atol=1e-5)
        assert all(x < 0 for x in tokens["sampler_logprob"])
        # At most that of a uniform distribution; GRPO gives each token of a response the same.
        most = np.log(run.setup.tokenizer.vocab_size)
        assert all(0 < x <= most + 1e-3 for x in tokens["entropy"])
        assert len(set(tokens["advantage"])) == 1
    scores = [line["score"] for line in training(run)]
    advantages = [line["tokens"]["advantage"][0] for line in training(run)]
    pairs = np.reshape(scores, (-1, 2)), np.reshape(advantages, (-1, 2))
    np.testing.assert_array_equal(*(np.sign(x[:, 0] - x[:, 1]) for x in pairs))
    assert any(advantages)


@pytest.mark.slow
def test_nothing_else_changes(run, tmp_path):
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
