"""Launches of a scheduled program, counted in its text."""

from benchmarks.absent import launches
from benchmarks.absent.compilers import Program
from benchmarks.absent.launches import Case, Launches, count_launches
from benchmarks.absent.selection import Selection

PROGRAM = """HloModule jit_step, is_scheduled=true

%fused (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %add = f32[8]{0} add(%p, %p)
}

%body (t: (s32[], f32[8])) -> (s32[], f32[8]) {
  %t = (s32[], f32[8]{0}) parameter(0)
  %x = f32[8]{0} get-tuple-element(%t), index=1
  %loop_fusion = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused
  %call.1 = f32[8]{0} custom-call(%loop_fusion), custom_call_target="__cublas$lt$matmul"
  ROOT %tuple = (s32[], f32[8]{0}) tuple(%t, %call.1)
}

%condition (t: (s32[], f32[8])) -> pred[] {
  %t.1 = (s32[], f32[8]{0}) parameter(0)
  ROOT %less = pred[] fusion(%t.1), kind=kLoop, calls=%fused
}

%commands (p: f32[8]) -> f32[8] {
  %p.1 = f32[8]{0} parameter(0)
  %a = f32[8]{0} fusion(%p.1), kind=kLoop, calls=%fused
  ROOT %b = f32[8]{0} copy(%a)
}

%free (p: f32[8]) -> f32[8] {
  ROOT %p.2 = f32[8]{0} parameter(0)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x.1 = f32[8]{0} parameter(0)
  %start = ((f32[8]{0}), f32[64]{0}) all-gather-start(%x.1), dimensions={0}
  %known = (s32[], f32[8]{0}) while(%x.1), condition=%condition, body=%body, KNOWN
  %done = f32[64]{0} all-gather-done(%start)
  %unknown = (s32[], f32[8]{0}) while(%x.1), condition=%condition, body=%body
  %graph = f32[8]{0} call(%x.1), to_apply=%commands
  %branch = f32[8]{0} conditional(%i, %x.1, %x.1), branch_computations={%free, %commands}
  ROOT %view = f32[8]{0} bitcast(%branch)
}
""".replace("KNOWN", 'backend_config={"known_trip_count":{"n":"7"}}')


def test_a_loop_of_known_length_counts_as_often_as_it_runs():
    # The all-gather; 7 x 2 of the loop; the other's condition and its copy to the host; the
    # commands; the branch with the most, and the copy of its index.
    assert count_launches(PROGRAM) == Launches(1 + 7 * 2 + 2 + 2 + (2 + 1), 2 + 2)


def test_a_row_for_each_program_and_form(monkeypatch):
    def refuse():
        raise ValueError("no kernel\nfor it")

    program = Program(PROGRAM, 2**10, 2**20, [], 2.0)
    cases = Case("step", "None", lambda: program), Case("step", "odd", refuse)
    monkeypatch.setattr(launches, "CASES", cases)
    first, refused = launches.launches(Selection(), quick=False, keep=None)
    assert (first["launches"], first["per_turn"], first["temporaries"]) == (22, 4, 2**20)
    assert refused["form"] == "odd" and "no kernel for it" in refused["error"]
    assert [row["form"] for row in launches.launches(Selection(), quick=True, keep=None)] == [
        "None"
    ]
    assert [*launches.launches(Selection(["step, odd"]), quick=True, keep=None)] == [refused]
