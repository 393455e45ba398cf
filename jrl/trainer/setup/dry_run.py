"""Dry run: batch arithmetic, parameters, memory, predicted time and layout of a run, and its first
input as the network reads it."""

from collections.abc import Iterable
from dataclasses import fields
from typing import Any, SupportsInt

import jax
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jrl.checks import flag
from jrl.published.settings import RouterSettings
from jrl.setting import names_with
from jrl.tasks.data.chats import Chats
from jrl.tasks.mixture import has_environments
from jrl.text.prompt_format import NAMED_TEMPLATES, NO_TEMPLATE, example_tools, text_of_row
from jrl.trainer.setup.chat_rows import training_chats
from jrl.trainer.setup.fit import free_bytes
from jrl.trainer.setup.lengths import describe_lists, response_origin
from jrl.trainer.setup.memory import RunMemory, rollout_memory, run_memory
from jrl.trainer.setup.network import buffers_explained, dispatch_explained
from jrl.trainer.setup.planner import time_of_update, times_with_overlap
from jrl.trainer.setup.setup import Setup
from moe.attention.context_parallel import context_of, received_elements
from moe.config import Model, ModelConfig
from moe.execution import TWO_LEVELS, Execution
from moe.implementations import DEFAULTS, explain_selection
from moe.weights import num_active_parameters, num_parameters, num_trained_parameters
from sharding.costs.hardware import Hardware, find_hardware
from sharding.schedule import Schedule

AXES = {
    "dp": "data: each rank has its own sequences",
    "tp": "tensor: attention heads, dense hidden units, the vocabulary; between layers, tokens",
    "cp": "context: the positions of a sequence",
    "pp": "pipeline: the layers, and micro-batches in flight through them",
    "ep": "experts: each rank holds some of them, tokens are dispatched",
    "etp": "tensor inside an expert",
    "edp": "data of the experts: ranks with the same experts",
}
"""Meaning of each axis of a layout."""
ATTENTION_AXES = ("dp", "tp", "cp", "pp")

UNSET = {
    "buffer_factor": "worst case",
    "expert_chunks": "1",
    "vocab_chunk": "full vocabulary",
    "capacity_factor": "any number",
    "scan_layers": "where there are more than eight",
    "decode_attention": "plain",
    "router": "plain",
    "server_devices": "those that fast links join",
    "exchange_rate": "the planner's",
    "activation_wire": "that of activations",
}
"""Meaning of settings of the network that are None."""


def print_dry_run(setup: Setup, console: Console | None = None) -> None:
    """Prints the tables of a dry run: batch, parameters, execution, memory and layout; also the
    predicted update, and memory and layout of sampling, if these apply."""
    console = console or Console()
    size = setup.mesh.layout.num_devices
    batch = batch_arithmetic(setup) if setup.rows is None else chat_arithmetic(setup)
    _print(console, f"Batch: {setup.recipe.name} on {setup.run.task}", batch)
    _print(console, f"Parameters: {setup.run.model}", parameters(setup))
    _print(console, "Execution", execution(setup))
    needed = run_memory(setup)
    _print(console, "Memory per device", memory_rows(needed, free_bytes(setup)))
    hardware = find_hardware(jax.devices()[0].device_kind)
    if hardware is not None and setup.model.mla is None and setup.model.delta is None:
        _print(console, "Policy update, predicted", prediction(setup, hardware))
    if setup.run.rollout_devices is not None:
        _print(console, "Memory per rollout device", _readable(rollout_memory(setup)))
    devices = f"{_count(size, 'device', 'devices')} ({jax.devices()[0].device_kind})"
    _print(
        console, f"Layout: {setup.run.layout} on {devices}", axes(Model(setup.model, setup.mesh))
    )
    if setup.rollout_mesh != setup.mesh:
        where = "the same" if setup.run.rollout_devices is None else "separate devices"
        title = f"Rollout layout: {setup.rollout_mesh.layout} on {where}"
        if setup.split is not None:
            title = f"Rollout split: {setup.run.rollout_split} on {where}, attention"
        _print(console, title, axes(Model(setup.model, setup.rollout_mesh)))
    for line in describe_lists(setup.task, setup.prompts_dropped, setup.prompt_length):
        console.print(line, highlight=False)
    print_first_input(setup, console)
    recipe, steps = setup.recipe, setup.run.steps
    if recipe.value_pretraining_steps >= steps:
        console.print(
            f"The policy is not trained: all {steps} steps train only the critic "
            f"(--pretrain-critic {recipe.value_pretraining_steps}).",
            style="bold red",
        )


