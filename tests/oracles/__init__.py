# ruff: noqa: F401 - names of the oracles
"""Slow float64 loops that say what each function should compute, sharing no code with the library.

They follow the papers' formulas literally: sequences are first compressed to their true tokens, and
everything is then a loop over Python floats. Masks are read by truth, values under them never.
"""

from oracles import diagnostics
from oracles.advantages import (
    effective_length,
    extended_gae,
    gae,
    gdpo,
    gpg,
    grpo,
    length_adaptive_lambda,
    maxrl,
    opo,
    optimal_token_baseline,
    pass_at_k,
    pass_at_k_exact,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    rewards_to_go,
    rloo,
    token_level_group_average,
    whiten,
)
from oracles.distillation import (
    distillation_advantage,
    extrapolated_advantage,
    jsd,
    top_k_divergence,
)
from oracles.divergence import (
    entropy,
    entropy_slopes,
    kl_clamped_token,
    kl_divergence,
    kl_token,
    token_logprob,
)
from oracles.hapo import (
    adaptive_temperature,
    asymmetric_clip_bounds,
    entropy_signal,
    entropy_statistics,
    hapo,
    redistributed_advantage,
    standardized_entropy,
)
from oracles.mismatch import (
    divergence_rejection_mask,
    geometric_rejection_mask,
    icepop_weight,
    mismatch_statistics,
    mismatch_weights,
    normalized_weights,
    sequence_masked_weights,
    truncated_weight,
)
from oracles.policy import (
    ppo,
    ppo_token,
)
from oracles.policy_ratio import (
    cispo_row,
    dro_row,
    gmpo_row,
    gspo_row,
    luspo_row,
    policy_loss,
    positive_examples,
    ppo_row,
    reinforce_row,
    sapo_row,
    vespo_row,
)
from oracles.reduction import (
    aggregate,
    token_weights,
)
from oracles.rows import (
    rows,
)
from oracles.scalars import (
    adaptive_entropy_coefficient,
    adaptive_kl_coefficient,
    informative,
    overlong_filter,
    overlong_penalty,
    share_of_draws,
)
from oracles.trust_region import (
    clip_cov,
    covariances,
    dppo,
    kl_cov,
    off_policy_sequence_mask,
    top_entropy_mask,
)
from oracles.value import (
    bounded_value,
    explained_variance,
    value_token,
)
