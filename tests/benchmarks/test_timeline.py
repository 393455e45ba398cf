"""Work beside the collectives of a scheduled program, and what computation waits for."""

import math

import pytest

from benchmarks.absent.timeline import timeline
from benchmarks.absent.work import Work, kernel_flops, work_of
from sharding.costs.hardware import HARDWARE
from sharding.costs.transfer import Transfer
from sharding.folding import Layout
from sharding.overlap import ENTRY, computations

H100 = HARDWARE["h100"]
DOT = "%dot = f32[4096,2048]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
PROGRAM = f"""HloModule jit_step, is_scheduled=true

%product (x: bf16[4096,1024], w: bf16[1024,2048]) -> f32[4096,2048] {{
  %x = bf16[4096,1024]{{1,0}} parameter(0)
  %w = bf16[1024,2048]{{1,0}} parameter(1)
  ROOT {DOT}
}}

%slice (stack: bf16[4,1024,2048], i: s32[]) -> bf16[1024,2048] {{
  %i = s32[] parameter(1)
  %stack = bf16[4,1024,2048]{{2,1,0}} parameter(0)
  %zero = s32[] constant(0)
  %layer = bf16[1,1024,2048]{{2,1,0}} dynamic-slice(%stack, %i, %zero, %zero)
  ROOT %bitcast = bf16[1024,2048]{{1,0}} bitcast(%layer)
}}

%body (t: (bf16[4096,1024], bf16[1024,2048])) -> (bf16[4096,1024], bf16[1024,2048]) {{
  %t = (bf16[4096,1024]{{1,0}}, bf16[1024,2048]{{1,0}}) parameter(0)
  %a = bf16[4096,1024]{{1,0}} get-tuple-element(%t), index=0
  %b = bf16[1024,2048]{{1,0}} get-tuple-element(%t), index=1
  %start = ((bf16[1024,2048]{{1,0}}), bf16[8192,2048]{{1,0}}) all-gather-start(%b), replica_groups=[1,8]<=[8], dimensions={{0}}
  %fusion = f32[4096,2048]{{1,0}} fusion(%a, %b), kind=kCustom, calls=%product
  %done = bf16[8192,2048]{{1,0}} all-gather-done(%start)
  ROOT %tuple = (bf16[4096,1024]{{1,0}}, bf16[1024,2048]{{1,0}}) tuple(%a, %b)
}}

ENTRY %main (x: bf16[4096,1024], w: bf16[4,1024,2048], n: s32[]) -> f32[4096,2048] {{
  %a.1 = bf16[4096,1024]{{1,0}} parameter(0)
  %stack.1 = bf16[4,1024,2048]{{2,1,0}} parameter(1)
  %n = s32[] parameter(2)
  %b.1 = bf16[1024,2048]{{1,0}} fusion(%stack.1, %n), kind=kLoop, calls=%slice
  %pair = (bf16[4096,1024]{{1,0}}, bf16[1024,2048]{{1,0}}) tuple(%a.1, %b.1)
  %loop = (bf16[4096,1024]{{1,0}}, bf16[1024,2048]{{1,0}}) while(%pair), condition=%condition, body=%body, backend_config={{"known_trip_count":{{"n":"3"}}}}
  ROOT %sum = bf16[1024,2048]{{1,0}} all-reduce(%b.1), replica_groups=[1,8]<=[8], to_apply=%add
}}
"""  # noqa: E501
FLOPS = 2 * 4096 * 1024 * 2048
MATRIX = 1024 * 2048 * 2
BYTES = 4096 * 1024 * 2 + MATRIX + 4096 * 2048 * 4