def axes(model: Model) -> dict[str, str]:
    """Size and meaning of each axis; a dense network has the axes of attention."""
    names = AXES if model.config.num_experts else ATTENTION_AXES
    return {f"{axis} {model.mesh.size(getattr(model.mesh, axis))}": AXES[axis] for axis in names}


def batch_arithmetic(setup: Setup) -> dict[str, str]:
    """Rows of the arithmetic from prompts to optimizer steps."""
    run, recipe = setup.run, setup.recipe
    mini = recipe.mini_batch_size
    num_mini = recipe.completions // mini
    num_micro_batches = setup.geometry.num_micro_batches
    micro = mini // num_micro_batches
    updates = recipe.updates_per_step
    pretraining = min(recipe.value_pretraining_steps, run.steps)
    time = setup.prompt_length + setup.response_length
    rows = {
        "completions per step": f"{recipe.prompts} prompts x {recipe.group_size} "
        f"= {recipe.completions:,}"
    }
    if recipe.dynamic_sampling:
        max_sampled = recipe.max_generation_rounds * recipe.completions
        rows["sampled per step at most"] = (
            f"{recipe.max_generation_rounds} rounds x {recipe.completions:,} = {max_sampled:,}"
        )
    rows |= {
        "mini-batches": f"{recipe.completions:,} / {mini:,} = {num_mini:,}",
        "micro-batches per mini-batch": f"{mini:,} / {micro:,} = {num_micro_batches:,}",
        "optimizer steps per step": f"{_count(num_mini, 'mini-batch', 'mini-batches')} x "
        f"{_count(recipe.epochs, 'epoch', 'epochs')} = {updates:,}",
        "steps": f"{run.steps:,}",
        **_bubble(setup),
    }
    if recipe.uses_critic:
        rows["of which train only the critic"] = f"{pretraining:,}"
        rows["optimizer steps of the critic"] = (
            f"{run.steps:,} x {updates:,} = {run.steps * updates:,}"
        )
    learning = run.steps - pretraining
    return rows | {
        "optimizer steps of the policy": f"{learning:,} x {updates:,} = {learning * updates:,}",
        "tokens per completion at most": f"{setup.prompt_length} prompt + "
        f"{setup.response_length} response = {time:,}",
        "response limit": response_origin(run, setup.response_length),
        "tokens per step at most": f"{recipe.completions:,} x {time:,} "
        f"= {recipe.completions * time:,}",
    }


def execution(setup: Setup) -> dict[str, str]:
    """Rows of the network's execution settings, by flag, and of its router settings."""
    config, mesh = setup.model, setup.mesh
    model = Model(config, mesh)
    settings = {field.name: getattr(config.execution, field.name) for field in fields(Execution)}
    if settings["context"] is None and mesh.layout.cp > 1:
        settings["context"] = f"{context_of(model)} (sends least)"
    settings["dispatch"] = dispatch_explained(model, setup.run) or settings["dispatch"]
    settings["buffer_factor"] = buffers_explained(config, setup.run) or settings["buffer_factor"]
    if config.num_experts:
        settings |= {item.name: getattr(config, item.name) for item in fields(RouterSettings)}
    # Settings that do not apply to the network are left out.
    applies = {
        "latent": config.mla is not None,
        "context": mesh.layout.cp > 1,
        **dict.fromkeys(names_with(Execution, "experts"), config.num_experts > 0),
        "server_devices": settings["dispatch"] in TWO_LEVELS,
        **dict.fromkeys(("drop_policy", "drop_scope"), config.capacity_factor is not None),
        "bias_update_rate": config.selection_bias,
    }
    selections = {name: explain_selection(model, name) for name in DEFAULTS}

    def text(name: str, value: object) -> str:
        if value is None:
            return selections.get(name) or UNSET.get(name, "the best that applies")
        return ("off", "on")[value] if isinstance(value, bool) else str(value)

    rows = {
        flag(name): text(name, value) for name, value in settings.items() if applies.get(name, True)
    }
    if mesh.layout.cp > 1:
        sent_text = f"{received_elements(model):,} elements per token and layer, forward"
        rows["sent over cp by attention"] = sent_text
    return rows


