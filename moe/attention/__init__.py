"""Attention: the layer, its projections, implementations of core attention, and context
parallelism."""
