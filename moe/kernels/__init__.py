"""Kernels for GPUs, each with a reference implementation in plain JAX. Nothing outside
this package imports Pallas.

Ours are written for Pallas' Mosaic GPU back end (Hopper and later): its Triton back end is
deprecated since jax 0.11, lowers arrays of a power of two only and from 0.12 on needs a GPU to be
lowered at all. A *program* is what Pallas calls so: one thread block of the grid.

Kernels that multiply (`grouped`, `attention`, `decode_attention`, `latent_decode`) use Hopper's
matrix units (wgmma) and run on Hopper alone; those that move rows, sort expert ids and score
experts (`rows`, `layout`, `routing`) need nothing that later GPUs lack. A kernel that is requested
by name raises on operands and devices that it does not support; there is no silent fallback. In a
function of this package, None is the reference implementation, which XLA compiles for any device;
`moe.implementations` names a kernel if a network's settings leave the choice open and the kernel
was measured to be faster.
"""
