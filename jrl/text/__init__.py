"""Text to tokens and back: tokenizers, chat templates, prompts as arrays."""
