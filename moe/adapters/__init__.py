"""Low-rank adapters (LoRA): what is learned beside weights that stay as they are."""
