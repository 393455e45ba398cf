"""Kernels for GPUs, each beside its plain twin. Nothing outside this room imports Pallas.

They are written for Pallas' Mosaic GPU back end (Hopper and later): its Triton back end is
deprecated since jax 0.11, lowers arrays of a power of two only and from 0.12 on needs a GPU to be
lowered at all.
"""
