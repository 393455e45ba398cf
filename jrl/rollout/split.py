"""Policy of attention-expert disaggregation: the meshes of both device groups, and the transfer of
the weights to them."""

from collections.abc import Sequence
from weakref import ref

import jax
from jaxtyping import Array

from jrl.rollout.resharding import reshard
from moe import placement
from moe.adapters.trees import has_adapters
from moe.config import ModelConfig
from moe.disaggregated.placement import Placement
from moe.disaggregated.split import Split, SplitMesh, devices_of, fold_split
from moe.disaggregated.weights import SplitWeights, move_experts, split_weights
from moe.weights import Transformer, axis_sizes
from sharding.folding import FoldedMesh


def split_mesh(text: str, num_devices: int | None, training: FoldedMesh) -> SplitMesh:
    """Meshes of the attention and expert device groups.

    Args:
      text: the split, as `moe.disaggregated.split.Split.parse` reads it.
      num_devices: of devices after those of training, in this process; None is those of training,
        time-shared (colocated).

    Raises:
      ValueError: for a split of another number of devices, or of more than there are, and for
        separate devices in a run of multiple processes.
    """
    split = Split.parse(text)
    learning = devices_of(training)
    if num_devices is None:
        if split.num_devices != len(learning):
            raise ValueError(
                f"rollout_split={text!r} has {split.num_devices} devices and the layout of "
                f"training {len(learning)}: choose sizes whose sum is that, or give "
                f"--rollout-devices {split.num_devices} to use other devices."
            )
        return fold_split(split, learning)
    if jax.process_count() > 1:
        raise ValueError(
            f"rollout_devices={num_devices} are devices of one process, and the run has "
            f"{jax.process_count()}: leave it out to alternate sampling and training."
        )
    if split.num_devices != num_devices:
        raise ValueError(
            f"rollout_split={text!r} has {split.num_devices} devices and rollout_devices="
            f"{num_devices}: make them the same."
        )
    devices = jax.devices()
    if len(devices) < len(learning) + num_devices:
        raise ValueError(
            f"rollout_devices={num_devices} and the {len(learning)} of training are "
            f"{len(learning) + num_devices} devices and there are {len(devices)}: choose fewer, "
            f"or --devices {len(learning) + num_devices} to have as many fake ones on a CPU."
        )
    return fold_split(split, devices[len(learning) : len(learning) + num_devices])


class SplitPolicy:
    """Copy of the policy on both device groups, updated once per change. Each device receives its
    weights (`moe.disaggregated.weights.split_weights`) with equal bits; adapters are merged first.

    Args:
      config: the policy network.
      training: the mesh of the weights that `sync` receives.
      mesh: of both device groups.
      experts: expert placement of each layer with experts.
    """

    def __init__(
        self,
        config: ModelConfig,
        training: FoldedMesh,
        mesh: SplitMesh,
        experts: Sequence[Placement],
    ):
        self._config, self._training, self._mesh = config, training, mesh
        self._placement = experts
        self._source: ref[Transformer[Array]] | None = None
        self._split_weights: SplitWeights[Array] | None = None

    def sync(self, weights: Transformer[Array]) -> SplitWeights[Array]:
        """Policy `weights` of the training mesh, on both device groups."""
        source = None if self._source is None else self._source()
        if self._split_weights is None or source is not weights:
            self.release()  # old and new need not fit in memory together
            training, config, policy = self._training, self._config, weights
            if has_adapters(policy):
                # Merged on the training mesh, so that only the merged weights are moved.
                training = placement.without_chunks(config, training)
                policy = reshard(policy, config, self._training, training)
            config = config.without_adapters()
            layers = axis_sizes(config)["layer"]
            in_order = placement.in_layer_order(policy, training, layers)
            split = split_weights(in_order, config, self._mesh, self._placement)
            # Blocks: updates donate the buffers that are being read.
            jax.block_until_ready(split)
            self._split_weights, self._source = split, ref(weights)
        return self._split_weights

    @property
    def current(self) -> SplitWeights[Array]:
        """Latest policy on the device groups."""
        assert self._split_weights is not None, "no weights were pushed"
        return self._split_weights

    def move_experts(self, experts: Sequence[Placement]) -> None:
        """Changes the expert placement; stored weights move between the devices that hold them."""
        if self._split_weights is not None:
            self._split_weights = move_experts(
                self._split_weights, self._mesh, self._placement, experts
            )
        self._placement = experts

    def release(self) -> None:
        """Frees the memory of the weights on both device groups."""
        self._source = self._split_weights = None
