"""What metrics mean that tell of the network's work, of the clock and of machines: a part of
`jrl.report.metric_table`."""

from jrl.report.metric import Metric

SYSTEM: tuple[Metric, ...] = (
    # Mixture of experts. Load is an expert's share of the routed tokens times the number of
    # experts: one is even, zero is an expert without work.
    Metric("moe/max_load", "Load of the busiest expert, mean over layers; one is even.", "1"),
    Metric("moe/min_load", "Load of the idlest expert, mean over layers; one is even.", "1"),
    Metric(
        "moe/load_balancing_loss",
        "Load-balancing loss before its weight, mean over layers; one is even.",
        "1",
    ),
    Metric("moe/z_loss", "Router z-loss before its weight, mean over layers and tokens.", "1"),
    Metric(
        "moe/router_entropy",
        "Entropy of the router's distribution, mean over layers and real tokens.",
        "nats",
    ),
    Metric(
        "moe/dropped_fraction",
        "Share of (token, expert) choices beyond an expert's capacity, over all choices.",
        "fraction",
    ),
    Metric("moe/overflow", "Choices that their first attempt had no room for.", "count"),
    Metric(
        "moe/padded_fraction",
        "Share of padding among the places that the network runs, prompts that are shared once.",
        "fraction",
    ),
    Metric(
        "moe/replay_agreement",
        "Share of the experts replayed that the router would choose, over tokens and layers.",
        "fraction",
    ),
    # Time: the only metrics that may differ between two runs of one seed.
    Metric(
        "perf/tokens_per_second",
        "Prompt and response tokens of the step over its wall time, all devices together.",
        "tokens/s",
    ),
    Metric("perf/throughput", "The same for each device.", "tokens/s"),
    Metric(
        "perf/time_per_step",
        "Wall time of the step, evaluation and checkpoint left out.",
        "seconds",
    ),
    Metric("perf/total_num_tokens", "Prompt and response tokens of the step.", "tokens"),
    Metric("perf/slot_utilisation", "Tokens sampled over slots that were computed.", "fraction"),
    Metric("perf/decode_steps", "Steps of decoding, each a token for every live row.", "count"),
    Metric("perf/sampled_tokens", "Tokens sampled, those of dropped groups too.", "tokens"),
    Metric("perf/*", "Other speeds and memory, named as in verl.", "as named"),
    Metric("timing_s/gen", "Wall time of decoding completions.", "seconds"),
    Metric("timing_s/reward", "Wall time of waiting for their verdicts.", "seconds"),
    Metric("timing_s/values", "Wall time of the critic's values of all completions.", "seconds"),
    Metric("timing_s/ref", "Wall time of scoring them by the reference policy.", "seconds"),
    Metric("timing_s/old_log_prob", "Wall time of scoring them by the policy itself.", "seconds"),
    Metric("timing_s/adv", "Wall time of rewards, advantages and corrections.", "seconds"),
    Metric("timing_s/update_actor", "Wall time of the policy's optimizer steps.", "seconds"),
    Metric("timing_s/update_critic", "Wall time of the critic's optimizer steps.", "seconds"),
    Metric("timing_s/testing", "Wall time of an evaluation, on top of the step's.", "seconds"),
    Metric(
        "timing_s/wait_for_rollout",
        "Wall time for which a step that had learned waited for the sampler.",
        "seconds",
    ),
    Metric("timing_s/*", "Wall time of another phase of the step.", "seconds"),
    Metric("timing_per_token_ms/*", "Wall time of one phase over its tokens.", "milliseconds"),
    # On the line of the step at which somebody was named; runs without an alarm have none of these.
    Metric("faults/alarm/*", "When a machine (and a metric) began to stand out.", "Unix seconds"),
)
