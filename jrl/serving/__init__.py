"""A policy behind OpenAI's protocol."""
