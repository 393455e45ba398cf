"""What a number of sampled responses says about a policy, by trying every draw."""

import itertools


def share_of_draws(num_samples, num_correct, k):
    """Of all choices of k samples, the share that holds a correct one."""
    draws = list(itertools.combinations(range(num_samples), k))
    return sum(any(sample < num_correct for sample in draw) for draw in draws) / len(draws)
