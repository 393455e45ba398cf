"""Coefficients that steer themselves, one step at a time."""


def adaptive_kl_coefficient(coefficient, kl, target, num_samples, horizon):
    error = kl / target - 1.0
    if error > 0.2:
        error = 0.2
    if error < -0.2:
        error = -0.2
    return coefficient * (1.0 + error * num_samples / horizon)


def adaptive_entropy_coefficient(coefficient, entropy, target=0.2, step=0.005, low=0.0, high=1.0):
    """The coefficient to keep and the one to apply."""
    if entropy <= target:
        kept = min(coefficient + step, high)
        kept = max(kept, low)
        return kept, kept
    return min(max(coefficient - step, low), high), 0.0
