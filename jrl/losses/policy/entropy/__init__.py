"""HAPO: advantages and bounds by the entropy of each token."""
