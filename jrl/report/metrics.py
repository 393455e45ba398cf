"""Definitions of all metrics, in one table; undefined metrics cannot be logged.

Names are verl's where verl has one, because dashboards already parse them. Fractions and means
state their denominator. "Token" alone means a token that the policy sampled (the mask of the
batch), the end-of-sequence token included; "response" means one row of the batch; "step" means
everything between two rollouts, all mini-batches included.

To add a metric, add a row to `TABLE`. A name that ends in ``/*`` declares a family: every name that
continues it with at least one character is defined.
"""

import difflib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

SPREAD = {"mean": "Mean", "min": "Smallest", "max": "Largest"}


@dataclass(frozen=True)
class MetricDefinition:
    """One row of the table.

    Attributes:
      name: verl's spelling, or our own if verl has none; ``family/*`` for a family.
      unit: "nats", "tokens", "fraction", "seconds", ...
      definition: one sentence, with the denominator if there is one.
    """

    name: str
    unit: str
    definition: str


def read_table(text: str) -> tuple[MetricDefinition, ...]:
    """The metrics of a table with a row for each: ``name | unit | definition``.

    Lines that begin with two spaces continue a row; lines that begin with ``#`` are comments. A
    name that ends in ``{mean,min,max}`` is three metrics of a quantity, which its definition names.
    """
    lines = text.replace("\n  ", " ").splitlines()
    rows = (row.split(" | ", 2) for row in lines if row and not row.startswith("#"))
    return tuple(metric for row in rows for metric in _expand_row(*row))


def _expand_row(name: str, unit: str, definition: str) -> list[MetricDefinition]:
    start, spread, _ = name.partition("{mean,min,max}")
    if not spread:
        return [MetricDefinition(name, unit, definition)]
    return [
        MetricDefinition(start + suffix, unit, f"{word} {definition}")
        for suffix, word in SPREAD.items()
    ]


