"""Scheduling of decoding on the host: slots, sizes of programs, and the prefix cache."""
