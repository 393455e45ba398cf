"""Continuous batching: decoding slots that are refilled; requests in, trajectories out."""
