"""Minder (NSDI 2025): denoised distances between machines, metrics by priority, continuity."""
