"""What rows of tokens are gone on with: buffers, and what a step reads and writes of them."""
