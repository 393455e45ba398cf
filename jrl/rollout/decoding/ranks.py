"""Number of ranks that rows are sharded over in decoding, and its divisibility checks."""

from sharding.folding import FoldedMesh


def ranks(mesh: FoldedMesh) -> int:
    """Number of ranks, dp x tp, that must divide the rows to decode."""
    return mesh.size((*mesh.dp, *mesh.tp))


def check_slots(mesh: FoldedMesh, slots: int) -> None:
    """Checks that slots can decode on a mesh.

    Raises:
      ValueError: on pipeline stages, or where the slots do not divide over the ranks.
    """
    if mesh.layout.pp > 1:
        raise ValueError(
            f"layout {mesh.layout} cannot decode: every device needs all layers, so pp must be 1; "
            "decode on a separate layout."
        )
    if slots < 1 or slots % ranks(mesh):
        raise ValueError(
            f"slots={slots} must be a multiple of dp x tp = {ranks(mesh)} of layout {mesh.layout}."
        )
