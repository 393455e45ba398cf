"""Rematerialisation (gradient checkpointing): activations that the backward pass of a block
recomputes instead of saving them.

By policy, a block saves

* "none": everything that a gradient needs;
* "selective": its input and the residual stream between attention and feed-forward layer; queries,
  keys and values, the attention output and the log-sum-exp of each query's scores; gate and up, of
  experts and of dense layers. It saves logits and expert ids of a router (of a kernel the gate
  weights, too), and the results of all-reduces. Norms, gathers of tokens, dispatch, permutations
  and activations are recomputed, and none of that waits for the incoming gradient
  (`save_only_named`). For T tokens of a device, of width h, with k experts of f h hidden units and
  query heads of total width q h, m for each key/value head, these are ``(2 k f + 2 + 2 q + 2 q / m)
  T h`` elements, and in addition a few numbers for each token; and ``2 f h`` for each unused row of
  the expert buffers;
* "projections": the same without queries, keys and values: the products that compute them are
  repeated, with the rest. They take most memory for what it costs to recompute them: ``(q + 2 q /
  m) h`` elements per token, of ``2 h`` operations each;
* "full": its input and the results of collectives over tokens. Costs one more forward pass without
  its communication.

Sharded weights (`Execution.fsdp`) are gathered again by a layer's backward pass.

A pipeline stage saves this for each chunk of layers and micro-batch that is between its forward and
its backward pass (`sharding.pipeline`), as many as the schedule has in flight
(`sharding.schedule.Schedule.slots`), and a pipeline changes nothing in how often each layer runs
and communicates.

References:
  Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022.
  https://arxiv.org/abs/2205.05198
  Jin et al., "MegaScale-MoE", 2025, section 3.3 (what "selective" keeps and repeats).
  https://arxiv.org/abs/2505.11432
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import core, lax
from jax.interpreters.partial_eval import dce_jaxpr
from jaxtyping import Array

from sharding.collectives import COLLECTIVE, SUM, vary

PRODUCT = "product"
"""The name of gate and up, side by side."""

DISPATCHED = "dispatched"
"""The name of tokens that came from other devices to the experts of this one."""

OPERAND = "operand"
"""The name of queries, keys and values on the devices that attend with them."""

PROJECTED = "projected"
"""The name of the results of products on the way to queries, keys and values."""

ATTENDED = "attended"
"""The name of the attention output, and of the log-sum-exp of each query's scores."""

RING = "ring"
"""The name of both if they were computed from what other devices sent."""

STREAM = "stream"
"""The name of the residual stream between the attention and feed-forward terms of a block."""

ROUTED = "routed"
"""The name of a router's logits and expert ids, and of the gate weights and counts that a kernel
returns with them."""

CUDNN = "dot_product_attention_fwd_wrapper"
"""The primitive of cuDNN's attention, which returns output and log-sum-exp unnamed."""

SAVED = frozenset({PRODUCT, OPERAND, ATTENDED, RING, CUDNN, STREAM, ROUTED, SUM})
"""Names of the values that "selective" saves."""

SAVED_BEFORE_NORMS = (SAVED - {OPERAND}) | {PROJECTED}
"""The same if norms or further products follow the first products: these are recomputed."""

UNSAVED = {"selective": frozenset[str](), "projections": frozenset({OPERAND, PROJECTED})}
"""Names that policies which save values by name do not save."""

POLICIES = ("none", *UNSAVED, "full")


def rematerialise(
    function: Callable[..., Any],
    policy: str,
    in_scan: bool = False,
    saved: Collection[str] = SAVED,
    present: Array | None = None,
) -> Callable[..., Any]:
    """Wraps `function` in a remat policy; values and gradients stay the same.

    Args:
      function: function of arrays alone; policies of `UNSAVED` have no gradient for closed-over
        arrays.
      in_scan, present: as for `save_only_named`; policies of `UNSAVED` alone have the second.
      saved: names of the values that "selective" saves.

    Raises:
      ValueError: on an unknown policy.
    """
    if policy not in POLICIES:
        raise ValueError(f"execution.remat={policy!r} is not known: use {', '.join(POLICIES)}.")
    if policy == "none":
        return function
    if policy in UNSAVED:
        return save_only_named(function, frozenset(saved) - UNSAVED[policy], in_scan, present)
    # `jax.checkpoint` has a barrier over the gradient too. "full" needs it: whatever is recomputed
    # early stays in memory from then on.
    save = jax.checkpoint_policies.save_only_these_names(COLLECTIVE, SUM, RING, DISPATCHED)
    return jax.checkpoint(function, policy=save, prevent_cse=not in_scan)


