"""Where prompts come from, and how a completion is scored."""
