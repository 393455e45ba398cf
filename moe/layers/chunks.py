"""Split of layers into the model chunks of a pipeline, and their positions in storage.

The layers after the leading dense ones are split into ``pp x vpp`` chunks that differ by one layer
at most. Shards of an array have equal size: all chunks are stored with the depth of the deepest,
and the others end with a layer of zeros that never runs.
"""

from collections.abc import Sequence

from sharding.folding import FoldedMesh


def layers_per_chunk(num_layers: int, mesh: FoldedMesh) -> tuple[int, ...]:
    """Number of layers of each model chunk, from the first to the last.

    The shallower chunks are at both ends, half of them at each, as embedding and head are there.

    Raises:
      ValueError: if a chunk would have no layer.
    """
    chunks = mesh.layout.pp * mesh.layout.vpp
    if num_layers < chunks:
        raise ValueError(
            f"num_layers={num_layers} cannot be split into {mesh.layout.pp} pipeline stages x "
            f"{mesh.layout.vpp} chunks (layout {mesh.layout}) of at least one layer: choose pp x "
            "vpp of at most num_layers."
        )
    depth = stored_depth(num_layers, mesh)
    shallow = chunks * depth - num_layers
    first, last = shallow // 2, chunks - (shallow - shallow // 2)
    return tuple(depth if first <= chunk < last else depth - 1 for chunk in range(chunks))


def stored_depth(num_layers: int, mesh: FoldedMesh) -> int:
    """Number of layers that each model chunk is stored with, padding included."""
    return -(-num_layers // (mesh.layout.pp * mesh.layout.vpp))


def is_even(num_layers: int, mesh: FoldedMesh) -> bool:
    """True if all chunks have the same number of layers."""
    return num_layers % (mesh.layout.pp * mesh.layout.vpp) == 0


def check_delta_layers(num_layers: int, delta_layers: Sequence[int], mesh: FoldedMesh) -> None:
    """Checks that a layout supports layers with Gated DeltaNet, which needs whole sequences and,
    as all pipeline stages run one program, chunks with the same layer types.

    Raises:
      ValueError: if ``cp`` splits sequences, or chunks differ in which of their layers have it.
    """
    num_chunks = mesh.layout.pp * mesh.layout.vpp
    if delta_layers and mesh.layout.cp > 1:
        raise ValueError(
            f"layout {mesh.layout}: Gated DeltaNet needs full sequences, which cp splits: "
            "choose a layout with cp=1."
        )
    if not delta_layers or num_chunks == 1:
        return
    depth = -(-num_layers // num_chunks)
    delta_positions = {layer % depth for layer in delta_layers}
    expected = [layer for layer in range(num_layers) if layer % depth in delta_positions]
    if num_layers % num_chunks or list(delta_layers) != expected:
        raise ValueError(
            f"layout {mesh.layout} splits num_layers={num_layers} into {num_chunks} chunks with "
            f"different layer types (Gated DeltaNet: {tuple(delta_layers)}): choose pp and vpp so "
            "that all chunks have the same, for example pp=1."
        )


def first_layers_of_chunks(num_layers: int, mesh: FoldedMesh) -> tuple[int, ...]:
    """Index of the first layer of each model chunk."""
    depths = layers_per_chunk(num_layers, mesh)
    return tuple(sum(depths[:chunk]) for chunk in range(len(depths)))


def storage_indices(num_layers: int, mesh: FoldedMesh) -> Sequence[int]:
    """Storage index of each layer, among ``pp x vpp x stored_depth``."""
    depth = stored_depth(num_layers, mesh)
    return [
        chunk * depth + layer
        for chunk, depth_of_chunk in enumerate(layers_per_chunk(num_layers, mesh))
        for layer in range(depth_of_chunk)
    ]
