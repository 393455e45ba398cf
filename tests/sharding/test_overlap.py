"""Collectives of scheduled programs, in lines recorded from the compilers of GPUs and TPUs."""

import pytest

from sharding.overlap import (
    ENTRY,
    Collective,
    bytes_of_type,
    collectives,
    computations,
    device_groups,
    is_synchronous,
    parse_instruction,
)

# Of an update on eight H100s, by the compiler of jax-cuda13-pjrt 0.12.0.1, shortened.
GATHER_START = (
    "  %all-gather-start.1 = ((s32[4096,8]{1,0}, f32[4096,8]{1,0}), (s32[32768,8]{1,0}, "
    "f32[32768,8]{1,0})) all-gather-start(%ids, %probs), channel_id=1, replica_groups="
    "mesh['pp'=1,'dp_ep'=8,'cp'=1,'tp'=1,'edp'=1,'etp'=1] {'dp_ep'}, dimensions={0}, "
    'use_global_device_ids=true, metadata={op_name="jit(update)/shard_map/while/body/all_gather" '
    'scheduling_name="all-gather-start.1" stack_frame_id=1161}, backend_config={"operation_queue_id'
    '":"0","collective_backend_config":{"is_sync":SYNC,"is_pipelined":false,"backend":"DEFAULT"}}'
)
GPU = f"""HloModule jit_update, is_scheduled=true, entry_computation_layout={{()->()}}

%add (p: f32[], q: f32[]) -> f32[] {{
  %p = f32[] parameter(0)
  %q = f32[] parameter(1)
  ROOT %sum = f32[] add(%p, %q)
}}

%body (t: (s32[4096,8], f32[4096,8])) -> (s32[4096,8], f32[4096,8]) {{
  %t = (s32[4096,8]{{1,0}}, f32[4096,8]{{1,0}}) parameter(0)
  %ids = s32[4096,8]{{1,0}} get-tuple-element(%t), index=0
  %probs = f32[4096,8]{{1,0}} get-tuple-element(%t), index=1
{GATHER_START}
  %all-gather-done.1 = (s32[32768,8]{{1,0}}, f32[32768,8]{{1,0}}) all-gather-done(%all-gather-start.1)
  ROOT %tuple = (s32[4096,8]{{1,0}}, f32[4096,8]{{1,0}}) tuple(%ids, %probs)
}}

ENTRY %main (x: bf16[32768,2048]) -> bf16[32768,2048] {{
  %x = bf16[32768,2048]{{1,0}} parameter(0)
  %buffer = bf16[49152,2048]{{1,0:S(7)}} copy(%x)
  %sizes = s64[8]{{0}} constant({{...}})
  %ragged-all-to-all-start.3 = ((bf16[32768,2048]{{1,0}}, bf16[49152,2048]{{1,0:S(7)}}, s64[8]{{0}}, s64[8]{{0}}, s64[8]{{0}}, /*index=5*/s64[8]{{0}}), bf16[49152,2048]{{1,0:S(7)}}) ragged-all-to-all-start(%x, %buffer, %sizes, %sizes, %sizes, /*index=5*/%sizes), channel_id=1, replica_groups={{{{0,1,2,3}},{{4,5,6,7}}}}, backend_config={{"collective_backend_config":{{"is_sync":SYNC}}}}
  %ragged-all-to-all-done.3 = bf16[49152,2048]{{1,0:S(7)}} ragged-all-to-all-done(%ragged-all-to-all-start.3)
  %while.227 = (s32[4096,8]{{1,0}}, f32[4096,8]{{1,0}}) while(%t), condition=%condition, body=%body, backend_config={{"known_trip_count":{{"n":"4"}},"known_init_step":{{"init":"0","step":"1"}}}}
  ROOT %pmax.16 = bf16[32768,2048]{{1,0}} all-reduce(%x), channel_id=1, replica_groups=[4,2]<=[8], use_global_device_ids=true, to_apply=%add
}}
"""  # noqa: E501
IDS_AND_PROBS, ROWS = 2 * 4096 * 8 * 4, 32768 * 2048 * 2


