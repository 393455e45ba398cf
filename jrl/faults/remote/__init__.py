"""Samples of machines over the network: exporters, their names and devices, Prometheus."""