def parameters(setup: Setup) -> dict[str, str]:
    """Parameter counts of the networks."""
    model, critic = setup.model, setup.critic
    rows = {
        "policy": f"{num_parameters(model):,}",
        "active params per token": f"{num_active_parameters(model):,}",
    }
    if model.lora is not None:
        rows["of which learn"] = _trained_text(model)
    if critic is not None:
        rows["critic"] = f"{num_parameters(critic):,}"
        if critic.lora is not None:
            rows["of which trained, in addition to the policy's"] = _trained_text(critic)
    for role, network in setup.frozen.items():
        is_base = model.lora is not None and not network.from_file
        count = f"{num_parameters(network.config):,}"
        rows[role] = "the policy without adapters" if is_base else count
    return rows


def _trained_text(config: ModelConfig) -> str:
    trained = num_trained_parameters(config)
    return f"{trained:,} in adapters, {readable_bytes(4 * trained)}"


def memory_rows(needed: RunMemory, free: int | None) -> dict[str, str]:
    """Rows of the predicted memory of a device: buffers that are kept, buffers and peak of each
    phase, and what is free. A prediction, not a measurement."""
    rows = _readable(dict(needed.permanent))
    for phase, buffers in needed.phases.items():
        rows |= {f"{phase}: {name}": readable_bytes(size) for name, size in buffers.items() if size}
    rows |= {f"peak of {name}": readable_bytes(size) for name, size in needed.peaks.items()}
    return rows if free is None else rows | {"free": readable_bytes(free)}


def prediction(setup: Setup, hardware: Hardware) -> dict[str, str]:
    """Predicted time of an update on an accelerator that the planner supports; not a
    measurement."""
    model, geometry, run = setup.model, setup.geometry, setup.run
    cost = time_of_update(model, geometry, run, hardware)
    components = {
        "products": cost.products,
        "memory traffic": cost.traffic,
        "communication": cost.exposed,
        "pipeline bubble": cost.bubble,
    }
    with_overlap = times_with_overlap(model, geometry, run, hardware)
    return {
        "seconds": f"{cost.total:.3g}",
        **{
            f"of which {name}": f"{time / cost.total:.0%}"
            for name, time in components.items()
            if time
        },
        "model FLOPs utilisation": f"{cost.mfu(hardware):.1%}",
        **{
            f"seconds with {flag(name)}, at best": f"{overlapped.total:.3g}"
            for name, overlapped in with_overlap.items()
        },
    }


def _count(count: int, singular: str, plural: str) -> str:
    return f"{count:,} {singular if count == 1 else plural}"


def _readable(num_bytes: dict[str, int]) -> dict[str, str]:
    return {name: readable_bytes(count) for name, count in num_bytes.items()}


def readable_bytes(num_bytes: int) -> str:
    """Formats a number of bytes with three digits and a binary unit."""
    size, unit = float(num_bytes), 0
    while size >= 1000 and unit < 4:
        size, unit = size / 1024, unit + 1
    return f"{size:.3g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}"


def _print(console: Console, title: str, rows: dict[str, Any]) -> None:
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")
    table.add_column(style="dim")
    table.add_column()
    table.show_header = False
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)


