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
from moe.kernels.layout import permute, slots_needed, sorted_layout, unpermute

QUICK = ("tiles", "little room")


def slots_of(case):
    return int(case.room * slots_needed(case.tokens * case.k, case.experts, case.tile))


def layout_of(case, implementation):
    options = {"tile": case.tile, "num_slots": slots_of(case), "implementation": implementation}
    return jit(lambda ids: sorted_layout(ids, case.experts, **options))(choices(case))


def arrays(case, dtype):
    """Tokens, what pulls at the slots, probs, and what pulls at the tokens."""
    draw = np.random.default_rng(3)
    shapes = ((case.tokens, case.width), (slots_of(case), case.width)) * 2
    x, rows, pull, row_pull = (draw.normal(size=shape).astype(dtype) for shape in shapes)
    probs = draw.random((case.tokens, case.k)).astype(np.float32)
    return x, rows, pull, row_pull, probs


def everything(implementation, case, dtype):
    """Values and gradients of both ways, with probs and without."""
    layout = layout_of(case, implementation)

    def run(x, rows, pull, row_pull, probs):
        named = {"implementation": implementation}
        there, back_there = jax.vjp(lambda x: permute(x, layout, **named), x)
        home, back_home = jax.vjp(lambda rows: unpermute(rows, layout, **named), rows)
        weighed, back = jax.vjp(lambda *of: unpermute(of[0], layout, of[1], **named), rows, probs)
        return there, *back_there(row_pull), home, *back_home(pull), weighed, *back(pull)

    return jit(run)(*arrays(case, dtype))


@cache
def looped_layout(case):
    """Choices expert by expert in the order of tokens, each expert from a multiple of the tile."""
    ids = choices(case).reshape(-1).tolist()
    slots, found = [], [slots_of(case)] * len(ids)
    for expert in range(case.experts):
        slots += [len(ids)] * (-len(slots) % case.tile)
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
    x, rows, pull, row_pull, probs = (np.asarray(a, np.float64) for a in arrays(case, np.float32))
    places = np.asarray(looped_layout(case)[1])
    # [token, choice, slot]
    there = (places[:, :, None] == np.arange(slots_of(case))).astype(np.float64)
    expected = (
        np.einsum("tks,td->sd", there, x),
        np.einsum("tks,sd->td", there, row_pull),
        np.einsum("tks,sd->td", there, rows),
        np.einsum("tks,td->sd", there, pull),
        np.einsum("tks,sd,tk->td", there, rows, probs),
        np.einsum("tks,td,tk->sd", there, pull, probs),
        np.einsum("tks,sd,td->tk", there, rows, pull),
    )
    found = everything("plain", case, jnp.float32)
    # Sums of k products of order one, and of a row's.
    for a, b, terms in zip(found, expected, [case.k] * 6 + [case.width], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6 * terms)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", full_but([jnp.float32, jnp.bfloat16], jnp.bfloat16))
@pytest.mark.parametrize("name", full_but(CASES, "tiles"))
def test_kernels_equal_the_plain_twins(name, dtype):
    case = CASES[name]
    found, expected = (everything(which, case, dtype) for which in ("interpreted", "plain"))
    for a, b, terms in zip(found, expected, [case.k] * 6 + [case.width], strict=True):
        assert a.dtype == b.dtype
        a, b = (np.asarray(array, np.float32) for array in (a, b))
        # Both add in float32, in another order; where they round, to neighbours at most.
        rounding = 2**-7 if dtype == jnp.bfloat16 and terms == case.k else 1e-6
        np.testing.assert_allclose(a, b, atol=1e-6 * terms, rtol=rounding)


@pytest.mark.parametrize("implementation", ["plain", "interpreted"])
def test_what_is_in_empty_slots_reaches_nothing(implementation):
    case = CASES["tiles"]
    layout = layout_of(case, implementation)
    empty = np.asarray(layout.assignments) >= case.tokens * case.k
    assert empty.any() and (np.asarray(layout.slots) >= slots_of(case)).any()
    _, rows, pull, _, probs = arrays(case, jnp.float32)

    @jit
    def run(rows, probs, pull):
        out, back = jax.vjp(
            lambda *of: unpermute(of[0], layout, of[1], implementation=implementation), rows, probs
        )
        return out, *back(pull)

    expected = run(rows, probs, pull)
    found = run(np.where(empty[:, None], np.float32(np.nan), rows), probs, pull)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert not np.asarray(found[1])[empty].any()


def test_a_kernel_that_cannot_serve_says_why():
    case = CASES["even"]
    layout = layout_of(case, "plain")
    named = {"implementation": "mosaic"}
    with pytest.raises(
        ValueError, match=r"take is not supported: .* a multiple of 128 .* use None"
    ):
        permute(jnp.ones((case.tokens, 96)), layout, **named)
    message = r"is not supported: rows of int8 .* bfloat16, .* use None"
    with pytest.raises(ValueError, match=message), unchecked():
        permute(jnp.ones((case.tokens, 128), jnp.int8), layout, **named)
    with pytest.raises(ValueError, match=r"of take runs on NVIDIA GPUs .* lowered for cpu: use"):
        permute(jnp.ones((case.tokens, 128)), layout, **named)
    with pytest.raises(
        ValueError, match=r"implementation='triton' of take is not known: choose among 'mosaic'"
    ):
        permute(jnp.ones((case.tokens, 128)), layout, implementation="triton")
    with pytest.raises(ValueError, match=r"of sorted_layout runs on NVIDIA GPUs .* for cpu"):
        layout_of(case, "mosaic")


def test_none_is_plain_without_a_gpu_and_where_the_kernel_cannot_serve():
    case = CASES["even"]._replace(width=96)
    found, expected = (everything(which, case, jnp.float32) for which in (None, "plain"))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
