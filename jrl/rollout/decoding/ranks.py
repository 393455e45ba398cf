"""Ranks that share the rows to decode, and what must divide over them."""

from sharding.folding import FoldedMesh


def ranks(mesh: FoldedMesh) -> int:
    """Ranks that share the rows to decode, which must divide over them."""
    return mesh.size((*mesh.dp, *mesh.tp))


def check_slots(mesh: FoldedMesh, slots: int) -> None:
    """Refuses what cannot decode on a mesh.

    Raises:
      ValueError: on stages of a pipeline, or where the slots cannot be shared out.
    """
    if mesh.layout.pp > 1:
        raise ValueError(
            f"layout {mesh.layout} cannot decode: every device needs all layers, so pp must be 1; "
            "decode on a layout of its own."
        )
    if slots < 1 or slots % ranks(mesh):
        raise ValueError(
            f"slots={slots} must be a multiple of dp x tp = {ranks(mesh)} of layout {mesh.layout}."
        )