def test_a_collective_hides_behind_the_work_before_its_done():
    actual = timeline(PROGRAM, H100)
    gather, reduction = actual.collectives

    def seconds(kind):
        return Transfer("", kind, ("dp",), MATRIX, 1).seconds(Layout(dp=8), H100)

    product = max(FLOPS / H100.peak, BYTES / H100.memory_bandwidth)
    assert 0 < product < seconds("all_gather")
    assert (gather.times, gather.work) == (3, Work(FLOPS, BYTES))
    assert gather.exposed == pytest.approx(seconds("all_gather") - product)
    # A synchronous collective hides behind nothing.
    assert reduction.times == 1
    assert reduction.exposed == pytest.approx(seconds("all_reduce"))
    assert actual.exposed == pytest.approx(3 * gather.exposed + reduction.exposed)
    sliced = 2 * MATRIX / H100.memory_bandwidth
    expected = sliced + 3 * seconds("all_gather") + seconds("all_reduce")
    assert actual.seconds == pytest.approx(expected, rel=1e-6)


CONDITION = """
%condition (t: (s32[], f32[8])) -> pred[] {
  %t.2 = (s32[], f32[8]{0}) parameter(0)
  %limit = s32[]{:T(128)} constant(5)
  %index = s32[]{:T(128)} get-tuple-element(%t.2), index=0
  ROOT %lt = pred[]{:T(512)} compare(%index, %limit), direction=LT
}
"""


@pytest.mark.parametrize(
    ("condition", "times"), [("", 1), (CONDITION, 5), (CONDITION.replace("=LT", "=NE"), 1)]
)
def test_a_loop_without_a_known_length_has_that_of_its_condition(condition, times):
    text = PROGRAM.replace('{"known_trip_count":{"n":"3"}}', "{}") + condition
    assert timeline(text, H100).collectives[0].times == times


def test_a_fusion_reads_the_slice_of_an_operand():
    program = computations(PROGRAM)
    own = {one.name: one for one in program[ENTRY]}
    # And the index, of four bytes.
    assert work_of(own["b.1"], own, program) == Work(0, 2 * MATRIX + 4)


STACK = "bf16[4,8,8]{2,1,0}"
LAYER, ROW = 8 * 8 * 2, 8 * 2
FUSIONS = {
    "slice of a bitcast": (
        "%y = bf16[8,8]{1,0}",
        "%v = bf16[32,8]{1,0} bitcast(%p)\n  ROOT %r = bf16[8,8]{1,0} dynamic-slice(%v, %i, %i)",
        2 * LAYER + 4,
    ),
    "slice of a cast": (
        "%y = f32[8,8]{1,0}",
        "%v = f32[4,8,8]{2,1,0} convert(%p)\n"
        "  ROOT %r = f32[8,8]{1,0} dynamic-slice(%v, %i, %i, %i)",
        LAYER + 2 * LAYER + 4,
    ),
    "slice and the whole": (
        f"%y = {STACK}",
        "%v = bf16[8,8]{1,0} dynamic-slice(%p, %i, %i, %i)\n"
        f"  ROOT %r = {STACK} multiply(%p, %p)",
        8 * LAYER + 4,
    ),
    "update in place": (
        f"%y = {STACK}",
        "%new = bf16[1,8,8]{2,1,0} broadcast(%i)\n"
        f"  ROOT %r = {STACK} dynamic-update-slice(%p, %new, %i, %i, %i)",
        LAYER + 4,
    ),
    "update through a bitcast": (
        f"%y = {STACK}",
        "%v = bf16[32,8]{1,0} bitcast(%p)\n  %new = bf16[1,8]{1,0} broadcast(%i)\n"
        "  %u = bf16[32,8]{1,0} dynamic-update-slice(%v, %new, %i, %i)\n"
        f"  ROOT %r = {STACK} bitcast(%u)",
        ROW + 4,
    ),
    "two results, one of them in place": (
        f"%y = (bf16[8]{{0}}, {STACK})",
        "%new = bf16[1,8,8]{2,1,0} broadcast(%i)\n  %z = bf16[8]{0} broadcast(%i)\n"
        f"  %u = {STACK} dynamic-update-slice(%p, %new, %i, %i, %i)\n"
        f"  ROOT %r = (bf16[8]{{0}}, {STACK}) tuple(%z, %u)",
        LAYER + ROW + 4,
    ),
    "scatter": (
        f"%y = {STACK}",
        "%new = bf16[1,8,8]{2,1,0} broadcast(%i)\n"
        f"  ROOT %r = {STACK} scatter(%p, %i, %new), to_apply=%add",
        2 * LAYER + 4,
    ),
}