def save_only_named(
    function: Callable[..., Any],
    names: Collection[str],
    in_scan: bool = False,
    present: Array | None = None,
) -> Callable[..., Any]:
    """Wraps `function` so that its backward pass saves the arguments and the values with one of the
    `names`, and recomputes the rest.

    Names are given by `jax.ad_checkpoint.checkpoint_name`, outside of loops and branches, or are
    names of primitives, of which all results are named. A named value is saved if a gradient needs
    it; the computation that led to it is then not repeated.

    `jax.checkpoint` puts a barrier over the saved values *and* the incoming gradient, so that
    nothing is recomputed before that gradient exists. Here recomputation depends on the saved
    values alone: a scheduler may overlap it, and above all its collectives, with earlier parts of
    the backward pass. The reference implementation is the function itself, with the gradient that
    JAX computes.

    Args:
      function: function of pytrees of arrays. There is no gradient for closed-over arrays.
      names: names of values to save.
      in_scan: it is the body of a scan, whose separate forward and backward loops already keep the
        compiler from computing a value once and saving it.
      present: ``[]`` true if it runs at all. If not, its result and its gradients are zeros, and
        nothing of it is computed or communicated, forward or backward.
    """

    def run(*args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)
        passes = _trace_passes(lambda xs: function(*structure.unflatten(xs)), leaves, names)
        operands = [leaves, passes.program.consts, [] if present is None else [present]]

        def where_present(
            flags: list[Array], compute: Callable[..., list[Array]], *arguments: Any
        ) -> list[Array]:
            if not flags:
                return compute(*arguments)
            return lax.cond(flags[0], compute, _zeros_like_outputs(compute, *arguments), *arguments)

        @jax.custom_vjp
        def rematerialised(operands: list[list[Array]]) -> list[Array]:
            return where_present(operands[2], passes.results, operands[0] + operands[1])

        def forward(operands: list[list[Array]]) -> tuple[list[Array], Any]:
            inputs = operands[0] + operands[1]
            outs = where_present(operands[2], passes.forward, inputs)
            cut = len(outs) - len(passes.named)
            return outs[:cut], (passes.inputs_of(inputs), outs[cut:], operands[2])

        def backward(residuals: Any, gradients: list[Any]) -> Any:
            if not in_scan:
                # A barrier over the saved values, so that the compiler cannot merge recomputation
                # with the forward pass; none over the gradients, for which recomputation need not
                # wait. One barrier for each: arrays keep their types and do not wait for each
                # other.
                residuals = jax.tree.map(lax.optimization_barrier, residuals)
            inputs, named, flags = residuals
            float_gradients = [x for x in gradients if _is_float(x)]
            arg_gradients = where_present(flags, passes.backward, inputs, named, float_gradients)
            remaining = iter(arg_gradients)
            return (
                [
                    [next(remaining) if is_float else None for is_float in passes.floats],
                    [None] * len(passes.program.consts),
                    [None] * len(flags),
                ],
            )

        rematerialised.defvjp(forward, backward)
        return passes.structure.unflatten(rematerialised(operands))

    return run


