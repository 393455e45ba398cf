"""Builder of engines, for training, evaluation and serving."""

from jaxtyping import Array

from jrl.rollout.decoding.engine import Backend, Engine
from jrl.rollout.decoding.mesh_backend import MeshBackend
from jrl.rollout.decoding.scheduling.sizes import ROLLOUTS, EnginePolicy
from jrl.rollout.decoding.slots import Decoder
from jrl.rollout.decoding.split_backend import DeviceSplit, SplitBackend
from jrl.text.tokenizer import Tokenizer
from moe.config import ModelConfig
from sharding.folding import FoldedMesh


def build_engine(
    model: ModelConfig,
    tokenizer: Tokenizer,
    mesh: FoldedMesh,
    devices: FoldedMesh | DeviceSplit,
    *,
    slots: int,
    max_length: int,
    key: Array,
    policy: EnginePolicy = ROLLOUTS,
    records_choices: bool = False,
    top_logprobs: int = 0,
) -> Engine:
    """Builds an engine, without weights.

        engine = build_engine(
            model, tokenizer, mesh, mesh, slots=64, max_length=512, key=jax.random.key(0)
        )
        engine.load(weights, version=0)

    Args:
      model: the policy network.
      tokenizer: has the ids of padding and of the ends of a response.
      mesh: mesh of the weights that are loaded.
      devices: mesh that decodes, or device groups of attention and experts.
      slots, max_length, key, policy: as for `Engine`.
      records_choices, top_logprobs: as for `Decoder`.

    Raises:
      ValueError: for slots that do not divide over the devices.
    """
    is_split = isinstance(devices, DeviceSplit)
    decoder = Decoder(
        model,
        devices.mesh.attention if is_split else devices,
        tokenizer.pad_id,
        tokenizer.stop_ids,
        records_choices,
        top_logprobs,
    )
    if is_split:
        backend: Backend = SplitBackend(decoder, mesh, devices, restarts=policy.reproducible)
    else:
        backend = MeshBackend(decoder, mesh)
    return Engine(backend, slots=slots, max_length=max_length, key=key, policy=policy)
