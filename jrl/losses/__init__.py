"""Objectives as functions on arrays. Everything here needs jax and nothing else."""
