"""Attention: the layer, its projections, and the ways to read values, across ``cp`` too."""
