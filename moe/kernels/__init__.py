"""Kernels for GPUs, each beside its plain twin. Nothing outside this room imports Pallas.

They are written for Pallas' Mosaic GPU back end (Hopper and later): its Triton back end is
deprecated since jax 0.11, lowers arrays of a power of two only and from 0.12 on needs a GPU to be
lowered at all.

What multiplies (`grouped`, `swiglu`, `slices`, `decode_attention`) has Hopper's matrix units in it
and serves Hopper alone; what moves rows, sorts choices and scores experts (`rows`, `permute`,
`layout`, `routing`) asks for nothing that later GPUs lack. A kernel that is asked for by name is
refused on earlier GPUs, on TPUs and on CPUs, and nothing takes its place in silence. None is the
plain twin everywhere, which XLA compiles for any device.
"""
