"""Crossings drawn by a seed.

A crossing is what differs from the defaults, as JSON: ``{"layout": {"tp": 2}, "model": {...},
"run": {...}, "recipe": {"name": "vapo", ...}, "decode": true}``. The sections have the fields of
`sharding.Layout`, `moe.config.ModelConfig`, `jrl.config.run.RunConfig` and of the recipe; what they
leave out is as `settings` has it. Nothing here knows JAX.
"""

from random import Random
from typing import Any

Crossing = dict[str, Any]

SAME_NETWORK = 4
"""Crossings in a row that share network, recipe and batch, and so what one device says of them."""


def drawn(seed: int, number: int) -> Crossing:
    """The crossing of that number. Most can be had; what cannot is to be refused."""
    shared, own = Random(f"{seed} network {number // SAME_NETWORK}"), Random(f"{seed} {number}")
    model, of_run = network(shared)
    recipe, sizes = algorithm(shared, model)
    layout = devices(own, model)
    recipe |= batches(own, recipe, layout)
    run = {**of_run, **sizes, **execution(own, model, layout), **rollout(own, model, layout)}
    rows = recipe.get("micro_batch", 16) // layout["dp"]
    if own.random() < (0.3 if rows >= 2 * recipe["group_size"] else 0.02):
        run["two_batch_overlap"] = True
    if run.keys() & {"activation_wire", "dtype"}:
        recipe = _smooth(recipe, model)
    crossing = {
        "layout": {axis: size for axis, size in layout.items() if size > 1},
        "model": model,
        "run": run,
        "recipe": recipe,
    }
    if "capacity_factor" in model and layout["dp"] > 1:
        # What an expert drops is decided in each rank's micro-batch, and the loss compares with the
        # load of those of all ranks: no micro-batches of one device are both.
        model.pop("global_balance_coef", None)
    compares = model.get("batch_balance_coef") or model.get("global_balance_coef")
    if compares and (recipe["name"] == "tppo" or "packing" in run):
        # Packed micro-batches have other rows, and so loads that the losses compare with.
        run["packing"] = False
    if own.random() < 0.3:
        crossing["decode"] = True
    return crossing


