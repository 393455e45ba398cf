"""Monitoring of a run for reward hacking while it trains."""
