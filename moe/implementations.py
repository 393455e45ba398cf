"""Default implementations: what None in `moe.execution.Execution` selects, by one table.

A field has rows for platforms and generations of devices, best first, with a reason for each. The
first row whose devices they are, and which supports the network, is selected. A name in `Execution`
requires that implementation instead. `benchmarks/results` has the measurements, and
`benchmarks.absent` the compiled programs that the reasons refer to.
"""

from collections.abc import Callable
from typing import NamedTuple

from moe.attention.latent import caches_latent
from moe.config import Model, ModelConfig
from moe.kernels import decode_attention, grouped, latent_decode, routing, rows
from moe.kernels.choice import HOPPER, NAMES, Devices, devices_of, unsupported_dtype

FROM_HOPPER = 9.0, float("inf")
FROM_AMPERE = 8.0, float("inf")
ANY = 0.0, float("inf")


class Default(NamedTuple):
    """Row of the table: an implementation, the devices that it is the default of, and why.

    Attributes:
      name: name of the implementation.
      platform: platform of the devices; None is any.
      capabilities: range of compute capabilities, the second excluded.
      reason: reason for the choice, with the measurement.
      obstacle: maps a network and the number of devices that its experts are split over (``etp``)
        to the reason why it does not support the network, or None.
    """

    name: str
    platform: str | None
    capabilities: tuple[float, float]
    reason: str
    obstacle: Callable[[ModelConfig, int], str | None] = lambda config, etp: None

    def is_for(self, devices: Devices) -> bool:
        """True if the row is one of these devices."""
        if self.platform not in (None, devices.platform):
            return False
        lowest, beyond = self.capabilities
        return lowest <= devices.capability < beyond


class Selected(NamedTuple):
    """The implementation that None in a field selects, and a line with the reason and with what
    ruled out better ones."""

    name: str
    explanation: str


def selected_implementation(model: Model, field: str) -> str | None:
    """Implementation for a field of `Execution`: the name there, or what None selects.

    Returns:
      A name; None for devices of an unknown platform: an operation selects by the one that it is
      lowered for.
    """
    name = getattr(model.config.execution, field)
    # Core attention also depends on the arrays (`moe.attention.core`).
    if name is not None or devices_of(model.mesh).platform is None:
        return name
    return select(model, field).name


def select(model: Model, field: str) -> Selected:
    """The row that None in a field of `Execution` selects, with the reason."""
    devices, passed = devices_of(model.mesh), list[str]()
    for row in DEFAULTS[field]:
        if not row.is_for(devices):
            continue
        obstacle = row.obstacle(model.config, model.mesh.size(model.mesh.etp))
        if obstacle is None:
            explanation = f"{row.name} ({'; '.join([row.reason, *passed])})"
            return Selected(row.name, explanation)
        passed.append(f"not {row.name}: {obstacle}")
    raise AssertionError(f"no row of {field} is for {devices}")


def explain_selection(model: Model, field: str) -> str | None:
    """Explanation in a line of what None in a field selects; None if a name is given, or if there
    is no GPU and so no kernel to select."""
    name, devices = getattr(model.config.execution, field), devices_of(model.mesh)
    if name is not None or devices.platform != "gpu":
        return None
    return select(model, field).explanation


def explain_selections(model: Model) -> list[str]:
    """Lines that say what None selects in each field that applies to the network, with its name."""
    fields = [field for field in DEFAULTS if "attention" in field or model.config.num_experts]
    explained = ((field, explain_selection(model, field)) for field in fields)
    return [f"{field} {text}" for field, text in explained if text is not None]


def unsupported_by_decode_kernel(config: ModelConfig) -> str | None:
    """The reason why the decode kernels do not support the network's heads; None if they do."""
    if config.attention_sinks:
        return "attention sinks in the softmax"
    if config.mla is not None and caches_latent(config):
        rank = config.mla.kv_lora_rank
        return latent_decode.unsupported_vectors(
            config.dtype, rank + config.mla.qk_rope_head_dim, rank
        )
    group = config.num_heads // config.num_kv_heads
    widths = config.head_dim, config.v_head_dim
    return decode_attention.unsupported_heads(config.dtype, group, *widths)