TABLE = read_table("""
# Policy.
actor/loss | 1 | Loss that the policy's gradient is taken of, with all its terms, mean over the
  optimizer steps of a step.
actor/pg_loss | 1 | Policy-gradient loss under the recipe's denominator.
actor/pg_clipfrac | fraction | Share of tokens where the clipped surrogate was the larger loss, over
  all tokens.
actor/pg_clipfrac_lower | fraction | Share of tokens stopped by the dual clip (negative advantage),
  over all tokens.
actor/ppo_kl | nats | Mean over tokens of old minus current log-probability: how far a step moved.
actor/ratio | 1 | Mean over tokens of the probability ratio, new over old.
actor/ratio_squared | 1 | Mean over tokens of the squared probability ratio.
actor/ratio_clamped | fraction | Share of tokens whose log-ratio was clamped.
actor/nll | nats | Mean over tokens of the negative log-probability.
actor/gate | fraction | Share of the gradient that a smooth gate lets through (SAPO), mean over
  tokens.
actor/phi | 1 | Mean over tokens of the weight of their response's gradient (VESPO).
actor/dro_penalty | 1 | Mean over tokens of the quadratic penalty on the log-ratio (DRO).
actor/cov_frac | fraction | Share of tokens chosen by their covariance (Clip-Cov, KL-Cov), over all
  tokens.
actor/redistributed | fraction | Share of tokens whose advantage was redistributed by entropy
  (HAPO), over all tokens.
actor/entropy | nats | Mean over tokens of the policy's entropy.
actor/kl_loss | nats | Mean over tokens of the estimated divergence from the reference policy,
  unweighted.
teacher/gap | nats | Mean over tokens of the policy's log-probability minus the teacher's, one
  sample of the reverse KL divergence for each token.
teacher/kl | nats | Mean over tokens of the KL divergence of the teacher's distribution from the
  policy's, in closed form.
teacher/far | fraction | Share of tokens that are at least e^5 times less likely under the teacher
  than under the policy, over all tokens.
teacher/agreement | fraction | Share of tokens that are the teacher's argmax, over all tokens.
teacher/unscored | fraction | Share of responses out of the loss because their log-probabilities
  under the teacher are not finite, over responses.
actor/kl_coef | 1 | Weight of the divergence from the reference policy.
actor/positive_loss | nats | Negative log-likelihood of the responses with full score, mean over
  their tokens.
actor/grad_norm | 1 | Global norm of the policy's gradient before clipping, mean over optimizer
  steps.
actor/lr | 1 | Learning rate of the last optimizer step of the policy.

# Critic.
critic/loss | 1 | Loss that the critic's gradient is taken of, with all its terms, mean over the
  optimizer steps of a step.
critic/vf_loss | 1 | Value loss, half the squared error, mean over tokens.
critic/vf_clipfrac | fraction | Share of tokens where the clipped value error was the larger, over
  all tokens.
critic/vpred_mean | reward | Mean over tokens of the value predicted in the update.
critic/vf_explained_var | fraction | One minus the variance of (returns - values) over that of the
  returns, over all tokens.
critic/grad_norm | 1 | Global norm of the critic's gradient before clipping.
critic/lr | 1 | Learning rate of the last optimizer step of the critic.
critic/pretrain_loss | 1 | Value loss of the value pretraining, mean over tokens.
critic/values/{mean,min,max} | reward | value over tokens, as predicted for the old policy.
critic/returns/{mean,min,max} | reward | return over tokens.
critic/advantages/{mean,min,max} | reward | advantage over tokens, as the policy loss sees it.

# Reward. The score is the verifier's; the reward is what is optimised (penalties, shaping).
critic/score/{mean,min,max} | score | verifier's score over responses.
critic/score/group_std | score | Standard deviation of the score within a group, mean over groups.
critic/rewards/{mean,min,max} | reward | reward over responses, penalties included.
critic/rewards/std | reward | Standard deviation of the reward over responses.
critic/overlong_penalty/mean | reward | Mean over responses of the penalty for length; zero or
  negative.
frac_reward_zero_std | fraction | Share of groups whose responses all got the same reward, over the
  groups of the batch.

# Lengths.
response_length/{mean,min,max} | tokens | number of tokens over responses.
response_length/clip_ratio | fraction | Share of responses truncated at the length limit before they
  ended, over all responses.
prompt_length/{mean,min,max} | tokens | number of prompt tokens over rows, padding excluded.
global_seqlen/{mean,min,max} | tokens | number of prompt and response tokens over data ranks.

# Progress.
training/epoch | 1 | Passes over the task's training prompts; fractional.
training/tokens | tokens | Prompt and response tokens of the trained batch, padding excluded.
training/learned_tokens | tokens | Tokens of the assistant in the conversations of the step: those
  in the loss mask.
training/total_tokens | tokens | Prompt and response tokens trained on since the first step, padding
  excluded.
training/optimizer_steps | count | Optimizer steps of the policy applied in this step, skipped ones
  not counted.
training/nonfinite_skipped | count | Optimizer steps of this step skipped because a loss or a
  gradient was NaN or infinite.
training/nonfinite_skipped_total | count | Optimizer steps skipped for that reason since the first
  step.
training/empty_skipped | count | Optimizer steps of this step skipped because no token of their
  mini-batch was in the loss mask.
training/empty_skipped_total | count | The same since the first step.
training/overflow_repeated | count | Steps recomputed after an overflow (--buffer-factor).

# Sampler against trainer.
sampling/sampling_logp_difference/mean | nats | Mean over tokens of |log-probability when sampled -
  the same under the training code|.
sampling/sampling_logp_difference/max | nats | Largest of those differences over tokens.
sampling/k3_kl | nats | Mean over tokens of w - 1 - log w, w trainer over sampler.
staleness/mean | steps | Mean over tokens of the steps between the policy that sampled it and the
  one that is trained on it; runs with --max-staleness 0 have none.
staleness/max | steps | The largest of them; --max-staleness at most.
sampling/drift_alarm | 0 or 1 | One if that is above --drift-alarm, else zero.
sampling/routing_agreement | fraction | The first update's moe/replay_agreement with the sampler's
  experts.
sampling/temperature/{mean,min,max} | 1 | temperature over tokens, where it follows the entropy
  (HAPO).

# The same before the first update, in the full policy, where the trainer scores completions
# then; w is trainer over sampler.
rollout_corr/kl | nats | Mean over tokens of -log w: k1 of KL(sampler, trainer).
rollout_corr/k3_kl | nats | Mean over tokens of w - 1 - log w: k3 of the same.
rollout_corr/log_ppl_diff | nats | Log-perplexity under the trainer minus under the sampler, mean
  over sequences.
rollout_corr/log_ppl_abs_diff | nats | Mean over sequences of that size.
rollout_corr/chi2_token | 1 | Mean over tokens of w squared, less one.
rollout_corr/chi2_seq | 1 | Mean over sequences of the squared product of their w, less one.
rollout_corr/rollout_is_mean | 1 | Mean of the importance weights as the loss gets them, over the
  tokens in the loss mask.
rollout_corr/rollout_is_min | 1 | Smallest of them.
rollout_corr/rollout_is_max | 1 | Largest of them.
rollout_corr/rollout_is_eff_sample_size | fraction | Effective sample size of those weights, over
  the tokens in the loss mask.
rollout_corr/rollout_is_ratio_fraction_high | fraction | Share of tokens whose weight was above the
  greatest allowed, over those in the loss mask.
rollout_corr/rollout_is_ratio_fraction_low | fraction | Share of tokens whose weight was below the
  least allowed, over those in the loss mask.
rollout_corr/rollout_rs_masked_fraction | fraction | Share of tokens that were rejected, over those
  sampled.
rollout_corr/rollout_rs_seq_masked_fraction | fraction | Share of sequences with a rejected token,
  over those with a token.

# Dynamic sampling. What is generated are the prompts up to the last that a step's batch needs:
# those that were started ahead and turn out to be too many are not counted.
train/num_gen_batches | batches | Prompts generated for the step, in batches.
dynamic_sampling/prompts_generated | count | Prompts generated for the step.
dynamic_sampling/prompts_kept | count | Prompts of the batch with unequal scores.
dynamic_sampling/filtered | fraction | Share of prompts whose responses all had the same score, over
  those generated.
dynamic_sampling/gave_up | 0 or 1 | One where --max-generation-rounds batches were not enough to
  fill this one, else zero.

# Verifier: one count per reason, so that nothing is a silent zero.
verifier/* | count | Responses whose verdict gave this reason, in this step.
reward/suspicion | 0 or 1 | One if the score may rise by reward hacking: by answers that a second
  verifier rejects, or while lengths or variety collapse; else zero.
reward/* | reward | Mean of this component of the reward, unweighted, where given.
answers/variety | fraction | Distinct answers among the most common one of each prompt, over
  prompts.
answers/top_form | fraction | Share of the most common form of an answer, its numbers and words left
  out, over responses.
answers/shared | fraction | Share of responses with full score that a second verifier accepts too,
  which compares numbers as text, over those whose reference answer is a number.
answers/disputed | fraction | Share of those with full score that it rejects.
conversation/* | turns, tokens, fraction | Turns of the policy, those of them truncated by
  --turn-length, and tokens of the environment, means over conversations; and the share of them that
  --max-turns ended.
task/* | fraction, score, count | Accuracy, mean score and number of completions of one task of a
  weighted mixture, in this step.
data/prompts_dropped | count | Prompts dropped for having more tokens than --prompt-length, in the
  run.
data/chats_dropped | count | Conversations dropped for having more tokens than --max-length, in the
  run.
data/chats_truncated | count | Conversations truncated to --max-length, in the run.

# Evaluation on held-out prompts.
val/reward/* | reward | As reward, of the sampled held-out responses.
val/conversation/* | as of those | As conversation, of sampled held-out responses.
val/task/* | as of task | As task, of held-out responses, sampled and greedy.
val/prompts | count | Held-out prompts of the evaluation.
val/accuracy/sampled | fraction | Share of held-out responses with full score, sampled as in
  training, over all samples.
val/accuracy/greedy | fraction | Share of held-out prompts whose greedy response gets the full
  score, over prompts.
val/pass@k/* | fraction | Chance that one of K samples gets the full score (unbiased), mean over
  held-out prompts.
val/nll | nats | Negative log-likelihood of the assistant's tokens in held-out conversations, mean
  over them.
val/perplexity | 1 | The exponential of val/nll.
val/token_accuracy | fraction | Share of the assistant's tokens in held-out conversations that are
  the most probable token, over all of them.
val/tokens | count | Tokens of the assistant in these conversations.
val/score/sampled | score | Mean score of the sampled held-out responses.
val/score/greedy | score | Mean score of the greedy held-out responses.
val/response_length/{mean,min,max} | tokens | number of tokens over sampled held-out responses.
val/response_length/clip_ratio | fraction | Share of sampled held-out responses truncated at the
  length limit, over all of them.
val/verifier/* | count | Sampled held-out responses with this reason.

# Warm start.
warm_start/loss | nats | Cross-entropy of the reference answers, mean over their tokens.
warm_start/accuracy | fraction | Share of sampled responses with full score, over training prompts
  not trained on yet.
warm_start/steps | count | Supervised steps taken before reinforcement.

# Mixture of experts (MoE). Load is an expert's share of the routed tokens times the number of
# experts: one is even, zero is an expert without work.
moe/max_load | 1 | Load of the busiest expert, mean over layers; one is even.
moe/min_load | 1 | Load of the idlest expert, mean over layers; one is even.
moe/load_balancing_loss | 1 | Load-balancing loss before its weight, mean over layers; one is even.
moe/z_loss | 1 | Router z-loss before its weight, mean over layers and tokens.
moe/router_entropy | nats | Entropy of the router's distribution, mean over layers and real tokens.
moe/dropped_fraction | fraction | Share of (token, expert) pairs dropped beyond an expert's
  capacity, over all pairs.
moe/overflow | count | Pairs (token, expert) that overflowed the buffers in the first attempt.
moe/padded_fraction | fraction | Share of padding among the positions that the network computes;
  shared prompts count once.
moe/replay_agreement | fraction | Share of the replayed experts that the router would select, over
  tokens and layers.

# Time: the only metrics that may differ between two runs of one seed.
perf/tokens_per_second | tokens/s | Prompt and response tokens of the step over its wall time, all
  devices in total.
perf/throughput | tokens/s | The same for each device.
perf/time_per_step | seconds | Wall time of the step; evaluation, checkpoint and display are
  excluded.
perf/total_num_tokens | tokens | Prompt and response tokens of the step.
perf/slot_utilisation | fraction | Tokens sampled over slots that were computed.
perf/decode_steps | count | Steps of decoding, each a token for every live row.
perf/sampled_tokens | tokens | Tokens sampled, those of dropped groups too.
perf/prefill_repeated | count | Prefills recomputed after an overflow (--buffer-factor).
perf/run_minutes | minutes | Wall time of the run so far, compilation, evaluations and checkpoints
  included; a resumed run continues from its last line.
perf/process_memory_gb | GiB | Resident memory of the first process at the end of the step.
perf/max_memory_allocated_gb | GiB | Peak memory of the first process's devices, the largest.
perf/* | as named | Other speeds and memory, named as in verl.
timing_s/gen | seconds | Wall time of decoding completions.
timing_s/reward | seconds | Wall time of waiting for their verdicts.
timing_s/values | seconds | Wall time of the critic's values of all completions.
timing_s/ref | seconds | Wall time of scoring them by frozen networks, such as the reference.
timing_s/old_log_prob | seconds | Wall time of scoring them by the policy itself.
timing_s/adv | seconds | Wall time of rewards, advantages and corrections.
timing_s/update_actor | seconds | Wall time of the policy's optimizer steps.
timing_s/update_critic | seconds | Wall time of the critic's optimizer steps.
timing_s/samples | seconds | Wall time of scoring the completions that are shown, on top of the
  step's.
timing_s/testing | seconds | Wall time of an evaluation, on top of the step's.
timing_s/wait_for_rollout | seconds | Wall time for which a step that had finished training waited
  for the sampler.
timing_s/* | seconds | Wall time of another phase of the step.
timing_per_token_ms/* | milliseconds | Wall time of one phase over its tokens.

# On the line of the step at which an alarm named a machine; other runs have none of these.
faults/alarm/* | Unix seconds | When a machine (and a metric) began to stand out.
""")


