"""What every metric means: one table, and nothing may be logged that is not in it.

Names are verl's where verl has one, because dashboards already parse them. Fractions and means
state their denominator. "Token" alone means a token that the policy sampled (the mask of the
batch), the end-of-sequence token included; "response" means one row of the batch; "step" means
everything between two rollouts, all mini-batches included.

To add a metric, add a line to `TABLE`, or to `SYSTEM` where it tells of the network's work, of the
clock or of machines. A name that ends in ``/*`` declares a family: every name that continues it
with at least one character is known.
"""

from jrl.report.metric import Metric, spread
from jrl.report.system_metrics import SYSTEM

TABLE: tuple[Metric, ...] = (
    # Policy.
    Metric(
        "actor/loss",
        "Everything the policy's gradient was taken of, mean over the optimizer steps of a step.",
        "1",
    ),
    Metric("actor/pg_loss", "Policy-gradient loss under the recipe's own denominator.", "1"),
    Metric(
        "actor/pg_clipfrac",
        "Share of tokens where the clipped surrogate was the larger loss, over all tokens.",
        "fraction",
    ),
    Metric(
        "actor/pg_clipfrac_lower",
        "Share of tokens stopped by the dual clip (negative advantage), over all tokens.",
        "fraction",
    ),
    Metric(
        "actor/ppo_kl",
        "Mean over tokens of old minus current log-probability: how far a step moved.",
        "nats",
    ),
    Metric("actor/ratio", "Mean over tokens of the probability ratio, new over old.", "1"),
    Metric("actor/ratio_squared", "Mean over tokens of the squared probability ratio.", "1"),
    Metric("actor/ratio_clamped", "Share of tokens whose log-ratio met its bound.", "fraction"),
    Metric("actor/nll", "Mean over tokens of the negative log-probability.", "nats"),
    Metric(
        "actor/gate",
        "Share of the gradient that a smooth gate lets through (SAPO), mean over tokens.",
        "fraction",
    ),
    Metric(
        "actor/phi", "Mean over tokens of the weight of their response's gradient (VESPO).", "1"
    ),
    Metric(
        "actor/dro_penalty",
        "Mean over tokens of the quadratic penalty on the log-ratio (DRO).",
        "1",
    ),
    Metric(
        "actor/cov_frac",
        "Share of tokens chosen by their covariance (Clip-Cov, KL-Cov), over all tokens.",
        "fraction",
    ),
    Metric(
        "actor/redistributed",
        "Share of tokens whose advantage was redistributed by entropy (HAPO), over all tokens.",
        "fraction",
    ),
    Metric("actor/entropy", "Mean over tokens of the policy's entropy.", "nats"),
    Metric(
        "actor/kl_loss",
        "Mean over tokens of the estimated divergence from the reference policy, unweighted.",
        "nats",
    ),
    Metric("actor/kl_coef", "Weight of the divergence from the reference policy.", "1"),
    Metric(
        "actor/positive_loss",
        "Negative log-likelihood of the responses that scored full marks, mean over their tokens.",
        "nats",
    ),
    Metric(
        "actor/grad_norm",
        "Global norm of the policy's gradient before clipping, mean over optimizer steps.",
        "1",
    ),
    Metric("actor/lr", "Learning rate of the last optimizer step of the policy.", "1"),
    # Critic.
    Metric(
        "critic/loss",
        "Everything the critic's gradient was taken of, mean over the optimizer steps of a step.",
        "1",
    ),
    Metric("critic/vf_loss", "Value loss, half the squared error, mean over tokens.", "1"),
    Metric(
        "critic/vf_clipfrac",
        "Share of tokens where the clipped value error was the larger, over all tokens.",
        "fraction",
    ),
    Metric("critic/vpred_mean", "Mean over tokens of the value predicted in the update.", "reward"),
    Metric(
        "critic/vf_explained_var",
        "One minus the variance of (returns - values) over that of the returns, over all tokens.",
        "fraction",
    ),
    Metric("critic/grad_norm", "Global norm of the critic's gradient before clipping.", "1"),
    Metric("critic/lr", "Learning rate of the last optimizer step of the critic.", "1"),
    Metric("critic/pretrain_loss", "Value loss of the value pretraining, mean over tokens.", "1"),
    *spread("critic/values", "value over tokens, as predicted for the old policy", "reward"),
    *spread("critic/returns", "return over tokens", "reward"),
    *spread("critic/advantages", "advantage over tokens, as the policy loss sees it", "reward"),
    # Reward. The score is the verifier's; the reward is what is optimised (penalties, shaping).
    *spread("critic/score", "verifier's score over responses", "score"),
    Metric(
        "critic/score/group_std",
        "Standard deviation of the score within a group, mean over groups.",
        "score",
    ),
    *spread("critic/rewards", "reward over responses, penalties included", "reward"),
    Metric("critic/rewards/std", "Standard deviation of the reward over responses.", "reward"),
    Metric(
        "critic/overlong_penalty/mean",
        "Mean over responses of the penalty for length; zero or negative.",
        "reward",
    ),
    Metric(
        "frac_reward_zero_std",
        "Share of groups whose responses all got the same reward, over the groups of the batch.",
        "fraction",
    ),
    # Lengths.
    *spread("response_length", "number of tokens over responses", "tokens"),
    Metric(
        "response_length/clip_ratio",
        "Share of responses cut at the length limit before they ended, over all responses.",
        "fraction",
    ),
    *spread("prompt_length", "number of prompt tokens over rows, padding excluded", "tokens"),
    *spread("global_seqlen", "number of prompt and response tokens over data ranks", "tokens"),
    # Progress.
    Metric("training/epoch", "Passes over the task's training prompts; fractional.", "1"),
    Metric(
        "training/tokens",
        "Prompt and response tokens of the trained batch, padding excluded.",
        "tokens",
    ),
    Metric(
        "training/learned_tokens",
        "Tokens of the assistant in the conversations of the step: those that the loss counts.",
        "tokens",
    ),
    Metric(
        "training/total_tokens",
        "Prompt and response tokens trained on since the first step, padding excluded.",
        "tokens",
    ),
    Metric(
        "training/optimizer_steps",
        "Optimizer steps of the policy applied in this step, skipped ones not counted.",
        "count",
    ),
    Metric(
        "training/nonfinite_skipped",
        "Optimizer steps of this step skipped because a loss or a gradient was NaN or infinite.",
        "count",
    ),
    Metric(
        "training/nonfinite_skipped_total",
        "Optimizer steps skipped for that reason since the first step.",
        "count",
    ),
    Metric(
        "training/empty_skipped",
        "Optimizer steps of this step skipped because no token of their mini-batch counted.",
        "count",
    ),
    Metric("training/empty_skipped_total", "The same since the first step.", "count"),
    Metric("training/overflow_repeated", "Steps made again (--buffer-factor).", "count"),
    # Sampler against trainer.
    Metric(
        "sampling/sampling_logp_difference/mean",
        "Mean over tokens of |log-probability when sampled - the same under the training code|.",
        "nats",
    ),
    Metric(
        "sampling/sampling_logp_difference/max", "Largest of those differences over tokens.", "nats"
    ),
    Metric("sampling/k3_kl", "Mean over tokens of w - 1 - log w, w trainer over sampler.", "nats"),
    Metric(
        "staleness/mean",
        "Mean over tokens of the steps between the policy that sampled it and the one that learns "
        "from it; runs with --max-staleness 0 have none.",
        "steps",
    ),
    Metric("staleness/max", "The largest of them; --max-staleness at most.", "steps"),
    Metric("sampling/drift_alarm", "One where that is above --drift-alarm, else zero.", "0 or 1"),
    Metric(
        "sampling/routing_agreement",
        "Of the first update alone, moe/replay_agreement with what was chosen while sampling.",
        "fraction",
    ),
    *spread(
        "sampling/temperature", "temperature over tokens, where it follows the entropy (HAPO)", "1"
    ),
    # The same before the first update, in the whole policy, where the trainer scores completions
    # then; w is trainer over sampler.
    Metric("rollout_corr/kl", "Mean over tokens of -log w: k1 of KL(sampler, trainer).", "nats"),
    Metric("rollout_corr/k3_kl", "Mean over tokens of w - 1 - log w: k3 of the same.", "nats"),
    Metric(
        "rollout_corr/log_ppl_diff",
        "Log-perplexity under the trainer minus under the sampler, mean over sequences.",
        "nats",
    ),
    Metric("rollout_corr/log_ppl_abs_diff", "Mean over sequences of that size.", "nats"),
    Metric("rollout_corr/chi2_token", "Mean over tokens of w squared, less one.", "1"),
    Metric(
        "rollout_corr/chi2_seq",
        "Mean over sequences of the squared product of their w, less one.",
        "1",
    ),
    Metric(
        "rollout_corr/rollout_is_mean",
        "Mean of the importance weights as the loss gets them, over the tokens that count.",
        "1",
    ),
    Metric("rollout_corr/rollout_is_min", "Smallest of them.", "1"),
    Metric("rollout_corr/rollout_is_max", "Largest of them.", "1"),
    Metric(
        "rollout_corr/rollout_is_eff_sample_size",
        "Effective sample size of those weights, over the tokens that count.",
        "fraction",
    ),
    Metric(
        "rollout_corr/rollout_is_ratio_fraction_high",
        "Share of tokens whose weight was above the greatest allowed, over those that count.",
        "fraction",
    ),
    Metric(
        "rollout_corr/rollout_is_ratio_fraction_low",
        "Share of tokens whose weight was below the least allowed, over those that count.",
        "fraction",
    ),
    Metric(
        "rollout_corr/rollout_rs_masked_fraction",
        "Share of tokens that were rejected, over those sampled.",
        "fraction",
    ),
    Metric(
        "rollout_corr/rollout_rs_seq_masked_fraction",
        "Share of sequences with a rejected token, over those with a token.",
        "fraction",
    ),
    # Dynamic sampling. What is generated are the prompts up to the last that a step's batch needs:
    # those that were begun ahead and turn out to be too many count nowhere.
    Metric("train/num_gen_batches", "Prompts generated for the step, in batches.", "batches"),
    Metric("dynamic_sampling/prompts_generated", "Prompts generated for the step.", "count"),
    Metric("dynamic_sampling/prompts_kept", "Prompts of the batch that count.", "count"),
    Metric(
        "dynamic_sampling/filtered",
        "Share of prompts whose responses all scored alike, over those generated.",
        "fraction",
    ),
    Metric(
        "dynamic_sampling/gave_up",
        "One where --max-generation-rounds batches were not enough to fill this one, else zero.",
        "0 or 1",
    ),
    # Verifier: one count per reason, so that nothing is a silent zero.
    Metric("verifier/*", "Responses whose verdict gave this reason, in this step.", "count"),
    Metric("reward/*", "Mean of this part of the reward, unweighted, where given.", "reward"),
    Metric(
        "conversation/*",
        "Turns of the policy and tokens of the environment, means over conversations; and the "
        "share of them that --max-turns ended.",
        "turns, tokens, fraction",
    ),
    Metric(
        "task/*",
        "Accuracy, mean score and number of completions of one task of a mixture, in this step.",
        "fraction, score, count",
    ),
    Metric(
        "data/prompts_dropped",
        "Prompts left out for having more tokens than --prompt-length, in the whole run.",
        "count",
    ),
    Metric(
        "data/chats_dropped",
        "Conversations left out for having more tokens than --max-length, in the whole run.",
        "count",
    ),
    Metric("data/chats_truncated", "Conversations cut to --max-length, in the whole run.", "count"),
    # Evaluation on held-out prompts.
    Metric("val/reward/*", "As reward, of the sampled held-out responses.", "reward"),
    Metric("val/conversation/*", "As conversation, of sampled held-out responses.", "as of those"),
    Metric("val/task/*", "As task, of held-out responses, sampled and greedy.", "as of task"),
    Metric(
        "val/accuracy/sampled",
        "Share of held-out responses with full marks, sampled as in training, over all samples.",
        "fraction",
    ),
    Metric(
        "val/accuracy/greedy",
        "Share of held-out prompts whose most likely response gets full marks, over prompts.",
        "fraction",
    ),
    Metric(
        "val/pass@k/*",
        "Chance that one of K samples gets full marks (unbiased), mean over held-out prompts.",
        "fraction",
    ),
    Metric(
        "val/nll",
        "Negative log-likelihood of what the assistant says in held-out conversations, mean over "
        "its tokens.",
        "nats",
    ),
    Metric("val/perplexity", "The exponential of val/nll.", "1"),
    Metric(
        "val/token_accuracy",
        "Share of the assistant's tokens in held-out conversations that no other token is likelier "
        "than, over all of them.",
        "fraction",
    ),
    Metric("val/tokens", "Tokens of the assistant in these conversations.", "count"),
    Metric("val/score/sampled", "Mean score of the sampled held-out responses.", "score"),
    Metric("val/score/greedy", "Mean score of the greedy held-out responses.", "score"),
    *spread("val/response_length", "number of tokens over sampled held-out responses", "tokens"),
    Metric(
        "val/response_length/clip_ratio",
        "Share of sampled held-out responses cut at the length limit, over all of them.",
        "fraction",
    ),
    Metric("val/verifier/*", "Sampled held-out responses with this reason.", "count"),
    # Warm start.
    Metric("warm_start/loss", "Cross-entropy of the gold answers, mean over their tokens.", "nats"),
    Metric(
        "warm_start/accuracy",
        "Share of sampled responses with full marks, over training prompts not learned from yet.",
        "fraction",
    ),
    Metric("warm_start/steps", "Supervised steps taken before reinforcement.", "count"),
    *SYSTEM,
)
