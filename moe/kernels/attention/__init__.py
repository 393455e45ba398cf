"""FlashAttention for training on Hopper, forward and backward, of rows with any mask of marks."""
