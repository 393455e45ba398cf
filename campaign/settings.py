"""The fixed parts of a run, made of a crossing as a command line would make them; and those of the
run that it is compared with, on one device with everything off."""

from dataclasses import fields, replace
from typing import Any
from unittest import mock

from small_runs import largest

from campaign.drawing import Crossing
from jrl.config.run import RunConfig
from jrl.recipes import RECIPES
from jrl.recipes.base.recipe import Recipe
from jrl.text.tokenizer import Tokenizer
from jrl.trainer.setup import setup as setups
from jrl.trainer.setup.setup import Setup
from moe.architecture.attention import GatedDeltaNet, MultiHeadLatentAttention
from moe.architecture.feed_forward import ClampedSwiGLU
from moe.architecture.rope import LinearScaling, YarnScaling
from moe.config import ModelConfig
from moe.execution import Execution
from sharding.folding import Layout

WARM_START = "warm start"
"""In the place of a recipe: supervised learning alone."""
ROWS = 16
"""Completions of a step where a crossing says nothing: two for every device."""
OF_VALUES = (
    *("dtype", "mu_dtype", "prompt_length", "response_length", "seed"),
    *("lora_rank", "lora_alpha", "lora_targets", "lora_rank_stabilised"),
)
"""Fields of the run that say what is computed; all others say how."""
RUN = {"task": "largest", "steps": 1, "prompt_length": 8, "response_length": 8}
MODEL = {
    "vocab_size": 12,
    "num_layers": 2,
    "d_model": 12,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 6,
    "num_experts": 0,
    "d_expert": 8,
}


def setup_of(crossing: Crossing) -> Setup:
    """What `python -m jrl.train` makes of such settings, its checks included.

    Raises:
      ValueError: for what cannot be had.
    """
    layout = Layout(**crossing.get("layout", {}))
    run = RunConfig(layout=str(layout), **_run(crossing))
    return _built(crossing, run, _recipe(crossing))


def one_device(crossing: Crossing) -> Setup:
    """The same on one device with everything off: what the network is, the recipe and the sizes
    of the batch stay."""
    given = {name: value for name, value in _run(crossing).items() if name in (*RUN, *OF_VALUES)}
    # The defaults of `Execution` and not those of a run: nothing is chosen for a machine.
    defaults = {field.name: field.default for field in fields(Execution)}
    own = {"attention": "plain", "context": "gather", "vocab_chunk": None}
    model = model_of(crossing)
    # Many layers are compiled as one.
    own["scan_layers"] = model.num_layers > 2 and model.delta is None
    run = RunConfig(**given, **{**defaults, **own}, packing=False)
    recipe = _recipe(crossing)
    return _built(crossing, run, replace(recipe, micro_batch=recipe.mini_batch_size))


def is_warm_start(crossing: Crossing) -> bool:
    return crossing.get("recipe", {}).get("name") == WARM_START


def _run(crossing: Crossing) -> dict[str, Any]:
    given = {**RUN, **crossing.get("run", {})}
    if is_warm_start(crossing):
        given["steps"] = 0
    return given


def _recipe(crossing: Crossing) -> Recipe:
    given = {"group_size": 2, "learning_rate": 1e-2, **crossing.get("recipe", {})}
    name = given.pop("name", "grpo")
    given.setdefault("prompts", ROWS // given["group_size"])
    given["mini_batch"] = given["prompts"] * given["group_size"]
    given.setdefault("micro_batch", given["mini_batch"])
    kind = RECIPES["grpo" if name == WARM_START else name]
    if kind.uses_critic:
        given |= {"pretrain_critic": 0}
    if name == "tppo":
        given |= {"window": 3}
    return kind(**given)


def model_of(crossing: Crossing) -> ModelConfig:
    given = {**MODEL, **crossing.get("model", {})}
    if not given["num_experts"]:
        given.setdefault("d_ff", 16)
    if given.get("num_dense_layers"):
        given.setdefault("dense_d_ff", 16)
    if (latent := given.get("mla")) is not None:
        given["mla"] = MultiHeadLatentAttention(*latent)
        given["num_kv_heads"] = given["num_heads"]
    if (linear := given.get("delta")) is not None:
        layers, keys, values, *widths = linear
        given["delta"] = GatedDeltaNet(tuple(layers), keys, values, *(widths or (5, 6, 3)))
    if (scaling := given.get("rope_scaling")) is not None:
        kind, *numbers = scaling
        given["rope_scaling"] = {"linear": LinearScaling, "yarn": YarnScaling}[kind](*numbers)
    if isinstance(clamped := given.get("activation"), list):
        given["activation"] = ClampedSwiGLU(*clamped[1:])
    for name in ("nope_layers", "full_attention_layers"):
        if name in given:
            given[name] = tuple(given[name])
    return ModelConfig(**given)


def _built(crossing: Crossing, run: RunConfig, recipe: Recipe) -> Setup:
    model = model_of(crossing)
    # Four ids are special.
    tokenizer = Tokenizer.train_characters("=012345678"[: model.vocab_size - 4])
    # The task is part of this process: a user's own has processes, which take longer to start than
    # all that is compared here.
    with mock.patch.object(setups, "load_task", lambda name, seed, *_, **__: largest(seed)):
        return setups.build_setup(run, recipe, tokenizer, model)
