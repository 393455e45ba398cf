"""Core attention by fused kernels, and what they lack made of what they have."""
