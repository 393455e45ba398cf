"""Rules of arrays that hold for any implementation of a quantity.

Each is tried on one case of the quantity: calls, and what their results must be if the function
gave `base` for the case itself. No rule needs the right value.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .cases import Case
from .frameworks import Call, Results
from .views import View, compressed, padded, shape_of, view

BY_GROUP = (
    *("grpo_advantages", "dr_grpo_advantages", "rloo_advantages", "maxrl_advantages"),
    *("opo_advantages", "pass_at_k_advantages", "pass_at_k_exact_advantages"),
    "token_level_group_average",
)
"""Advantages that depend on the responses to the same prompt alone."""
OF_THE_BATCH = ("clip_cov_loss", "kl_cov_loss", "positive_example_loss")
"""Losses that choose tokens of the whole batch, or that count those of some rows alone."""
CONSTANTS = ("old_logprobs", "advantages", "old_values", "returns", "signal", "importance_weights")
"""Inputs that carry no gradient."""
SINGLE = 1e-4
"""Of float32 beside float64: six digits less what sums and exponentials lose."""


@dataclass(frozen=True)
class Trial:
    """Calls, and the right results of each by the function's own results for the case.

    Attributes:
      right: from the results for the case to those of each call; results that are left out are not
        compared, nor are entries of NaN.
      base: the call whose results are the base, if it is not the case itself.
      summed: whether the losses of the calls are added up before they are compared.
      tolerance: if arithmetic asks for more than the one of the whole check.
      missing: a keyword that the function needs for this and does not take.
    """

    calls: Sequence[Call]
    right: Callable[[Results], Sequence[Results]]
    base: Call | None = None
    summed: bool = False
    tolerance: float | None = None
    missing: str = ""


@dataclass(frozen=True)
class Rule:
    """A property, the trials of a case (none if it says nothing), and whether it is needed.

    What is not needed is what a caller may see to: that constants are detached, for example.
    """

    name: str
    says: str
    trials: Callable[[Case, tuple[str, ...]], Iterator[Trial]]
    needed: bool = True


def _same(*views: View) -> Callable[[Results], list[Results]]:
    """The results of the case in other layouts; what is new is not compared, but for gradients."""

    def right(base: Results) -> list[Results]:
        return [
            {n: v(x, 0 if n.startswith("gradient") else np.nan) for n, x in base.items()}
            for v in views
        ]

    return right


def _unchanged(base: Results) -> list[Results]:
    return [base]


def _masked(case: Case, value: float | int) -> Call:
    """The call with a value wherever the mask is false."""
    mask = case.inputs["mask"].astype(bool)

    def hide(x: np.ndarray) -> np.ndarray:
        if x.shape[:2] != mask.shape or x.dtype.kind != "f":
            return x
        return np.where(mask.reshape(*mask.shape, *[1] * (x.ndim - 2)), x, value)

    laid = {n: hide(x) for n, x in case.settings.items() if isinstance(x, np.ndarray)}
    inputs = {n: hide(x) for n, x in case.inputs.items()}
    return Call(inputs, {**case.settings, **laid}, case.by)


def _micro_batches(case: Case, accepts: tuple[str, ...]) -> Iterator[Trial]:
    rows = shape_of(case)[0]
    loss = "loss" in case.results and case.results["loss"].ndim == 0
    if not loss or case.quantity in OF_THE_BATCH or rows < 4 or "mask" not in case.inputs:
        return
    mask = case.inputs["mask"].astype(bool)
    full = {"num_tokens": int(mask.sum()), "num_sequences": int(mask.any(1).sum())}
    counts = {name: x for name, x in full.items() if name in accepts}
    mode = case.settings.get("aggregation")
    needs = {None: [*full], "token-mean": ["num_tokens"], "token-sum": []}
    needs = needs.get(mode, ["num_sequences"])
    if needs and not counts.keys() & needs:
        yield Trial([], _unchanged, missing=f"takes no {' or '.join(needs)} of the whole batch")
        return
    for pieces in (2, 4):
        cuts = [view(case, piece) for piece in np.array_split(np.arange(rows), pieces)]
        yield Trial(
            [cut.call(case, case.by, **counts) for cut in cuts],
            lambda base, cuts=cuts: [
                {n: x if n == "loss" else cut(x, 0) for n, x in base.items() if _of_loss(n)}
                for cut in cuts
            ],
            summed=True,
        )


def _of_loss(name: str) -> bool:
    return name == "loss" or name.startswith("gradient")


def _row_order(case: Case, accepts: tuple[str, ...]) -> Iterator[Trial]:
    if shape_of(case)[0] > 1:
        order = np.arange(shape_of(case)[0])[::-1]
        turned = view(case, np.roll(order, len(order) > 2))
        yield Trial([turned.call(case, case.by)], _same(turned))


def _padding(case: Case, accepts: tuple[str, ...]) -> Iterator[Trial]:
    if "mask" in case.inputs:
        wider = padded(case)
        yield Trial([wider.call(case, case.by)], _same(wider))


def _empty_rows(case: Case, accepts: tuple[str, ...]) -> Iterator[Trial]:
    if "mask" in case.inputs:
        longer = view(case, [*range(shape_of(case)[0]), -1])
        yield Trial([longer.call(case, case.by)], _same(longer))


def _holes(case: Case, accepts: tuple[str, ...]) -> Iterator[Trial]:
    if "mask" in case.inputs:
        dense = compressed(case)
        yield Trial([dense.call(case, case.by)], _same(dense))


def _poison(*values: float | int) -> Callable[[Case, tuple[str, ...]], Iterator[Trial]]:
    def trials(case: Case, accepts: tuple[str, ...]) -> Iterator[Trial]:
        if "mask" in case.inputs and not case.inputs["mask"].all():
            for value in values:
                yield Trial([_masked(case, value)], _unchanged)

    return trials


def hidden(case: Case, results: Results, value: float | int = np.nan) -> Results:
    """Results with a value under the mask; gradients stay."""
    if "mask" not in case.inputs:
        return results
    mask = case.inputs["mask"].astype(bool)
    return {
        name: np.where(mask, x, value) if x.shape == mask.shape and not _of_loss(name) else x
        for name, x in results.items()
    }


def _no_token(case: Case, accepts: tuple[str, ...]) -> Iterator[Trial]:
    if "mask" in case.inputs:
        inputs = {**case.inputs, "mask": np.zeros_like(case.inputs["mask"])}
        yield Trial(
            [Call(inputs, case.settings, case.by)],
            lambda base: [{name: np.zeros_like(x) for name, x in base.items()}],
        )


def _mask_dtypes(case: Case, accepts: tuple[str, ...]) -> Iterator[Trial]:
    for dtype in (bool, np.int32, np.float32):
        if "mask" in case.inputs:
            inputs = {**case.inputs, "mask": case.inputs["mask"].astype(dtype)}
            yield Trial([Call(inputs, case.settings, case.by)], _unchanged)


def _zeros(case: Case, accepts: tuple[str, ...]) -> Iterator[Trial]:
    if "mask" in case.inputs:
        call = Call(case.inputs, case.settings, case.by)
        yield Trial([call], lambda base: [hidden(case, base, 0)])


def _separate_groups(case: Case, accepts: tuple[str, ...]) -> Iterator[Trial]:
    if case.quantity in BY_GROUP and case.settings.get("scale") != "batch":
        groups = case.inputs["groups"]
        for group in np.unique(groups):
            lone = view(case, np.flatnonzero(groups == group))
            yield Trial([lone.call(case, case.by)], _same(lone))


def _group_names(case: Case, accepts: tuple[str, ...]) -> Iterator[Trial]:
    if "groups" in case.inputs:
        inputs = {**case.inputs, "groups": 100 - case.inputs["groups"]}
        yield Trial([Call(inputs, case.settings, case.by)], _unchanged)


def _equal_rewards(case: Case, accepts: tuple[str, ...]) -> Iterator[Trial]:
    if case.quantity not in BY_GROUP or case.inputs["rewards"].ndim > 1:
        return
    groups = case.inputs["groups"]
    multiple = (groups[:, None] == groups).sum(1) > 1

    def right(base: Results) -> list[Results]:
        remaining = {n: multiple.reshape(-1, *[1] * (x.ndim - 1)) for n, x in base.items()}
        return [{n: np.where(remaining[n], np.zeros_like(x), np.nan) for n, x in base.items()}]

    # Three times a tenth is not 0.3: the mean of three equal rewards is another number.
    rewards = np.full_like(case.inputs["rewards"], 0.1, float)
    for dtype in (float, np.float32):
        inputs = {**case.inputs, "rewards": rewards.astype(dtype)}
        # 1e-7 of rounding over an epsilon of 1e-6 would be an advantage of 0.1.
        yield Trial([Call(inputs, case.settings)], right, tolerance=1e-3)


def _extreme_ratios(case: Case, accepts: tuple[str, ...]) -> Iterator[Trial]:
    if not {"logprobs", "old_logprobs", "advantages", "mask"} <= case.inputs.keys():
        return
    side = np.where(case.inputs["advantages"] > 0, 1.0, -1.0)
    logprobs = case.inputs["old_logprobs"] + 100 * side
    far = replace(case, inputs={**case.inputs, "logprobs": logprobs})

    def right(base: Results) -> list[Results]:
        # On this side of a clip the gradient is 0; infinity times 0 would be NaN.
        return [{n: np.zeros_like(x) for n, x in base.items() if n.startswith("gradient")}]

    if case.quantity in CLIPPED:
        yield Trial([_cast(far, np.float32)], right, tolerance=SINGLE)


CLIPPED = ("ppo_loss", "dapo_loss", "hapo_loss")
"""Losses whose gradient vanishes beyond the clip."""


def _cast(case: Case, dtype: type) -> Call:
    def cast(x: object) -> object:
        return x.astype(dtype) if isinstance(x, np.ndarray) and x.dtype.kind == "f" else x

    inputs = {name: cast(x) for name, x in case.inputs.items()}
    return Call(inputs, {n: cast(x) for n, x in case.settings.items()}, case.by)  # type: ignore[arg-type]


def _single(case: Case, accepts: tuple[str, ...]) -> Iterator[Trial]:
    yield Trial([_cast(case, np.float32)], _unchanged, tolerance=SINGLE)


def _rounded(x: np.ndarray) -> np.ndarray:
    """Numbers that bfloat16 has: the upper half of the bits of a float32."""
    bits = x.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return bits.view(np.float32)


def _half(case: Case, accepts: tuple[str, ...]) -> Iterator[Trial]:
    if not all(isinstance(x, np.ndarray) and x.ndim for x in case.inputs.values()):
        return
    rounded = {name: _rounded(x) if x.dtype.kind == "f" else x for name, x in case.inputs.items()}
    steps = {n: x for n, x in case.settings.items() if not isinstance(x, np.ndarray)}
    single = _cast(replace(case, inputs=rounded, settings=steps), np.float32)
    # A gradient by them has their own seven bits.
    half = replace(single, half=True, by=())
    yield Trial([half], _unchanged, base=replace(single, by=()), tolerance=SINGLE)


def _constants(case: Case, accepts: tuple[str, ...]) -> Iterator[Trial]:
    constants = tuple(name for name in CONSTANTS if name in case.inputs)
    if case.by and constants:
        yield Trial(
            [Call(case.inputs, case.settings, (*case.by, *constants))],
            lambda base: [
                base | {f"gradient by {n}": np.zeros(case.inputs[n].shape) for n in constants}
            ],
        )


RULES = {
    rule.name: rule
    for rule in (
        Rule("micro-batches", "1, 2 and 4 micro-batches sum to one loss and gradient",
             _micro_batches),
        Rule("row order", "results follow the order of the rows", _row_order),
        Rule("padding", "columns under the mask, before and behind, change nothing", _padding),
        Rule("empty rows", "a row without a true token changes nothing", _empty_rows, needed=False),
        Rule("holes", "true tokens closed up give what they gave with holes", _holes),
        Rule("masked values", "finite values under the mask change nothing", _poison(-3.0, 5.0)),
        Rule("masked NaN", "NaN, infinity or 1e30 under the mask changes nothing",
             _poison(np.nan, np.inf, -np.inf, 1e30), needed=False),
        Rule("no token", "a batch without a true token gives 0", _no_token, needed=False),
        Rule("mask dtypes", "bool, int32 and float32 masks are one mask", _mask_dtypes,
             needed=False),
        Rule("zeros under the mask", "results per token are 0 under the mask", _zeros,
             needed=False),
        Rule("groups apart", "a group alone gives what it gave beside others, of any size",
             _separate_groups),
        Rule("group names", "other numbers for the groups change nothing", _group_names),
        Rule("equal rewards", "groups of equal rewards have advantages 0", _equal_rewards),
        Rule("extreme ratios", "clipped tokens with log-ratios of 100 have gradient 0",
             _extreme_ratios, needed=False),
        Rule("float32", "float32 inputs give the same to 1e-4", _single),
        Rule("bfloat16", "bfloat16 inputs are computed in float32", _half, needed=False),
        Rule("constants", "no gradient by old policy, advantages and other constants",
             _constants, needed=False),
    )
}  # fmt: skip
"""All rules by name."""
