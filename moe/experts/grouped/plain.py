"""Reference implementation of grouped GEMM: every row times every matrix ("plain")."""

import jax
import jax.numpy as jnp

from moe.experts.grouped.groups import group_of_rows


def plain_multiply(side, rows, weights, sizes):
    in_group = jax.nn.one_hot(group_of_rows(sizes, rows.shape[0]), weights.shape[0], dtype=bool)
    # Set to zero before multiplying: rows of no group may hold NaN or infinity, and zero times
    # these is not zero.
    rows = jnp.where(in_group.any(axis=1)[:, None], rows, 0)
    formula = ("ri,gio->rgo", "ro,gio->rgi")[side]
    products = jnp.einsum(formula, rows, weights, preferred_element_type=jnp.float32)
    return jnp.sum(products, axis=1, where=in_group[:, :, None]).astype(rows.dtype)


def plain_sum(rows, others, sizes):
    in_group = jax.nn.one_hot(group_of_rows(sizes, rows.shape[0]), sizes.shape[0], dtype=bool)
    rows, others = (jnp.where(in_group.T[:, :, None], x[None], 0) for x in (rows, others))
    return jnp.einsum("gri,gro->gio", rows, others, preferred_element_type=jnp.float32)