def check_decode_kernel(config: ModelConfig) -> None:
    """Checks, before anything is traced, that the kernel of `Execution.decode_attention` supports
    the network. The device is checked when a program is lowered.

    Raises:
      ValueError: if it does not, with the rule and the fix.
    """
    obstacle = decode_kernel_obstacle(config)
    if obstacle is not None:
        name = config.execution.decode_attention
        raise ValueError(f"decode_attention={name!r} {obstacle}; use None.")


def decode_kernel_obstacle(config: ModelConfig) -> str | None:
    """The reason why the named kernel does not support the network's heads, as the end of a
    sentence; None if it does, or if none is named."""
    name = config.execution.decode_attention
    if name is None or name == "plain":
        return None
    if name not in NAMES:
        return f"is not known: choose among {', '.join(map(repr, NAMES))}"
    if name == "interpreted":
        return "is not supported: Pallas's interpreter has no matrix units"
    reason = unsupported_by_decode_kernel(config)
    return None if reason is None else f"is not supported: {reason}"


def _experts_obstacle(config: ModelConfig, etp: int) -> str | None:
    # Kernels permute rows of d_model elements, and multiply them.
    hidden = config.d_expert // etp
    sizes = {
        f"d_model={config.d_model}": rows.unsupported_width(config.d_model)
        or grouped.unsupported_size(config.d_model),
        f"{hidden} hidden units per device": grouped.unsupported_size(hidden),
    }
    reasons = (f"{size} ({rule})" for size, rule in sizes.items() if rule is not None)
    return unsupported_dtype("rows", config.dtype) or next(reasons, None)


def _router_obstacle(config: ModelConfig, etp: int) -> str | None:
    most = routing.MAX_EXPERTS_WITHOUT_SPILLS
    if routing.supports_experts(config.num_experts, most):
        return None
    return f"{config.num_experts} experts (needs a multiple of 8 up to {most})"


DEFAULTS: dict[str, tuple[Default, ...]] = {
    "attention": (
        Default(
            "cudnn",
            "gpu",
            FROM_AMPERE,
            "FlashAttention of cuDNN: on an H200 a step of 3.2 billion parameters takes 0.94 of "
            'the time with "mosaic"; "mosaic" or "blocked" where its mask would be too large',
            # Arrays may have other obstacles (`moe.attention.fused.cudnn_obstacle`).
            lambda config, etp: unsupported_dtype("queries", config.dtype),
        ),
        Default(
            "mosaic",
            "gpu",
            HOPPER,
            "kernels for Hopper, which need no mask of queries times keys",
            lambda config, etp: decode_attention.unsupported_heads(
                config.dtype, 1, config.head_dim, config.v_head_dim
            ),
        ),
        Default("blocked", None, ANY, 'no more scores at a time than fit; "plain" for few scores'),
    ),
    "experts": (
        Default(
            "mosaic",
            "gpu",
            HOPPER,
            'kernels for Hopper: on an H200 an eighth of the time of "blocks" with 128 experts',
            _experts_obstacle,
        ),
        Default(
            "batched",
            "gpu",
            ANY,
            'few launches: 99 for a layer of 128 experts, forward and backward, where "blocks" '
            "are 20,267",
        ),
        Default("tiles", "cpu", ANY, "rows that exist, and no others, are multiplied"),
        Default("blocks", None, ANY, "a loop of static length, which a TPU runs by itself"),
    ),
    "router": (
        Default(
            "mosaic",
            "gpu",
            FROM_HOPPER,
            "one kernel: on an H200 three quarters of the time of the plain router",
            _router_obstacle,
        ),
        Default("plain", None, ANY, "XLA's own operations"),
    ),
    "decode_attention": (
        Default(
            "mosaic",
            "gpu",
            HOPPER,
            "reads only the tokens of each row: on an H200 a step of 256 rows takes half the time",
            lambda config, etp: unsupported_by_decode_kernel(config),
        ),
        Default("plain", None, ANY, "XLA's own operations"),
    ),
}
"""By the field of `Execution`, best first; the last row of a field is for any device."""
