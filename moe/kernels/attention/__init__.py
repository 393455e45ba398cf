"""FlashAttention kernels for training on Hopper, forward and backward, for packed rows with causal,
segment and sliding-window masks."""