@pytest.mark.parametrize("start", ["", "-start"])
@pytest.mark.parametrize(("result", "inner", "moved"), FUSIONS.values(), ids=FUSIONS)
def test_a_fusion_moves_the_elements_that_it_uses(result, inner, moved, start):
    if start:
        name, kind = result.split(" = ")
        result = f"{name} = (({STACK}, s32[]), {kind}, u32[])"
    text = (
        f"HloModule m, is_scheduled=true\n\n%f (p: {STACK}, i: s32[]) -> bf16[8] {{\n"
        f"  %p = {STACK} parameter(0)\n  %i = s32[] parameter(1)\n  {inner}\n}}\n\n"
        f"ENTRY %main (x: {STACK}, n: s32[]) -> bf16[8] {{\n"
        f"  %x = {STACK} parameter(0)\n  %n = s32[] parameter(1)\n"
        f"  {result} fusion{start}(%x, %n), kind=kLoop, calls=%f\n}}\n"
    )
    program = computations(text)
    own = {one.name: one for one in program[ENTRY]}
    assert work_of(own["y"], own, program).bytes == moved


@pytest.mark.parametrize(
    ("instruction", "moved"),
    [
        ("%y = bf16[1,8,8]{2,1,0} dynamic-slice(%x, %n, %n, %n)", 2 * LAYER),
        (f"%y = (({STACK}, s32[]), bf16[1,8,8]{{2,1,0}}) dynamic-slice-start(%x, %n)", 2 * LAYER),
        (f"%y = ({STACK}, {STACK}) copy-start(%x)", 8 * LAYER),
        (f"%y = {STACK} dynamic-update-slice(%x, %z, %n, %n, %n)", 2 * LAYER),
        (f"%y = {STACK} scatter(%x, %n, %z), to_apply=%add", 3 * LAYER + 4),
    ],
)
def test_an_instruction_alone_moves_what_it_slices_or_updates(instruction, moved):
    text = (
        f"HloModule m, is_scheduled=true\n\nENTRY %main (x: {STACK}, n: s32[]) -> bf16[8] {{\n"
        f"  %x = {STACK} parameter(0)\n  %n = s32[] parameter(1)\n"
        f"  %z = bf16[1,8,8]{{2,1,0}} parameter(2)\n  {instruction}\n}}\n"
    )
    program = computations(text)
    own = {one.name: one for one in program[ENTRY]}
    assert work_of(own["y"], own, program).bytes == moved


# Rows, positions of queries and of keys as tables, queries, keys and values: as the kernels get
# them for two sequences of 512 and 1,536 tokens of Qwen3-30B-A3B.
PROMPT = ((32,), (16, 2, 64), (8, 2, 128), (512, 64, 128), (32, 128, 128), (32, 128, 128))
RESPONSE = ((96,), (48, 2, 64), (32, 2, 128), (1536, 64, 128), (128, 128, 128), (128, 128, 128))
EXPERTS = ((400,), (49152, 768), (16, 768, 2048))


@pytest.mark.parametrize(
    ("name", "operands", "result", "expected"),
    [
        ("attention_forward", PROMPT, (512, 64, 128), 4 * 2 * 32 * 128 * 512 * 256),
        ("attention_forward", RESPONSE, (1536, 64, 128), 4 * 2 * 32 * 128 * 1536 * 1280),
        ("grouped_product", EXPERTS, (49152, 2048), 2 * 49152 * 768 * 2048),
        (
            *("grouped_sum", ((16,), (32768, 2048), (49152, 1536)), (16, 2048, 1536)),
            2 * 49152 * 2048 * 1536,
        ),
        ("tgmm", ((49152, 768), (49152, 2048)), (16, 768, 2048), 2 * 49152 * 768 * 2048),
    ],
)
def test_kernels_are_counted_by_their_shapes(name, operands, result, expected):
    assert math.isclose(kernel_flops(name, list(operands), result), expected)
