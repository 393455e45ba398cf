"""Logical axis rules: from the named axes of a weight to its PartitionSpec."""

from collections.abc import Mapping

from jax.sharding import PartitionSpec

from sharding.folding import FoldedMesh

Rules = Mapping[str, tuple[str, ...]]


def weight_rules(mesh: FoldedMesh) -> Rules:
    """Mesh axes over which each named axis of a weight is sharded; other axes are replicated.

    Layers are sharded over ``pp``; heads, the hidden units of dense layers and the vocabulary, rows
    of the embedding and columns of the head, over ``tp``; experts over ``ep`` and the hidden units
    of each over ``etp``.
    """
    return {
        "layer": mesh.pp,
        "attention_layer": mesh.pp,
        "delta_layer": mesh.pp,
        "head": mesh.tp,
        "kv_head": mesh.tp,
        "delta_key_head": mesh.tp,
        "delta_value_head": mesh.tp,
        "d_ff": mesh.tp,
        "dense_d_ff": mesh.tp,
        "vocab": mesh.tp,
        "expert": mesh.ep,
        "d_expert": mesh.etp,
    }


def partition_spec(axes: str, rules: Rules) -> PartitionSpec:
    """The PartitionSpec of a weight whose axes are `axes`, for example ``"expert d_model d_ff"``.

    Raises:
      ValueError: when two axes of the weight would be sharded over the same mesh axis.
    """
    owner: dict[str, str] = {}
    entries = []
    for axis in axes.split():
        atoms = rules.get(axis, ())
        for atom in atoms:
            if atom in owner:
                raise ValueError(
                    f"rules map both {owner[atom]!r} and {axis!r} of weight {axes!r} "
                    f"to mesh axis {atom!r}; a mesh axis can shard only one of them."
                )
            owner[atom] = axis
        entries.append(atoms or None)
    return PartitionSpec(*entries)
