"""KV cache: its buffers, and the reads and writes of a decode step."""
