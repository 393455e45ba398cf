"""Attention: the layer, its projections, core attention in several implementations, and context
parallelism."""
