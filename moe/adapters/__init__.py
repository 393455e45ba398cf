"""Low-rank adapters (LoRA): trained matrices added to frozen base weights."""
