"""Minder (NSDI 2025): denoised distances, in order of what tells most, for minutes on end."""
