"""Attention/expert (AF) disaggregation: serving MoE with attention and experts on disjoint
devices."""
