"""Chat templates, which are programs of strangers, rendered in a process with limits."""
