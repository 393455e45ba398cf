"""Parallel folding: a layout of the devices, and the mesh folded from it.

Attention sees the devices as ``pp x dp x cp x tp`` and the experts see *the same devices* as
``pp x edp x ep x etp``. Both are names over one set of atomic mesh axes: a logical axis is a tuple
of atoms, and a collective takes the tuple. Going from attention to experts therefore moves nothing.

``python -m sharding.folding "tp2 cp2 dp2 pp2 / ep4"`` prints the ranks of each group.
"""

from sharding.folding.layout import ATTENTION, EXPERT, Layout
from sharding.folding.mesh import FoldedMesh, fold, fold_abstract

__all__ = ["ATTENTION", "EXPERT", "FoldedMesh", "Layout", "fold", "fold_abstract"]