def chat_arithmetic(setup: Setup) -> dict[str, str]:
    """Lines of the arithmetic from conversations to optimizer steps."""
    chats, rows, recipe, run = setup.task, setup.rows, setup.recipe, setup.run
    assert isinstance(chats, Chats) and rows is not None
    token_counts, loss_counts = rows.counts()
    tokens, loss_tokens = token_counts.sum(), loss_counts.sum()
    num_micro_batches, micro = setup.geometry.num_micro_batches, recipe.micro_batch_size
    epochs = run.steps * recipe.completions / chats.num_train
    return {
        "conversations": f"{chats.num_train:,} to train on, {chats.heldout_size:,} held out",
        "dropped, truncated": f"{rows.dropped:,}, {rows.truncated:,}",
        "tokens": (
            f"{tokens:,}, of which {loss_tokens:,} are in the loss ({loss_tokens / tokens:.1%})"
        ),
        "tokens of the longest": f"{token_counts.max():,}",
        "steps": f"{run.steps:,} x {recipe.completions:,} conversations = {epochs:.3g} epochs",
        "micro-batches per step": f"{recipe.completions:,} / {micro:,} = {num_micro_batches:,}",
        "packed": "yes" if setup.networks.packs else "no",
        "learning rate": f"{recipe.learning_rate:g}, {setup.policy_optimizer.schedule}",
        **_bubble(setup),
    }


def _bubble(setup: Setup) -> dict[str, str]:
    """Row of the pipeline's bubble; none if there is no pipeline."""
    layout = setup.mesh.layout
    if layout.pp == 1:
        return {}
    bubble = Schedule(layout.pp, setup.geometry.num_micro_batches, layout.vpp).bubble
    return {"pipeline bubble / busy time": f"{bubble:.1%}"}


def print_first_input(setup: Setup, console: Console) -> None:
    """Prints the first training conversation with special tokens, and its tokens in the loss mask;
    or the first prompt."""
    if setup.rows is not None:
        assert isinstance(setup.task, Chats)
        chat = setup.rows.encoded[training_chats(setup.task, 0, 1)[0].index]
        _print_tokens(setup, console, "The first conversation as the network reads it", chat.ids)
        _print_tokens(setup, console, "Its tokens in the loss", chat.ids[chat.loss_mask])
    else:
        ids = setup.format.encode(setup.task.train(0))
        _print_tokens(setup, console, "The first prompt as the network reads it", ids)
    for line in (turn_ends(setup), tools_called(setup)):
        if line is not None:
            console.print(Text(line), highlight=False, soft_wrap=True)


def turn_ends(setup: Setup) -> str | None:
    """Description of the tokens that end a turn of the assistant, and of the chat template's own
    one or its absence; None if there is no template and no checkpoint."""
    template, tokenizer, run = setup.format.template, setup.tokenizer, setup.run
    if template is None and run.checkpoint is None:
        return None
    token_texts = {token: text for text, token in tokenizer.special_tokens.items()}
    names = [token_texts.get(token, str(token)) for token in tokenizer.stop_ids]
    if template is None:
        reason = (
            f"--chat-template {NO_TEMPLATE}"
            if run.chat_template == NO_TEMPLATE
            else f"--chat-template {', '.join(NAMED_TEMPLATES)} or FILE gives one"
        )
        return f"no chat template ({reason}): completions end with {' or '.join(names)}"
    if (turn_end := tokenizer.usage.turn_end) is not None:
        template_end = token_texts[turn_end]
        other_ends = [name for name in names if name != template_end]
        also = f"; {' and '.join(other_ends)} end them too" if other_ends else ""
        return f"turns end with {template_end}, as the chat template writes them{also}"
    closing = template.turn_suffix
    ending = f"{closing!r}, which is not a token," if closing else "no end-of-turn token"
    return f"the chat template writes {ending} behind a turn: turns end with {' or '.join(names)}"


def tools_called(setup: Setup) -> str | None:
    """Description of the tool-call format of the first prompt; None if there are no tools or no
    template, and if no environment answers a call."""
    format = setup.format.tool_format
    if setup.rows is not None or format is None or not has_environments(setup.task):
        return None
    names = ", ".join(example_tools(setup.task.train(0)))
    return f"tools ({names}) are called in the format {format.name}" if names else None


def _print_tokens(setup: Setup, console: Console, title: str, ids: Iterable[SupportsInt]) -> None:
    console.print(title, style="bold")
    text = text_of_row(setup.tokenizer, [int(token) for token in ids])
    console.print(Text(text), highlight=False, soft_wrap=True)
