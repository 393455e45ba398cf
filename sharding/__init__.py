"""Sharding of arrays: a parallel layout of the devices, and the mesh folded from it."""

from sharding.folding import FoldedMesh, Layout, fold, fold_abstract

__all__ = ["FoldedMesh", "Layout", "fold", "fold_abstract"]