def test_collectives_are_read_with_bytes_of_their_input_and_devices():
    assert collectives(GPU.replace("SYNC", "false")) == [
        Collective("all_gather", IDS_AND_PROBS, 8, is_asynchronous=True),
        # Of the input and the buffer for any routing the smaller one; no offsets.
        Collective("all_to_all", ROWS, 4, is_asynchronous=True),
        Collective("all_reduce", ROWS, 2, is_asynchronous=False),
    ]


@pytest.mark.parametrize(("marked", "expected"), [("true", True), ("false", False)])
def test_a_start_that_is_marked_is_synchronous(marked, expected):
    assert is_synchronous(GPU.replace("SYNC", marked)) is expected


def test_a_program_without_collectives_is_not_synchronous():
    single = GPU.replace("{{0,1,2,3},{4,5,6,7}}", "{{0},{1}}").replace("'dp_ep'=8", "'dp_ep'=1")
    assert not is_synchronous(single.replace("[4,2]<=[8]", "[8,1]<=[8]"))


def test_a_loop_has_its_length_and_its_body():
    program = computations(GPU)
    assert set(program) == {"add", "body", ENTRY}
    loop = next(one for one in program[ENTRY] if one.operation == "while")
    assert (loop.trip_count, loop.called) == (4, ("condition", "body"))
    assert loop.computation("body") == "body"
    with pytest.raises(ValueError, match=r"while while\.227 has no to_apply: it has"):
        loop.computation("to_apply")


@pytest.mark.parametrize(
    ("line", "operation", "operands"),
    [
        ("  %a = f32[2,3]{1,0} fusion(%b, %c.1), kind=kLoop, calls=%d", "fusion", ("b", "c.1")),
        ("  ROOT %a = ((f32[2]{0:T(128)}, s32[]), u8[4]{0:S(1)}) x-start(%b)", "x-start", ("b",)),
        ("  %a = s32[] constant(3)", "constant", ()),
    ],
)
def test_an_operation_follows_its_type(line, operation, operands):
    result = parse_instruction(line)
    assert (result.name, result.operation, result.operands) == ("a", operation, operands)


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        ("replica_groups={{0,3},{1,2}}", ((0, 3), (1, 2))),
        ("source_target_pairs={{0,1},{1,0}}", ((0, 1), (1, 0))),
        ("replica_groups=[2,2]<=[4]", ((0, 1), (2, 3))),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("replica_groups=mesh['pp'=1,'a'=2,'b'=2] {'a'}", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'b','a'}", ((0, 2, 1, 3),)),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=4], device_ids=(3,2,1,0) {'a'}", ((3, 2, 1, 0),)),
        # The first factor of two of an axis of four, and the second.
        ("replica_groups=mesh['a'=4] {'a':(1)2}", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=4] {'a':(2)2}", ((0, 1), (2, 3))),
        ("replica_groups=mesh['pp'=1,'a'=2] {'pp'}", ((0,), (1,))),
        ("channel_id=1", ()),
    ],
)
def test_groups_of_devices_are_read_in_every_form(printed, expected):
    line = f"  %a = f32[8]{{0}} all-gather(%x), channel_id=1, {printed}, dimensions={{0}}"
    assert device_groups(parse_instruction(line)) == expected


def test_branches_of_a_conditional_are_called():
    line = "  %a = f32[8]{0} conditional(%i, %x, %x), branch_computations={%free, %commands}"
    assert parse_instruction(line).called == ("free", "commands")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("(bf16[2,3]{1,0:T(8,128)(2,1)}, /*index=1*/s32[])", 16),
        ("(f8e4m3fn[4]{0}, pred[5]{0}, token[], u4[6]{0})", 12),
        ("f32[<=8]{0}", 32),
    ],
)
def test_bytes_of_a_type(text, expected):
    assert bytes_of_type(text) == expected