EXACT = {metric.name: metric for metric in TABLE if not metric.name.endswith("/*")}
FAMILIES = {metric.name.removesuffix("*"): metric for metric in TABLE if metric.name.endswith("/*")}
OTHER_REWARDS = ("reward/suspicion",)
"""Metrics that are named like parts of a reward."""
DIFFERENCES = (
    *("actor/ppo_kl", "actor/kl_loss", "critic/advantages/mean", "sampling/k3_kl"),
    *("sampling/sampling_logp_difference/", "rollout_corr/kl", "rollout_corr/k3_kl"),
    *("rollout_corr/log_ppl", "rollout_corr/chi2"),
)
"""Beginnings of names of metrics that are 0 but for the order of sums, until something differs."""
ROUNDING = 1e-5
"""Size below which such a difference is rounding of float32."""
TIMINGS = ("timing_s/", "perf/", "timing_per_token_ms/", "faults/")


def describe(name: str) -> MetricDefinition | None:
    """Return the row that defines `name`, or the row of its family, or None."""
    return EXACT.get(name) or next(
        (line for start, line in FAMILIES.items() if name.startswith(start) and name != start), None
    )


def check_defined(names: Iterable[str], recipe_metrics: Collection[str] = ()) -> None:
    """Reject metrics that neither the table nor the recipe defines.

    Args:
      names: the names to be logged; a dict of metrics serves.
      recipe_metrics: names that the recipe defines (`jrl.recipes.Recipe.metrics`).

    Raises:
      ValueError: for every undefined name, with the nearest defined one.
    """
    hints = []
    for name in names:
        if describe(name) is None and name not in recipe_metrics:
            near = difflib.get_close_matches(name, EXACT, n=1)
            hints.append(f'"{name}"' + (f' (did you mean "{near[0]}"?)' if near else ""))
    if hints:
        raise ValueError(
            f"metrics without a definition: {', '.join(hints)}; add a row to TABLE in "
            "jrl/report/metrics.py, or to `metrics` of your recipe"
        )


def is_timing(name: str) -> bool:
    """Return whether `name` measures time; only such metrics may differ between runs of one
    seed."""
    return name.startswith(TIMINGS)


def without_timings(metrics: Mapping[str, float | int]) -> dict[str, float | int]:
    """Return the metrics that are identical in two runs of one seed."""
    return {name: value for name, value in metrics.items() if not is_timing(name)}


def is_rounding(name: str, values: Iterable[float | int]) -> bool:
    """True if all values of a metric are differences of rounding, whose noise is no curve."""
    return name.startswith(DIFFERENCES) and all(not abs(x) >= ROUNDING for x in values)


def always_zero(lines: Iterable[Mapping[str, float | int]]) -> list[str]:
    """Names of the parts of a reward (``reward/NAME``) whose mean was 0 in every step of a run that
    has them, in training and in evaluation; empty if there was no step."""
    values: dict[str, set[float]] = {}
    for line in lines:
        for name, value in line.items():
            part = name.removeprefix("val/")
            if part.startswith("reward/") and part not in OTHER_REWARDS:
                values.setdefault(part.removeprefix("reward/"), set()).add(float(value))
    return sorted(name for name, means in values.items() if means == {0.0})
