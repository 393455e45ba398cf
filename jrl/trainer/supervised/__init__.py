"""Supervised fine-tuning (SFT): rows of conversations, the training step, held-out loss."""
