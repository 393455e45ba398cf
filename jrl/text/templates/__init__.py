"""Chat templates, which are untrusted programs, rendered in a process with limits."""
