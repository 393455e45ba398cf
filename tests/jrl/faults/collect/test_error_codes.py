"""XID errors: whose fault each is, against what NVIDIA's catalogue asks for."""

import pytest

from jrl.faults.collect.vocabulary import CAUSES, XID, error_code, most_severe

# Codes by the immediate action of the catalogue for GPUs from Ampere on.
RESET = (46, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 156, 158)
SUPPORT = (48, 54, 74, 79, *range(144, 151))
RESTART_PROGRAM_AND_LOOK_INTO_IT = (11, 13, 25, 31, 69)
IGNORED = (63, 92, 93, 121, 160)


@pytest.mark.parametrize("number", [*RESET, *SUPPORT])
def test_error_code_cause_is_machine_for_reset_or_support(number):
    code = error_code(number)
    assert code.cause == "machine" and code.is_alarming


@pytest.mark.parametrize("number", [*RESTART_PROGRAM_AND_LOOK_INTO_IT, 43, 45, 137])
def test_error_code_cause_is_program_for_debugging(number):
    assert error_code(number).cause == "program" and not error_code(number).is_alarming


@pytest.mark.parametrize("number", IGNORED)
def test_error_code_handled_by_machine_raises_no_alarm(number):
    code = error_code(number)
    assert code.cause == "machine" and not code.is_alarming and "handled it" in code.describe()


@pytest.mark.parametrize("number", [1, 17, 200, 9999])
def test_a_code_that_is_in_no_catalogue_is_nobodys(number):
    assert error_code(number).cause == "unknown"
    assert error_code(number).describe() == f"XID {number} (not in the catalogue; unknown cause)"


def test_every_code_is_stated_once_in_a_few_words():
    for code, entry in XID.items():
        assert entry.code == code and entry.cause in CAUSES
        assert 0 < len(entry.meaning) < 60 and entry.meaning[-1] != "."


@pytest.mark.parametrize(
    ("numbers", "counts"),
    [((0, 31), 31), ((79, 154, 45), 154), ((13, 79), 79), ((31, 8), 8), ((0,), 0), ((63, 31), 63)],
)
def test_of_several_codes_the_machines_counts(numbers, counts):
    assert most_severe(numbers) == counts
