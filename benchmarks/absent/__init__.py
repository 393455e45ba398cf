"""Compilation for accelerators that this machine does not have, by their real compilers.

XLA's GPU compiler, Mosaic GPU and NVIDIA's assembler need no GPU, and the TPU compiler needs no
TPU; all are wheels (`pip install -e ".[absent]"`, Python 3.12). What they say is exact: memory, the
machine code of each kernel, the schedule. Only a chip shows times, and the numerics of its units.
"""
