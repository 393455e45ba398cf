"""The architectures of `transformers` that can be read and written."""
