"""Decoding slots that are kept full: requests in, trajectories out."""
