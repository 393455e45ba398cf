"""Grouped GEMM, rows times the matrix of their expert: one file for each implementation."""
