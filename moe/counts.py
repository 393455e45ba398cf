"""FLOPs of training a token."""

from moe.architecture.attention import GatedDeltaNet, delta_layers
from moe.config import ModelConfig


def training_flops(config: ModelConfig, time: int) -> float:
    """Floating-point operations of one trained token in sequences of `time` tokens.

    ``6 (L (h (q + 2 kv) + q h) + sum_layers 3 h f + h V) + 6 L q time``: a multiplication and an
    addition for each weight that the token uses, forward and twice backward, and the products of
    queries with keys and of probabilities with values, of which a causal mask leaves half. In a
    layer with a window of w tokens ``w (2 - w / time)`` replaces the last `time`. An attention gate
    has as many weights as the queries. h is `d_model`, q and kv the widths of all query and key
    heads, f the hidden width of all the experts of a token, the shared one included, or of the
    dense layer, V the vocabulary size.

    A layer with Gated DeltaNet has ``6 (h (2 k + 3 v + 2 n) + 3 v d)`` instead of the terms of
    attention: its projections, and for each value head a state that is read, corrected and read
    again, as in the token-by-token rule. k and v are the widths of all its keys and values, n its
    number of value heads, d the width of a key.

    Recomputation, padding and discarded work do not count, nor do norms, the embedding, the router
    (less than a hundredth) and the optimizer: this is the work that the model needs, the numerator
    of model FLOPs utilisation, ``tokens per second x this / peak``.

    Raises:
      ValueError: for multi-head latent attention, which the formula does not describe.

    References:
      Chowdhery et al., "PaLM", 2022, appendix B. https://arxiv.org/abs/2204.02311
      Megatron-Core counts so, and Liu et al., "MoE parallel folding", 2025, report with it.
      https://arxiv.org/abs/2504.14960

    Examples:
      >>> training_flops(ModelConfig(100, num_layers=1, d_model=10, num_heads=1, num_kv_heads=1,
      ...     head_dim=10, num_experts=0, d_ff=20), time=8)
      12480.0
    """
    if config.mla is not None:
        raise ValueError("training_flops does not support latent attention (mla).")
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    delta, num_layers = config.delta, config.num_layers
    if delta is not None:
        num_layers -= len(delta.layers)
    gates = queries if config.attention_gate else 0
    attention = num_layers * config.d_model * (2 * queries + gates + 2 * keys)
    if delta is not None:
        attention += len(delta.layers) * _delta_multiplications(delta, config.d_model)
    width = config.num_dense_layers * config.dense_d_ff
    width += (config.num_layers - config.num_dense_layers) * (
        config.experts_per_token * config.d_expert * (config.num_experts > 0) + config.d_ff
    )
    head_width = 1 if config.head == "value" else config.vocab_size
    weights = attention + 3 * config.d_model * width + config.d_model * head_width
    window, full = config.sliding_window, num_layers
    if window is not None and window < time:
        full = len(set(config.full_attention_layers) - set(delta_layers(config)))
    else:
        window = time
    # Twice the mean number of keys that a query sees, summed over layers.
    seen = full * time + (num_layers - full) * window * (2 - window / time)
    return 6.0 * (weights + queries * seen)


def _delta_multiplications(delta: GatedDeltaNet, d_model: int) -> int:
    """Multiplications of a token in a layer with Gated DeltaNet."""
    keys = delta.num_key_heads * delta.key_head_dim
    values = delta.num_value_heads * delta.value_head_dim
    projected = d_model * (2 * keys + 3 * values + 2 * delta.num_value_heads)
    return projected + 3 * values * delta.key_head_dim
