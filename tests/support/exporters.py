"""Answers of Prometheus exporters of five hosts; one host can be slow."""

import numpy as np

HOSTS = tuple(f"10.0.0.{number}" for number in range(1, 6))
METRICS = {
    "DCGM_FI_DEV_GPU_UTIL": (95.0, {"gpu": "0", "modelName": "NVIDIA H100"}),
    "DCGM_FI_DEV_POWER_USAGE": (650.0, {"gpu": "0", "modelName": "NVIDIA H100"}),
    "node_network_receive_bytes_total": (2e9, {"device": "eth0"}),
}


def sample(name, host, at, slow=None, since=0.0):
    """Values of an exporter at a Unix time: levels with noise, counters that increase."""
    level = METRICS[name][0]
    if name.endswith("_total"):
        return level * (at % 100_000)
    noise = np.random.default_rng([int(at), HOSTS.index(host), len(name)]).normal(1, 0.02)
    return level * noise * (0.7 if host == slow and at > since else 1.0)
