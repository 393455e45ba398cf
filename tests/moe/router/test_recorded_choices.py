"""Choices on record: which tokens have them, and how far a router agrees."""

import jax.numpy as jnp
import numpy as np
import pytest

from moe.router.routing import agreement, choices_dtype, is_recorded


@pytest.mark.parametrize(("experts", "dtype"), [(4, "uint8"), (255, "uint8"), (256, "uint16")])
def test_the_dtype_of_choices_holds_the_id_of_none(experts, dtype):
    assert choices_dtype(experts) == dtype
    assert np.asarray(experts, choices_dtype(experts)) == experts


def test_a_record_has_experts_only():
    replay = jnp.asarray([[0, 6], [6, 7], [7, 7], [-1, 2], [3, 3]])
    assert is_recorded(replay, 7).tolist() == [True, False, False, False, True]


def test_agreement_is_the_share_of_own_experts_on_record_in_any_order():
    own = jnp.asarray([[0, 1, 2], [0, 1, 2], [0, 1, 2], [0, 1, 2], [0, 1, 2], [5, 5, 5]])
    replay = jnp.asarray([[2, 0, 1], [2, 4, 0], [3, 4, 1], [3, 4, 3], [5, 5, 5], [0, 1, 2]])
    # The fifth has no record, the last is padding; a prompt of two rows counts for both.
    multiplicity = jnp.asarray([1.0, 2.0, 1.0, 1.0, 3.0, 0.0])
    agreed, replayed = agreement(own, replay, multiplicity, num_experts=5)
    assert float(replayed) == 5
    np.testing.assert_allclose(agreed, 1 + 2 * 2 / 3 + 1 / 3, rtol=1e-6)
