"""Calls of the corrections for a sampler that is not the trainer, for the contract of arrays."""

# One result per token, of which each row depends on that row alone.
PER_TOKEN = {}
# One result per token that depends on the whole batch.
PER_BATCH = {}
# One result per batch.
SCALAR = {}
