"""Architecture options of `moe.config.ModelConfig`, and the checks of which of them may be
combined."""
