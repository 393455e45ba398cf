"""Prometheus metrics of a server."""

from functools import partial
from typing import Any

FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
INTER_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
CLIENT_GONE = "gone"
"""Status of a request whose client left before its end."""


class Metrics:
    """Prometheus metrics of one server, which decodes choices in this number of slots."""

    def __init__(self, slots: int):
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self._registry = registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self.requests = counter(
            "jrl_requests",
            f"Finished requests, by HTTP status; {CLIENT_GONE} if the client disconnected.",
            ("endpoint", "status"),
        )
        self.choices = counter(
            "jrl_choices", "Finished choices, by finish reason: stop, length, or gone.", ("finish",)
        )
        self.queued = gauge("jrl_queue_length", "Choices that wait for a slot.")
        self.live = gauge("jrl_slots_live", "Active slots.")
        self.slots = gauge("jrl_slots", "Number of slots: choices decoded concurrently.")
        self.slots.set(slots)
        self.version = gauge("jrl_policy_version", "Training step of the served policy.")
        self.uncompiled = gauge(
            "jrl_uncompiled",
            "Remaining warm-up requests, which compile programs while the server is idle.",
        )
        self.loads = counter(
            "jrl_policy_loads", "Loads of later policy versions, by outcome.", ("outcome",)
        )
        self.prompt_tokens = counter("jrl_prompt_tokens", "Prompt tokens of admitted requests.")
        self.cached_tokens = counter(
            "jrl_cached_prompt_tokens", "Prompt tokens from the prefix cache."
        )
        self.generated_tokens = counter(
            "jrl_generated_tokens", "Sampled tokens, up to the end of each choice."
        )
        self.first_token = histogram(
            "jrl_time_to_first_token_seconds",
            "Time from a request's arrival to the first token of each of its choices.",
            buckets=FIRST_TOKEN_BUCKETS,
        )
        self.between_tokens = histogram(
            "jrl_time_between_tokens_seconds",
            "Time between tokens of a choice after its first, mean over the tokens of a streamed "
            "chunk.",
            buckets=INTER_TOKEN_BUCKETS,
        )

    def text(self) -> bytes:
        """All metrics in Prometheus's text format."""
        from prometheus_client import generate_latest

        return generate_latest(self._registry)


class NoMetrics:
    """Metrics of a service that reports none: any of them, and any use of one, is this."""

    def __getattr__(self, name: str) -> "NoMetrics":
        return self

    def __call__(self, *values: Any) -> "NoMetrics":
        return self
