"""From a group: each response against the others that answer the same prompt."""
