"""Extraction of the answer from a completion."""

import time

import pytest

from jrl.tasks.answers import Extracted, extract
from jrl.tasks.answers.reasoning import REASONING, opens_reasoning


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("18", "18"),
        (" 18\n", "18"),
        ("18\ufffd\n", "18"),
        ("<think>2</think>\n\n18", "18"),
        ("a</think>b</think>18", "18"),
        (r"<think>\boxed{2}</think>It is 18.", "It is 18."),
        (r"so $\boxed{18}$ it is", "18"),
        (r"\boxed{17}, no: \boxed{18}", "18"),
        (r"\boxed{17} or $\boxed{18}$", "17 or 18"),
        (r"$x=\boxed{1}$ and $y=\boxed{2}$", "1, 2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{1\right.}", r"\left\{1\right."),
        (r"\boxed{\boxed{18}}", "18"),
        (r"\boxed{18} and \boxed{1", "18"),
        (r"\boxed{18", r"\boxed{18"),
        ("<answer> 18\n</answer> done", "18"),
        ("<answer>17</answer><answer>18</answer>", "18"),
        ("<answer>17</answer> <answer>18", "17"),
        (r"<answer>It is \boxed{18}.</answer>", "18"),
        (r"\boxed{17} <answer>18</answer>", "18"),
        ("17\n#### 18\nand 19", "18"),
        ("#### 17\n#### 18", "18"),
        (r"#### \boxed{18}", "18"),
        ("#### Final answer\n18", "18"),
        ("##### 18", "##### 18"),
        (r"\boxed{18}" + "\n#### Check", "18"),
        ("18 ####", ""),
        (r"\boxed{}", ""),
        (r"\boxed{18} is wrong", ""),
        (r"$\boxed{18}$ is not the answer.", ""),
        (r"\boxed{18}, which is incorrect.", ""),
        (r"<answer>18</answer> isn't right", ""),
        (r"\boxed{18} (wrong)", ""),
        (r"The answer is not $\boxed{18}$.", ""),
        ("<answer>17</answer><answer>18</answer> or the former", ""),
        (r"\boxed{17}, \boxed{18}, or maybe the first", ""),
        (r"\boxed{17} is wrong, so it is \boxed{18}.", "18"),
        (r"\boxed{18} is right, and 17 is wrong.", "18"),
        (r"\boxed{18} because 17 is impossible", "18"),
        (r"\boxed{18} is not 17.", "18"),
        (r"\boxed{3/4} cannot be reduced", "3/4"),
        (r"\boxed{18}. The first is wrong.", "18"),
        (r"\boxed{0.5} or 1/2", "0.5"),
    ],
)
def test_extract_finds_answer(completion, answer):
    found = extract(completion)
    assert found is not None
    assert found.text == answer


@pytest.mark.parametrize("pair", REASONING)
def test_extract_skips_reasoning_of_each_kind(pair):
    begin, end = pair
    assert extract(f"{begin}2{end}18") == Extracted("18", False)
    assert extract(rf"{begin}\boxed{{18}} <answer>18</answer>") is None
    assert extract(f"{begin}2{end}18{begin}no") is None
    assert opens_reasoning(f"assistant\n{begin}\n") == f"{begin}\n"
    assert opens_reasoning(f"assistant\n{begin}2{end}") == ""
    assert opens_reasoning(f"What is {begin}?\nassistant\n") == ""


def test_extract_bare_keeps_completion():
    assert extract("7+8+0=15,1#15#### 3 ", bare=True) == Extracted("7+8+0=15,1#15#### 3 ", False)
    assert extract("11\ufffd", bare=True) == Extracted("11\ufffd", False)
    assert extract("<think>2</think> 11\n", bare=True) == Extracted("11", False)
    assert extract(r"\boxed{11}", bare=True) == Extracted("11", True)


@pytest.mark.parametrize(
    "part", [r"\boxed{", r"\boxed{1}", "<answer>", "<think>", "####", "{", "}", "#### \n", "\\"]
)
def test_extract_takes_linear_time(part):
    begin = time.process_time()
    extract(part * 20_000)
    assert time.process_time() - begin < 1.0  # quadratic, it would be minutes
