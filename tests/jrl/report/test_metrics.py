import re

import pytest

from jrl.report import metrics


def test_every_metric_is_defined_once_and_in_a_sentence():
    names = [metric.name for metric in metrics.TABLE]
    assert len(names) == len(set(names))
    for metric in metrics.TABLE:
        assert re.fullmatch(r"[\w@/]+(/\*)?", metric.name), metric.name
        assert metric.definition[0].isupper() and metric.definition.endswith("."), metric.name
        assert metric.unit


def test_no_family_lies_in_another():
    for one in metrics.FAMILIES:
        assert not [other for other in metrics.FAMILIES if other != one and other.startswith(one)]


KNOWN = """
actor/pg_loss actor/pg_clipfrac actor/pg_clipfrac_lower actor/ppo_kl actor/entropy
actor/kl_loss actor/grad_norm actor/lr critic/vf_loss critic/vf_clipfrac critic/vpred_mean
critic/vf_explained_var critic/score/mean critic/rewards/mean critic/rewards/std
critic/advantages/mean critic/advantages/min critic/advantages/max critic/returns/mean
response_length/mean response_length/min response_length/max response_length/clip_ratio
prompt_length/mean val/accuracy/sampled val/accuracy/greedy val/pass@k/8 frac_reward_zero_std
sampling/sampling_logp_difference/mean sampling/sampling_logp_difference/max moe/max_load
moe/min_load moe/load_balancing_loss moe/z_loss moe/router_entropy moe/dropped_fraction
moe/padded_fraction timing_s/rollout perf/throughput verifier/timeout val/verifier/wrong
training/nonfinite_skipped training/empty_skipped timing_s/old_log_prob perf/tokens_per_second
rollout_corr/kl rollout_corr/rollout_is_max rollout_corr/rollout_rs_masked_fraction
dynamic_sampling/filtered global_seqlen/mean
"""


@pytest.mark.parametrize("name", KNOWN.split())
def test_names_the_trainer_logs_are_known(name):
    metrics.check_defined([name])


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r'"actor/entropi" \(did you mean "actor/entropy"\?\)'):
        metrics.check_defined({"actor/entropi": 1.0, "actor/pg_loss": 2.0})
    with pytest.raises(ValueError, match=r'"zzzz"; add a row to TABLE'):
        metrics.check_defined(["zzzz"])
    with pytest.raises(ValueError, match='"verifier/"'):
        metrics.check_defined(["verifier/"])


def test_names_are_described_by_their_own_line_before_their_family():
    described = metrics.describe("val/verifier/timeout")
    assert described is not None and described.name == "val/verifier/*"
    described = metrics.describe("perf/slot_utilisation")
    assert described is not None and (described.name, described.unit) == (
        "perf/slot_utilisation",
        "fraction",
    )
    described = metrics.describe("perf/throughput")
    assert described is not None and described.unit == "tokens/s"


def test_timings_alone_may_differ_between_runs():
    values = {"timing_s/rollout": 1.0, "perf/throughput": 2.0, "actor/pg_loss": 3.0}
    assert metrics.without_timings(values) == {"actor/pg_loss": 3.0}
    assert not metrics.is_timing("training/total_tokens")
