"""Decoding with attention-expert disaggregation: the differences from decoding on one mesh."""
