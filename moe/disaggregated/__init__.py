"""Serving a mixture with attention and experts on disjoint devices."""
