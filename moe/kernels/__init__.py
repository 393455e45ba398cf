"""Kernels for GPUs and TPUs, each beside its plain twin. Nothing outside this room imports Pallas.

Ours are written for Pallas' Mosaic GPU back end (Hopper and later): its Triton back end is
deprecated since jax 0.11, lowers arrays of a power of two only and from 0.12 on needs a GPU to be
lowered at all. On TPUs there is JAX's own grouped product (`megablox`).

What multiplies (`grouped`, `swiglu`, `slices`, `attention`, `decode_attention`, `latent_decode`)
has Hopper's matrix units in it and serves Hopper alone; what moves rows, sorts choices and scores
experts (`rows`, `permute`, `layout`, `routing`) asks for nothing that later GPUs lack. A kernel
that is asked for by name is refused on what it is not written for, and nothing takes its place in
silence. None chooses no kernel of this room: what it takes is compiled by XLA, for any device, or
is cuDNN's attention.
"""
