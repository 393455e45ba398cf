"""Prometheus metrics of a server."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
INTER_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
CLIENT_GONE = "gone"
"""The status of a request whose client left before its end."""


class Metrics:
    """Metrics of one server.

    Args:
      slots: choices that are decoded concurrently.
    """

    def __init__(self, slots: int):
        self._registry = registry = CollectorRegistry()
        self.requests = Counter(
            "jrl_requests",
            f"Finished requests, by HTTP status; {CLIENT_GONE} if the client disconnected.",
            ("endpoint", "status"),
            registry=registry,
        )
        self.choices = Counter(
            "jrl_choices",
            "Finished choices, by finish reason: stop, length, or gone.",
            ("finish",),
            registry=registry,
        )
        self.queued = Gauge("jrl_queue_length", "Choices that wait for a slot.", registry=registry)
        self.live = Gauge("jrl_slots_live", "Active slots.", registry=registry)
        self.slots = Gauge(
            "jrl_slots", ("Number of slots: choices decoded concurrently."), registry=registry
        )
        self.slots.set(slots)
        self.version = Gauge(
            "jrl_policy_version", "Training step of the served policy.", registry=registry
        )
        self.uncompiled = Gauge(
            "jrl_uncompiled",
            "Remaining warm-up requests, which compile programs while the server is idle.",
            registry=registry,
        )
        self.loads = Counter(
            "jrl_policy_loads",
            "Loads of later policy versions, by outcome.",
            ("outcome",),
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "jrl_prompt_tokens", "Prompt tokens of admitted requests.", registry=registry
        )
        self.generated_tokens = Counter(
            "jrl_generated_tokens",
            ("Sampled tokens, up to the end of each choice."),
            registry=registry,
        )
        self.first_token = Histogram(
            "jrl_time_to_first_token_seconds",
            "Time from a request's arrival to the first token of each of its choices.",
            buckets=FIRST_TOKEN_BUCKETS,
            registry=registry,
        )
        self.between_tokens = Histogram(
            "jrl_time_between_tokens_seconds",
            "Time between tokens of a choice after its first, mean over the tokens of a streamed "
            "chunk.",
            buckets=INTER_TOKEN_BUCKETS,
            registry=registry,
        )

    def text(self) -> bytes:
        """All metrics in Prometheus's text format."""
        return generate_latest(self._registry)
