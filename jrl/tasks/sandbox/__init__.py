"""Sandbox for Python code that a policy wrote: bubblewrap, limits, and a seccomp filter."""
