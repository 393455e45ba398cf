"""Gradients summed over devices on the way: the same sums, and nothing that they wait for."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from small_runs import small_batch, small_model, small_recipe, small_run, small_setup
from three_updates import FAST_COMPILE, random_weights

from jrl.trainer.learner import update as of_update
from jrl.trainer.setup.network import network_of
from moe import placement
from moe.adapters import select_frozen, select_trained
from moe.config import Model
from moe.execution import Execution
from moe.weights import cast, table

ROWS, LAYERS, DENSE = 16, 2, 1


def setup_on(layout, overlaps, wire="float32", dtype="float32", lora_rank=None, **execution):
    run = small_run(layout=layout, gradient_wire=wire, lora_rank=lora_rank)
    setup = small_setup(small_recipe(), run)
    sizes = {"num_layers": DENSE + LAYERS, "num_dense_layers": DENSE, "dense_d_ff": 24}
    model = small_model(setup.tokenizer.vocab_size, **sizes, head="tied")
    execution = Execution(overlap_grad_reduce=overlaps, **execution)
    model = replace(network_of(model, run), dtype=dtype, execution=execution)
    return replace(setup, model=model)


def gradients(setup, num_micro, passes=None):
    """(weights, fixed ones) -> loss, gradient in parts, metrics, as a program of global arrays."""
    objective, batch = setup.networks.policy.objective, small_batch(setup, ROWS)
    if passes is not None:
        # The others have no tokens.
        there = np.arange(ROWS) % (ROWS // 2) < passes * ROWS // 2 // num_micro
        batch = replace(batch, valid=batch.valid & there[:, None], mask=batch.mask & there[:, None])
        passes = jnp.int32(passes)
    totals = of_update.count(batch)

    def program(weights, fixed):
        given = weights, fixed, batch, totals, passes
        return of_update._gradients(objective, setup.run.gradient_wire, num_micro, *given)

    return program


def weights_of(setup):
    weights = cast(random_weights(setup, setup.model), setup.model)
    if setup.model.lora is None:
        return weights, None
    statement = table(setup.model)
    return select_trained(weights, statement), select_frozen(weights, statement)


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def scattered(jaxpr):
    return [e for e in equations(jaxpr) if e.primitive.name == "reduce_scatter"]


def traced(num_micro, overlaps=True, **options):
    setup = setup_on("dp4", overlaps, **options)
    return jax.jit(gradients(setup, num_micro)).trace(*weights_of(setup)).jaxpr.jaxpr


def matrices(setup, stack):
    """How many weights of a layer are cut."""
    cuts = getattr(placement.shard_dims(Model(setup.model, setup.mesh)), stack)
    return sum(bool(cut.atoms) for cut in jax.tree.leaves(cuts))


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "selective", "full"])
def test_scanned_layers_are_reduced_in_each_iteration_backward(remat):
    """What the next iteration begins with waits for none of its sums."""
    program = traced(2, scan_layers=True, remat=remat)
    setup = setup_on("dp4", True)
    scans = [e for e in equations(program) if e.primitive.name == "scan"]
    for depth, stack in ((LAYERS, "layers"), (DENSE, "first_layers")):
        (backward,) = [
            e
            for e in scans
            if e.params["length"] == depth
            and e.params["reverse"]
            and len(scattered(e.params["jaxpr"].jaxpr)) == matrices(setup, stack)
        ]
        body = backward.params["jaxpr"].jaxpr
        # What is not stacked is carried.
        pairs = zip(body.outvars, backward.outvars, strict=True)
        carried = [inner for inner, outer in pairs if inner.aval.shape == outer.aval.shape]
        assert carried
        sums = {id(v) for e in scattered(body) for v in e.outvars}
        assert sums and not sums & depended(body, carried)


@pytest.mark.slow
def test_in_the_plain_order_no_loop_reduces():
    plain = traced(2, overlaps=False, scan_layers=True, remat="selective")
    loops = [e for e in equations(plain) if e.primitive.name == "scan"]
    assert scattered(plain) and not any(scattered(e.params["jaxpr"].jaxpr) for e in loops)


def depended(jaxpr, variables):
    """The ids of all variables that these are made of, themselves included."""
    made = {id(v): e for e in jaxpr.eqns for v in e.outvars}
    found, left = set(), [v for v in variables if id(v) in made]
    while left:
        variable = left.pop()
        if id(variable) in found or id(variable) not in made:
            continue
        found.add(id(variable))
        left += made[id(variable)].invars
    return found


@pytest.mark.parametrize("overlaps", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_no_sum_waits_for_the_layers_below(overlaps):
    """Of unrolled layers: sums of the last wait for fewest products, and sums of the first dense
    one for most. In the plain order all wait for all."""
    program = traced(1, overlaps=overlaps, scan_layers=False)
    (local,) = [e for e in equations(program) if e.primitive.name == "shard_map"]
    body = local.params["jaxpr"]
    products = {id(v) for e in equations(body) if is_product(e) for v in e.outvars}
    waits = sorted(len(products & depended(body, e.invars)) for e in scattered(body))
    if overlaps:
        # A layer's backward pass has at least two products for each of its matrices.
        per_layer = matrices(setup_on("dp4", True), "layers")
        of_top, of_next = waits[:per_layer][-1], waits[per_layer : 2 * per_layer][0]
        assert of_next - of_top >= 4 and waits[-1] > waits[per_layer] > waits[0]
    else:
        layers = matrices(setup_on("dp4", False), "layers")
        assert waits[0] >= waits[-1] - 2 and len(waits) > layers


def is_product(equation):
    return equation.primitive.name in ("dot_general", "ragged_dot")


def found(setup, num_micro, passes):
    program = jax.jit(gradients(setup, num_micro, passes), compiler_options=FAST_COMPILE)
    return jax.device_get(program(*weights_of(setup)))


CASES = {
    "in bfloat16": ("cp2 dp2 / ep2", 2, None, {"wire": "bfloat16", "dtype": "bfloat16"}),
    "in parts, of two halves": (
        *("dp2", 1, None),
        {"fsdp": True, "remat": "full", "scan_layers": True, "two_batch_overlap": True},
    ),
    "adapters, some passes": (
        *("dp2", 4, 2),
        {"lora_rank": 2, "remat": "selective", "scan_layers": True},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_sums_are_those_of_the_plain_order(case):
    layout, num_micro, passes, options = CASES[case]
    setups = (setup_on(layout, overlaps, **options) for overlaps in (True, False))
    found_early, found_plain = (found(setup, num_micro, passes) for setup in setups)

    def same(early, plain):
        # The same additions in the same order (`tests/sharding/test_layer_reduction.py`): the
        # compiler of a CPU multiplies and adds with one rounding in the one program and two in the
        # other.
        largest = np.max(np.abs(plain)) if np.size(plain) else 0
        np.testing.assert_allclose(early, plain, rtol=0, atol=2.0**-20 * largest)

    jax.tree.map(same, found_early, found_plain)
    assert all(np.any(leaf != 0) for leaf in jax.tree.leaves(found_early[1]))