@dataclass(frozen=True)
class _Passes:
    """Traced forward and backward passes of a function.

    Attributes:
      program: jaxpr of the forward pass with residuals: from the arguments to results and
        residuals.
      structure: tree structure of the results.
      vjp_tree: tree structure of the backward pass as a function of residuals.
      floats: true for arguments that have a gradient.
      repeat: jaxpr from the constants, arguments and `named` values to the residuals.
      used: indices of the inputs that `repeat` takes.
      named: values of the program that are saved.
    """

    program: Any
    structure: Any
    vjp_tree: Any
    floats: list[bool]
    repeat: Any
    used: list[int]
    named: list[Any]

    def results(self, inputs: list[Array]) -> list[Array]:
        """Results, from the arguments and the constants."""
        return self._evaluate(self.program.jaxpr.outvars[: self.structure.num_leaves], inputs)

    def forward(self, inputs: list[Array]) -> list[Array]:
        """Results, and the values that are saved."""
        results = self.program.jaxpr.outvars[: self.structure.num_leaves]
        return self._evaluate([*results, *self.named], inputs)

    def inputs_of(self, inputs: list[Array]) -> list[Array]:
        """Inputs that are saved."""
        return [inputs[index] for index in self.used]

    def backward(self, inputs: list[Array], named: list[Array], gradients: Any) -> list[Array]:
        """Gradients of the arguments that have one."""
        residuals = core.eval_jaxpr(self.repeat, (), *inputs, *named)
        return self.vjp_tree.unflatten(residuals)(gradients)[0]

    def _evaluate(self, outvars: list[Any], inputs: list[Array]) -> list[Array]:
        names = self.program.jaxpr.debug_info.with_unknown_names()
        jaxpr = self.program.jaxpr.replace(outvars=outvars, debug_info=names)
        num_inputs = len(jaxpr.invars)
        pruned, used = dce_jaxpr(jaxpr, [True] * len(outvars))
        args, consts = inputs[:num_inputs], inputs[num_inputs:]
        return core.eval_jaxpr(
            pruned, consts, *(x for x, is_used in zip(args, used, strict=True) if is_used)
        )


def _trace_passes(
    function: Callable[[list[Array]], Any], arguments: list[Array], names: Collection[str]
) -> _Passes:
    floats = [_is_float(x) for x in arguments]
    structures: list[Any] = []

    def run(arguments: list[Array]) -> tuple[list[Array], list[Array]]:
        def of_float_leaves(float_leaves: list[Array]) -> tuple[list[Array], list[Array]]:
            remaining = iter(float_leaves)
            leaves = [next(remaining) if f else x for f, x in zip(floats, arguments, strict=True)]
            results, structure = jax.tree.flatten(function(leaves))
            structures.append(structure)
            return [x for x in results if _is_float(x)], results

        float_leaves = [x for f, x in zip(floats, arguments, strict=True) if f]
        _, vjp_fn, results = jax.vjp(of_float_leaves, float_leaves, has_aux=True)
        residuals, structure = jax.tree.flatten(vjp_fn)
        structures.append(structure)
        return results, residuals

    program = jax.make_jaxpr(run)(arguments)
    structure, vjp_tree = structures
    jaxpr = program.jaxpr
    named = [v for equation in jaxpr.eqns if _name_of(equation) in names for v in equation.outvars]
    inputs = [*jaxpr.invars, *jaxpr.constvars]
    cut = set(map(id, named))
    equations = [e for e in jaxpr.eqns if not any(id(v) in cut for v in e.outvars)]
    residuals = jaxpr.outvars[structure.num_leaves :]
    repeat = jaxpr.replace(
        invars=[*inputs, *named],
        outvars=residuals,
        eqns=equations,
        constvars=[],
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    repeat, is_used = dce_jaxpr(repeat, [True] * len(residuals))
    used = [index for index, is_used in enumerate(is_used) if is_used]
    return _Passes(
        program,
        structure,
        vjp_tree,
        floats,
        repeat,
        [index for index in used if index < len(inputs)],
        [named[index - len(inputs)] for index in used if index >= len(inputs)],
    )


def _name_of(equation: Any) -> str:
    name = equation.primitive.name
    return equation.params["name"] if name == "name" else name


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _zeros_like_outputs(
    compute: Callable[..., list[Array]], *operands: Any
) -> Callable[..., list[Array]]:
    """Function that returns zeros of the output types of `compute`."""
    likes = jax.eval_shape(compute, *operands)

    def zeros(like: Any) -> Array:
        axes = like.manual_axis_type
        return vary(
            jnp.zeros(like.shape, like.dtype), () if axes is None else tuple(sorted(axes.varying))
        )

    return lambda *_: [zeros(like) for like in likes]
