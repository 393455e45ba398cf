"""Layouts, permute and unpermute: the kernels against the plain twins, those against loops."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from annotations import unchecked
from programs import jit
from tiers import full_but

from benchmarks.kernel_cases import CASES, choices
from moe.experts.permutation import permute_rows, unpermute_rows
from moe.kernels.layout import sorted_layout

QUICK = ("empty slots", "little room")


def slots_of(case):
    return int(case.room * case.tokens * case.k)


def layout_of(case, implementation):
    options = {"num_slots": slots_of(case), "implementation": implementation}
    return jit(lambda ids: sorted_layout(ids, case.experts, **options))(choices(case))


def arrays(case, dtype):
    """Tokens, rows in the slots, what pulls at the tokens and at the slots."""
    draw = np.random.default_rng(3)
    shapes = ((case.tokens, case.width), (slots_of(case), case.width)) * 2
    return tuple(draw.normal(size=shape).astype(dtype) for shape in shapes)


def there_and_back(layout, implementation):
    """Permute and unpermute by a layout."""

    def permute(x):
        return permute_rows(x, layout.tokens, layout.slots, implementation=implementation)

    def unpermute(rows):
        return unpermute_rows(rows, layout.slots, layout.tokens, implementation)

    return permute, unpermute


def everything(implementation, case, dtype):
    """Values and gradients of both ways."""
    permute, unpermute = there_and_back(layout_of(case, implementation), implementation)

    def run(x, rows, pull, row_pull):
        there, back_there = jax.vjp(permute, x)
        home, back_home = jax.vjp(unpermute, rows)
        return there, *back_there(row_pull), home, *back_home(pull.astype(jnp.float32))

    return jit(run)(*arrays(case, dtype))


@cache
def looped_layout(case):
    """Choices expert by expert in the order of tokens."""
    ids = choices(case).reshape(-1).tolist()
    slots, found = [], [slots_of(case)] * len(ids)
    for expert in range(case.experts):
        for choice, chosen in enumerate(ids):
            if chosen == expert:
                found[choice] = min(len(slots), slots_of(case))
                slots.append(choice)
    slots = (slots + [len(ids)] * slots_of(case))[: slots_of(case)]
    sizes = [ids.count(expert) for expert in range(case.experts)]
    return slots, np.reshape(found, (case.tokens, case.k)).tolist(), sizes


@pytest.mark.parametrize("name", full_but(CASES, *QUICK, "empty experts", "of no expert"))
def test_plain_layouts_equal_a_loop_over_experts(name):
    case = CASES[name]
    assert [x.tolist() for x in layout_of(case, "plain")] == list(looped_layout(case))


@pytest.mark.parametrize("name", full_but(CASES, *QUICK))
def test_layouts_by_the_kernel_equal_a_loop_over_experts(name):
    case = CASES[name]
    assert [x.tolist() for x in layout_of(case, "interpreted")] == list(looped_layout(case))


@pytest.mark.parametrize("name", full_but(CASES, *QUICK))
def test_plain_values_and_gradients_equal_those_of_matrices(name):
    """A layout as a matrix of zeros and ones, in float64."""
    case = CASES[name]
    x, rows, pull, row_pull = (np.asarray(a, np.float64) for a in arrays(case, np.float32))
    places = np.asarray(looped_layout(case)[1])
    # [token, choice, slot]
    there = (places[:, :, None] == np.arange(slots_of(case))).astype(np.float64)
    expected = (
        np.einsum("tks,td->sd", there, x),
        np.einsum("tks,sd->td", there, row_pull),
        np.einsum("tks,sd->td", there, rows),
        np.einsum("tks,td->sd", there, pull),
    )
    found = everything("plain", case, jnp.float32)
    # Sums of k terms of order one.
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6 * case.k)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", full_but([jnp.float32, jnp.bfloat16], jnp.bfloat16))
@pytest.mark.parametrize("name", full_but(CASES, "empty slots"))
def test_kernels_equal_the_plain_twins(name, dtype):
    case = CASES[name]
    found, expected = (everything(which, case, dtype) for which in ("interpreted", "plain"))
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        a, b = (np.asarray(array, np.float32) for array in (a, b))
        # Both add in float32, in another order: they round to neighbours at most.
        rounding = 2**-7 if dtype == jnp.bfloat16 else 1e-6
        np.testing.assert_allclose(a, b, atol=1e-6 * case.k, rtol=rounding)


@pytest.mark.parametrize("implementation", ["plain", "interpreted"])
def test_empty_slots_reach_no_result(implementation):
    case = CASES["empty slots"]
    layout = layout_of(case, implementation)
    empty = np.asarray(layout.assignments) >= case.tokens * case.k
    assert empty.any() and (np.asarray(layout.slots) >= slots_of(case)).any()
    _, rows, pull, _ = arrays(case, jnp.float32)
    _, unpermute = there_and_back(layout, implementation)

    @jit
    def run(rows, pull):
        out, back = jax.vjp(unpermute, rows)
        return out, *back(pull)

    expected = run(rows, pull)
    found = run(np.where(empty[:, None], np.float32(np.nan), rows), pull)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert not np.asarray(found[1])[empty].any()


def test_a_kernel_that_cannot_serve_says_why():
    case = CASES["even"]
    layout = layout_of(case, "plain")
    permute, _ = there_and_back(layout, "mosaic")
    with pytest.raises(
        ValueError, match=r"take is not supported: .* a multiple of 128 .* use None"
    ):
        permute(jnp.ones((case.tokens, 96)))
    message = r"is not supported: rows of int8 .* bfloat16, .* use None"
    with pytest.raises(ValueError, match=message), unchecked():
        permute(jnp.ones((case.tokens, 128), jnp.int8))
    with pytest.raises(ValueError, match=r"of take runs on NVIDIA GPUs .* lowered for cpu: use"):
        permute(jnp.ones((case.tokens, 128)))
    with pytest.raises(
        ValueError, match=r"implementation='triton' of take is not known: choose among 'mosaic'"
    ):
        there_and_back(layout, "triton")[0](jnp.ones((case.tokens, 128)))
    with pytest.raises(ValueError, match=r"of sorted_layout runs on NVIDIA GPUs .* for cpu"):
        layout_of(case, "mosaic")


def test_none_is_plain_without_a_gpu_and_where_the_kernel_cannot_serve():
    case = CASES["even"]._replace(width=96)
    found, expected = (everything(which, case, jnp.float32) for which in (None, "plain"))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
