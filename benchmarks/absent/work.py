"""Work of the instructions of a scheduled program: floating-point operations and bytes.

Products of matrices count, in fusions too, with the calls of libraries and kernels that multiply;
elementwise arithmetic does not. Bytes are of operands and results (`benchmarks.absent.traffic`).
"""

import math
import re
from dataclasses import dataclass

from benchmarks.absent.traffic import Program, traffic
from sharding.overlap import Instruction, shapes_of_type

FREE = {
    *("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "domain"),
    *("partition-id", "replica-id", "opt-barrier", "add-dependency", "async-update", "iota"),
}
"""Operations that move no data."""
ATTENTION_PRODUCTS = {
    "attention_forward": 2,
    "attention_grad_query": 3,
    "attention_grad_key_value": 4,
}
"""Products of queries by keys, or of equal size, in each kernel."""
PROMPT, RESPONSE = 512, 1536
"""Tokens of the sequences of a step (`benchmarks.absent.steps.Step`), which is what no shape of
an attention kernel tells."""


@dataclass(frozen=True)
class Work:
    """Work of instructions.

    Attributes:
      flops: floating-point operations of products.
      bytes: that are read and written.
    """

    flops: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    def __mul__(self, times: float) -> "Work":
        return Work(self.flops * times, self.bytes * times)

    def seconds(self, peak: float, bandwidth: float) -> float:
        """The least time that it takes, by FLOP/s and bytes/s."""
        return max(self.flops / peak, self.bytes / bandwidth)


def work_of(instruction: Instruction, own: dict[str, Instruction], program: Program) -> Work:
    """Work of an instruction that is neither a collective nor control flow.

    Args:
      own: instructions of its computation by name.
    """
    if instruction.operation in FREE or instruction.operation.endswith("-done"):
        return Work()
    operands = [own[name] for name in instruction.operands if name in own]
    return Work(_flops(instruction, operands, program), traffic(instruction, operands, program))


def _flops(instruction: Instruction, operands: list[Instruction], program: Program) -> float:
    operation = instruction.operation
    if operation == "dot":
        match = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
        return _product_flops(instruction, operands, match[1] if match else "")
    if operation == "convolution":
        return _convolution_flops(instruction, operands)
    if operation == "custom-call":
        return _call_flops(instruction, operands)
    total = 0.0
    for name in instruction.called:
        inner = program.get(name, [])
        by_name = {one.name: one for one in inner}
        total += sum(work_of(one, by_name, program).flops for one in inner)
    return total


def _product_flops(instruction: Instruction, operands: list[Instruction], dims: str) -> float:
    """``2 x elements of the result x contracted elements``; dims: those of the left operand."""
    _, result = shapes_of_type(instruction.result)[0]
    _, left = shapes_of_type(operands[0].result)[0]
    contracted = math.prod(left[int(dim)] for dim in dims.split(",") if dim)
    return 2.0 * math.prod(result) * contracted


def _convolution_flops(instruction: Instruction, operands: list[Instruction]) -> float:
    """A TPU's compiler writes products as convolutions, whose windows are batch dimensions: the
    features of the input are those that are contracted."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    _, result = shapes_of_type(instruction.result)[0]
    _, kernel = shapes_of_type(operands[1].result)[0]
    return 2.0 * math.prod(result) * (kernel[labels[2].index("i")] if labels else 1)


def _call_flops(instruction: Instruction, operands: list[Instruction]) -> float:
    target = re.search(r'custom_call_target="([^"]*)"', instruction.attributes)
    name = target[1] if target else ""
    if name.startswith("__cublas"):
        dims = re.search(r'lhs_contracting_dimensions":\[([^\]]*)\]', instruction.attributes)
        return _product_flops(instruction, operands, dims[1].replace('"', "") if dims else "")
    if "mosaic" in name or name == "tpu_custom_call":
        shapes = [shapes_of_type(one.result)[0][1] for one in operands if _has_shape(one)]
        _, result = shapes_of_type(instruction.result)[0]
        kernel = kernel_name(instruction)
        return 0.0 if kernel is None else kernel_flops(kernel, shapes, result)
    return 0.0


def _has_shape(instruction: Instruction) -> bool:
    return bool(shapes_of_type(instruction.result))


_MULTIPLIES = (
    *ATTENTION_PRODUCTS,
    *("grouped_product", "grouped_sum"),
)
_NAMES = re.compile(rf"(?<![A-Za-z])({'|'.join(_MULTIPLIES)})(?![A-Za-z])")


def kernel_name(instruction: Instruction) -> str | None:
    """Name of a Mosaic kernel that multiplies, from where it was traced; None for another."""
    scope = re.search(r'op_name="([^"]*)"', instruction.attributes)
    found = _NAMES.findall(f"{scope[1] if scope else ''} {instruction.name}")
    return found[-1] if found else None


def kernel_flops(name: str, operands: list[tuple[int, ...]], result: tuple[int, ...]) -> float:
    """Floating-point operations of a kernel of `moe.kernels` by its name and shapes.

    Rows of experts are those of their buffers. Attention is causal, with queries at the end of the
    keys.

    Args:
      operands, result: shapes.
    """
    if name in ATTENTION_PRODUCTS:
        return _attention_flops(ATTENTION_PRODUCTS[name], operands)
    if name in ("grouped_sum", "tgmm"):
        # [rows, M] and [rows, N] to [experts, M, N].
        rows = max(shape[0] for shape in operands if len(shape) == 2)
        return 2.0 * rows * math.prod(result[1:])
    matrices = max((shape for shape in operands if len(shape) >= 3), key=math.prod)
    rows = max(shape[0] for shape in (*operands, result) if len(shape) == 2)
    return 2.0 * rows * math.prod(matrices[1:])


def _attention_flops(products: int, operands: list[tuple[int, ...]]) -> float:
    """FLOPs of products over pairs of a query and a key.

    Queries are ``[blocks, block, width]``, over sequences, heads and positions; tables of positions
    are ``[blocks, 2, block]``, over sequences and positions, first of queries and then of keys.
    Whether a sequence is a prompt (as many queries as keys) or a response after one follows from
    their ratio, and its length from `PROMPT` and `RESPONSE`.
    """
    queries = next(shape for shape in operands if len(shape) == 3 and shape[1] != 2)
    rows, width = queries[0] * queries[1], queries[2]
    tables = [shape[0] * shape[2] for shape in operands if len(shape) == 3 and shape[1] == 2]
    of_queries, of_keys = [size for size in tables if size < rows][:2]
    keys = PROMPT if of_queries == of_keys else PROMPT + RESPONSE
    seen = keys * (1 - of_queries / of_keys / 2)
    return 2.0 * products * rows * seen * width