def _smooth(recipe: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    """A recipe under which what is rounded to few digits stays near: no token is clipped on one
    side and learned from on the other, and no router chooses another expert."""
    if recipe["name"] == "warm start":
        return recipe
    kept = ("group_size", "prompts", "micro_batch")
    of_batch = {name: recipe[name] for name in kept if name in recipe}
    replayed = {"router_replay": "R2"} if "num_experts" in model else {}
    return {"name": "grpo", "clip_low": 0.999, "clip_high": 1000.0, **replayed, **of_batch}


def network(draw: Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the network is, and what of that a run says."""
    model: dict[str, Any] = {}
    run: dict[str, Any] = {}

    def maybe(name: str, chance: float, *values: Any, of: dict[str, Any] = model) -> bool:
        taken = draw.random() < chance
        if taken:
            of[name] = draw.choice(values)
        return taken

    maybe("num_layers", 0.6, 1, 3, 3, 4, 4, 5)
    maybe("vocab_size", 0.4, 11, 13)
    layers = model.get("num_layers", 2)
    _attention(draw, model, layers, maybe)
    if maybe("lora_rank", 0.12, 2, 3, of=run):
        # Random adapters as large as what they are beside would make rounding as large.
        run["lora_alpha"] = 0.5
        maybe("lora_targets", 0.3, "attention", "attention,head", of=run)
        maybe("lora_rank_stabilised", 0.3, True, of=run)
    if draw.random() < 0.8:
        _experts(draw, model, run, layers, maybe)
    maybe("norm_placement", 0.2, "after", "both")
    maybe("head", 0.3, "tied")
    maybe("embedding_scale", 0.1, 1.0)
    maybe("activation", 0.2, "gelu_tanh", ["clamped", 1.7, 3.0])
    if "delta" not in model:
        maybe("dtype", 0.06, "bfloat16", of=run)
    maybe("mu_dtype", 0.15, "bfloat16", of=run)
    return model, run


def _attention(draw: Random, model: dict[str, Any], layers: int, maybe: Any) -> None:
    kind = draw.choice(["grouped"] * 6 + ["latent"] * 2 + ["delta"] * 2)
    maybe("num_kv_heads", 0.3, 8, 2, 1)
    maybe("rope_interleaved", 0.1, True)
    maybe("rope_scaling", 0.12, ["linear", 2.0], ["yarn", 4.0, 8])
    if kind == "latent":
        model["mla"] = [6, draw.choice([None, 10]), 2, 4]
        model.pop("num_kv_heads", None)
    else:
        maybe("qkv_bias", 0.15, True)
        if "qkv_bias" not in model:
            maybe("attention_gate", 0.15, True)
        maybe("attention_out_bias", 0.1, True)
        maybe("attention_sinks", 0.15, True)
        maybe("attention_scale", 0.1, 0.3)
        maybe("query_key_norm", 0.25, "head", "projection")
        maybe("rotary_dim", 0.1, 2)
        if "rope_scaling" not in model:
            maybe("nope_layers", 0.15, [0], [layers - 1])
    if kind == "delta" and layers > 1:
        every = draw.choice([2, 2, layers])
        there = [layer for layer in range(layers) if layer % every == 0]
        model["delta"] = [there, draw.choice([4, 8]), 8]
    if maybe("sliding_window", 0.35, 2, 3, 5) and layers > 1:
        maybe("full_attention_layers", 0.6, [0], [layers - 1], list(range(0, layers, 2)))
        if kind != "latent" and "rope_scaling" not in model:
            maybe("window_rope_base", 0.2, 100.0)


def _experts(
    draw: Random, model: dict[str, Any], run: dict[str, Any], layers: int, maybe: Any
) -> None:
    model["num_experts"] = draw.choice([8, 8, 16, 12])
    maybe("experts_per_token", 0.5, 1, 3, 4)
    maybe("d_expert", 0.3, 14)
    if maybe("d_ff", 0.3, 16):
        maybe("shared_expert_gate", 0.4, True)
    if "delta" not in model and layers > 1:
        maybe("num_dense_layers", 0.2, 1)
    maybe("expert_bias", 0.15, True)
    maybe("router_bias", 0.15, True)
    if maybe("router_scores", 0.3, "sigmoid"):
        if model.get("experts_per_token", 2) != 3 and maybe("num_expert_groups", 0.5, 4):
            even = model.get("experts_per_token", 2) % 2 == 0
            model["expert_groups_per_token"] = 2 if even else 1
    else:
        maybe("softmax_after_topk", 0.2, True)
    if "softmax_after_topk" not in model:
        maybe("renormalise", 0.2, False)
    maybe("routed_scaling", 0.2, 2.5)
    if maybe("selection_bias", 0.25, True) and "lora_rank" in run:
        # What a bias is moved by are weights that stay as they are.
        model["bias_update_rate"] = 0.0
    maybe("load_balance_coef", 0.3, 0.0, 0.5)
    maybe("router_z_coef", 0.2, 0.0, 0.1)
    maybe(draw.choice(["batch_balance_coef", "global_balance_coef"]), 0.3, 0.3)
    if maybe("capacity_factor", 0.06, 0.8):
        model["drop_scope"] = "full_sequence"
        maybe("drop_policy", 0.5, "position")


RECIPES = (
    *("grpo", "grpo", "grpo", "dapo", "vapo", "vapo", "ppo", "tppo", "hapo", "dr_grpo"),
    *("rloo", "maxrl", "gspo", "cispo", "reinforce_plus_plus"),
)


def algorithm(draw: Random, model: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The recipe, and the sizes of its batch, in fields of the recipe and of the run."""
    recipe: dict[str, Any] = {"name": draw.choice(RECIPES)}
    if "capacity_factor" in model:
        # Of networks that drop choices supervised learning alone may be asked for.
        recipe = {"name": "warm start"}
    recipe["group_size"] = draw.choice([1, 2, 2, 4]) if recipe["name"] == "ppo" else 2
    if draw.random() < 0.4 and recipe["name"] != "warm start":
        recipe["group_size"] = 4
    recipe["prompts"] = 16 // recipe["group_size"]

    def maybe(name: str, chance: float, *values: Any) -> None:
        if draw.random() < chance:
            recipe[name] = draw.choice(values)

    if recipe["name"] != "warm start":
        maybe("kl_coef", 0.25, 0.1)
        maybe("entropy_coef", 0.25, 0.05)
        maybe("aggregation", 0.3, "token-sum", "seq-mean-token-sum", "seq-mean-token-mean")
        maybe("temperature", 0.3, 0.7, 1.5, 0.0)
        maybe("top_p", 0.15, 0.8)
        maybe("top_k", 0.15, 5)
        maybe("old_logprobs", 0.2, "recompute")
        if "old_logprobs" in recipe:
            maybe("mismatch", 0.5, "truncated")
        if "num_experts" in model:
            maybe("router_replay", 0.3, "R2", "R3")
        maybe("weight_decay", 0.2, 0.1)
        maybe("max_grad_norm", 0.3, 0.05, 100.0)
        maybe("learning_rate_warmup", 0.2, 3)
    prompt, response = draw.choice([(8, 8), (8, 8), (8, 4), (6, 5), (7, 7), (16, 8)])
    sizes = (
        {}
        if (prompt, response) == (8, 8)
        else {
            "prompt_length": prompt,
            "response_length": response,
        }
    )
    return recipe, sizes


def devices(draw: Random, model: dict[str, Any]) -> dict[str, int]:
    """A legal layout on up to eight devices, mostly one that the network can have."""
    number = draw.choice([2, 2, 4, 4, 4, 8, 8, 8])
    axes = dict.fromkeys(("tp", "cp", "dp", "pp", "vpp", "ep", "etp"), 1)
    layers = model.get("num_layers", 2) - model.get("num_dense_layers", 0)
    while number > 1:
        axis = draw.choice(["tp", "cp", "dp", "dp", "pp"])
        crowded = "delta" in model if axis == "cp" else axis == "pp" and 2 * axes["pp"] > layers
        # Now and then what cannot be had is asked for.
        if crowded and draw.random() < 0.95:
            continue
        axes[axis] *= 2
        number //= 2
    if axes["pp"] > 1 and draw.random() < 0.5:
        axes["vpp"] = draw.choice([2, 3]) if layers >= 2 * axes["pp"] else 1
    if "num_experts" not in model:
        return axes
    stage = axes["tp"] * axes["cp"] * axes["dp"]
    for axis in ("ep", "ep", "etp", "ep"):
        if axes["ep"] * axes["etp"] < stage and draw.random() < 0.6:
            axes[axis] *= 2
    return axes


def execution(draw: Random, model: dict[str, Any], layout: dict[str, int]) -> dict[str, Any]:
    """How it is computed, and what is sent: fields of the run."""
    run: dict[str, Any] = {}

    def maybe(name: str, chance: float, *values: Any) -> bool:
        taken = draw.random() < chance
        if taken:
            run[name] = draw.choice(values)
        return taken

    maybe("attention", 0.35, "plain", "blocked", "xla")
    if layout["cp"] > 1:
        maybe("context", 0.75, "gather", "ring", "ulysses")
    if "mla" in model:
        maybe("latent", 0.5, "expanded", "absorbed")
    if "num_experts" in model:
        travels = layout["ep"] * layout["etp"] > 1
        chosen = maybe("dispatch", 0.6, "all_to_all", "all_gather", "two_level")
        if chosen and run["dispatch"] == "two_level":
            # Now and then servers that devices do not fill.
            maybe("server_devices", 0.95, 1, 2, 2, 2, 2, 4, 4, 3)
        maybe("experts", 0.4, "tiles", "batched", "blocks", "plain")
        maybe("buffer_factor", 0.3, 0.5, 1.0, 8.0)
        maybe("expert_chunks", 0.3, 2, 3)
        maybe("exchange_rate", 0.1, 0.5)
        maybe("router", 0.1, "plain")
        # Keys of Gated DeltaNet that are near 0 are divided by their lengths: what was rounded
        # before comes back a hundred times as large.
        if travels and "delta" not in model:
            maybe("activation_wire", 0.08, "float8_e4m3fn")
    maybe("remat", 0.6, "selective", "projections", "full")
    if run.get("remat", "none") != "none":
        maybe("fsdp", 0.5, True)
    if layout["pp"] == 1 or draw.random() < 0.1:
        maybe("overlap_grad_reduce", 0.35, True)
        maybe("packing", 0.3, True, True, False)
    # Many layers, each a program, take a minute to compile.
    many = model.get("num_layers", 2) > 2
    maybe("scan_layers", 0.85 if many else 0.4, *[True] * (5 if many else 2), False)
    maybe("vocab_chunk", 0.4, 3, 4, None)
    maybe("gradient_wire", 0.08, "bfloat16")
    maybe("decode_attention", 0.1, "plain")
    if draw.random() < 0.03:
        run |= [draw.choice(ELSEWHERE)]
    return run


ELSEWHERE = (
    *(("attention", "cudnn"), ("attention", "mosaic"), ("decode_attention", "mosaic")),
    *(("dispatch", "ragged"), ("router", "mosaic"), ("experts", "mosaic")),
)
"""What no CPU computes by."""


def rollout(draw: Random, model: dict[str, Any], layout: dict[str, int]) -> dict[str, Any]:
    """Where completions are sampled: fields of the run."""
    kind = draw.choice(["plain"] * 4 + ["layout", "slots", "split", "apart"])
    number = layout["tp"] * layout["cp"] * layout["dp"] * layout["pp"]
    if kind == "layout":
        tp = draw.choice([n for n in (1, 2, 4) if number % n == 0])
        ep = draw.choice([n for n in (1, 2, 4) if number % n == 0]) if "num_experts" in model else 1
        return {"rollout_layout": f"tp{tp} dp{number // tp} / ep{ep}"}
    if kind == "slots":
        return {"slots": number * draw.choice([1, 2])}
    if kind == "apart" and number <= 8:
        return {"max_staleness": 1, "rollout_devices": draw.choice([1, 2, 4])}
    if kind != "split" or "num_experts" not in model:
        return {}
    run: dict[str, Any] = {"rollout_engine": "disaggregated", "rollout_micro_batches": 2}
    if draw.random() < 0.5:
        run["rollout_micro_batches"] = draw.choice([1, 3])
    attention = draw.choice([n for n in (1, 2, 4) if n < number] or [1])
    experts = number - attention
    if experts not in (1, 2, 4):
        run |= {"max_staleness": 1, "rollout_devices": attention + 2}
        experts = 2
    elif number == 1:
        run |= {"max_staleness": 1, "rollout_devices": 2}
        experts = 1
    tp = draw.choice([n for n in (1, 2) if attention % n == 0])
    etp = draw.choice([n for n in (1, 2) if experts % n == 0])
    run["rollout_split"] = f"tp{tp} dp{attention // tp} / ep{experts // etp} etp{etp}"
    if draw.random() < 0.3:
        run["rollout_m2n"] = draw.choice(["device_put", "collective"])
    if draw.random() < 0.3:
        run["rollout_expert_slots"] = model["num_experts"] * etp // experts + 1
    if draw.random() < 0.3:
        run["rollout_replan"] = 2
    return run


def batches(draw: Random, recipe: dict[str, Any], layout: dict[str, int]) -> dict[str, Any]:
    """Into how many micro-batches the mini-batch is cut: fields of the recipe."""
    rows = recipe["prompts"] * recipe["group_size"]
    if recipe["name"] == "warm start" or draw.random() < 0.3:
        return {}
    number = draw.choice([2, 2, 4, 8, 16])
    if rows // number < layout["dp"] and draw.random() < 0.9:
        number = max(rows // layout["dp"] // draw.choice([1, 2]), 1)
    return {"micro_batch": max(rows // number, 1)}
