"""Tokenizers, chat templates, and prompts as token arrays."""
