"""How much arithmetic the network takes: the numerator of model FLOPs utilisation."""

from moe.config import ModelConfig


def training_flops(config: ModelConfig, time: int) -> float:
    """Floating-point operations of one trained token in sequences of `time` tokens.

    ``6 (L (h (q + 2 kv) + q h) + sum_layers 3 h f + h V) + 6 L q time``: a multiplication and an
    addition for each weight that the token meets, forward and twice backward, and the products of
    queries with keys and of weights with values, of which a causal mask leaves half. In a layer
    with a window of w tokens ``w (2 - w / time)`` stands for the last `time`. h is `d_model`, q and
    kv the widths of all query and key heads, f the hidden width of all the experts that a token
    meets, the shared one included, or of the dense layer, V the vocabulary.

    What is computed again, padded or thrown away does not count, nor do norms, the embedding, the
    router (less than a hundredth) and the optimizer: this is the work that the model needs, the
    numerator of model FLOPs utilisation, ``tokens per second x this / peak``.

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
        raise ValueError("training_flops counts grouped-query attention, not latent attention.")
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    attention = config.num_layers * config.d_model * (2 * queries + 2 * keys)
    width = config.num_dense_layers * config.dense_d_ff
    width += (config.num_layers - config.num_dense_layers) * (
        config.experts_per_token * config.d_expert * (config.num_experts > 0) + config.d_ff
    )
    columns = 1 if config.head == "value" else config.vocab_size
    weights = attention + 3 * config.d_model * width + config.d_model * columns
    window, full = config.sliding_window, config.num_layers
    if window is not None and window < time:
        full = len(config.full_attention_layers)
    else:
        window = time
    # Twice the mean number of keys that a query sees, summed over layers.
    seen = full * time + (config.num_layers - full) * window * (2 - window / time)
    return 6.0 * (weights + queries * seen)
