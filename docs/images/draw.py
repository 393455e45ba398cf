"""Diagrams of the pages as SVG files: `python docs/images/draw.py` writes them beside this file.

Standard library only, with no font and no date in the output, so that every machine writes the same
bytes. All diagrams are 560 wide with text of 16, which is legible on a phone (10 pixels at a width
of 350). The accent colour marks what the page is about; inputs and notes are grey.
"""

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).parent
WIDTH, MARGIN, LINE = 560, 16, 21
ACCENT, TINT, GREY, INK = "#4051b5", "#e3e6f5", "#5b6370", "#1c2024"
STYLE = f"""\
text {{ font: 16px Helvetica, Arial, "DejaVu Sans", sans-serif; fill: {INK}; }}
.code {{ font: 15px Menlo, Consolas, "DejaVu Sans Mono", monospace; }}
.grey {{ fill: {GREY}; }}
.accent {{ fill: {ACCENT}; }}
rect {{ fill: #fff; stroke: {GREY}; stroke-width: 1.5; }}
rect.accent {{ fill: {TINT}; stroke: {ACCENT}; }}
path {{ fill: none; stroke: {GREY}; stroke-width: 1.5; }}
path.accent {{ fill: none; stroke: {ACCENT}; stroke-width: 2; }}
.dashed {{ stroke-dasharray: 5 4; }}
rect.page {{ stroke-opacity: 0.4; }}
rect.lane {{ fill: {GREY}; fill-opacity: 0.08; stroke: none; }}
path.head {{ fill: {GREY}; stroke: none; }}
path.head.accent {{ fill: {ACCENT}; stroke: none; }}"""


class Picture:
    """A diagram of boxes, arrows, labels and lanes; text between backticks is code."""

    def __init__(self, height: int):
        self.height, self.parts = height, list[str]()

    def box(
        self, x: float, y: float, width: float, height: float, *lines: str, style: str = ""
    ) -> None:
        """A rectangle with lines of text in its middle; `style` is of "accent", "dashed"."""
        self.rect(x, y, width, height, style)
        first = y + height / 2 - LINE * (len(lines) - 1) / 2 + 5.5
        for number, line in enumerate(lines):
            if text_width(line) > width - 6:
                raise ValueError(f"{line!r} does not fit a box of {width}")
            self.label(x + width / 2, first + LINE * number, line)

    def rect(self, x: float, y: float, width: float, height: float, style: str = "") -> None:
        """A rectangle without text."""
        size = f'width="{width:g}" height="{height:g}" rx="5"'
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" {size}{_classes(style)}/>')

    def lane(self, y: float, height: float) -> None:
        """A band over the full width, for what happens in one place."""
        self.rect(MARGIN, y, WIDTH - 2 * MARGIN, height, "lane")

    def label(self, x: float, y: float, text: str, style: str = "", anchor: str = "middle") -> None:
        """A line of text with its baseline at `y`; `style` is of "grey", "accent"."""
        width = text_width(text)
        left = x - {"start": 0, "middle": width / 2, "end": width}[anchor]
        if left < 4 or left + width > WIDTH - 4:
            raise ValueError(f"{text!r} does not fit the picture")
        spans = "".join(
            f'<tspan class="code">{escape(part)}</tspan>' if code else escape(part)
            for code, part in _parts(text)
        )
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{_classes(style)}>{spans}</text>'
        )

    def line(self, *points: tuple[float, float], style: str = "") -> None:
        """Straight lines from point to point."""
        path = " L".join(f"{x:g} {y:g}" for x, y in points)
        self.parts.append(f'<path d="M{path}"{_classes(style)}/>')

    def arrow(self, *points: tuple[float, float], style: str = "") -> None:
        """A line with a head at its last point."""
        (x0, y0), (x, y) = points[-2:]
        length = ((x - x0) ** 2 + (y - y0) ** 2) ** 0.5
        dx, dy = (x - x0) / length, (y - y0) / length
        back = (x - 9 * dx, y - 9 * dy)
        self.line(*points[:-1], (round(back[0], 1), round(back[1], 1)), style=style)
        corners = [(back[0] - side * dy, back[1] + side * dx) for side in (5, -5)]
        head = " L".join(f"{round(a, 1):g} {round(b, 1):g}" for a, b in [(x, y), *corners])
        self.parts.append(f'<path d="M{head} Z"{_classes(f"head {style}")}/>')

    def svg(self) -> str:
        size = f'viewBox="0 0 {WIDTH} {self.height}" width="{WIDTH}" height="{self.height}"'
        frame = f'width="{WIDTH - 1}" height="{self.height - 1}" rx="8" class="page"'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
                f"<style>\n{STYLE}\n</style>",
                f'<rect x="0.5" y="0.5" {frame}/>',
                *self.parts,
                "</svg>\n",
            ]
        )


def _classes(style: str) -> str:
    return f' class="{style.strip()}"' if style.strip() else ""


def _parts(text: str) -> list[tuple[bool, str]]:
    """Pieces of a line, and whether each is code."""
    pieces = re.split("`", text)
    return [(number % 2 == 1, piece) for number, piece in enumerate(pieces) if piece]


def text_width(text: str) -> float:
    """Width of a line in the widest of the fonts."""
    widths = {"ijlI.,:;'|!": 5.2, "ftr()[]{}/- ": 6.5, "mw%MW=+<>": 14.5}
    proportional = {letter: width for letters, width in widths.items() for letter in letters}
    return sum(
        9.1 * len(part) if code else sum(proportional.get(letter, 9.8) for letter in part)
        for code, part in _parts(text)
    )


def training_loop() -> Picture:
    picture = Picture(296)
    top, middle, bottom, high = 20, 120, 220, 56
    picture.box(16, top, 100, high, "1. prompts")
    picture.box(148, top, 186, high, "2. rollout engine", "samples", style="accent")
    picture.box(366, top, 178, high, "2. verifier", "scores")
    picture.box(366, middle, 178, high, "buffer", "`--max-staleness N`", style="dashed")
    picture.box(366, bottom, 178, high, "3. scoring", "advantages")
    picture.box(148, bottom, 186, high, "4. updates", "mini-batches", style="accent")
    picture.arrow((116, top + 28), (148, top + 28))
    picture.arrow((334, top + 28), (366, top + 28))
    picture.arrow((455, top + high), (455, middle))
    picture.arrow((455, middle + high), (455, bottom))
    picture.arrow((366, bottom + 28), (334, bottom + 28))
    picture.arrow((182, bottom), (182, top + high), style="accent")
    picture.label(172, 153, "new weights", "accent", "end")
    picture.label(356, 142, "tokens at most", "grey", "end")
    picture.label(356, 163, "N versions old", "grey", "end")
    return picture


def asynchronous() -> Picture:
    picture = Picture(246)
    step, left = 123, 34
    picture.lane(12, 92)
    picture.label(28, 34, "sampler", anchor="start")
    picture.label(526, 34, "`--max-staleness 1`", "grey", "end")
    picture.lane(142, 92)
    picture.label(28, 222, "trainer", anchor="start")
    for number, version in enumerate((0, 0, 1, 2)):
        accent = "accent" if number == 2 else ""
        lines = f"batch {number + 1}", f"by version {version}"
        picture.box(left + step * number, 44, step - 6, 50, *lines, style=accent)
    for number in range(1, 4):
        accent = "accent" if number == 3 else ""
        lines = f"step {number}", f"on batch {number}"
        picture.box(left + step * number, 152, step - 6, 50, *lines, style=accent)
    for number in (2, 3):
        x = left + step * number - 3
        picture.arrow((x - 14, 152), (x + 14, 94))
        picture.label(x - 10, 128, f"version {number - 1}", "grey", "end")
    return picture


def layout() -> Picture:
    picture = Picture(258)
    size, left = 66, 17
    picture.label(left, 32, "attention: `tp2 dp4`", anchor="start")
    picture.label(543, 32, "colour: the same sequences", "accent", "end")
    picture.label(left, 240, "experts: `ep4 edp2`", anchor="start")
    picture.label(543, 240, "colour: the same experts", "accent", "end")
    for device in range(8):
        x = left + size * device
        tp, dp, ep, edp = device % 2, device // 2, device % 4, device // 4
        accent = "accent" if dp == 0 else ""
        picture.box(x, 44, size - 4, 56, f"`dp{dp}`", f"`tp{tp}`", style=accent)
        picture.label(x + 31, 136, f"device {device}" if device == 0 else str(device), "grey")
        accent = "accent" if ep == 0 else ""
        picture.box(x, 160, size - 4, 56, f"`edp{edp}`", f"`ep{ep}`", style=accent)
        for y0, y1 in ((100, 118), (144, 160)):
            picture.line((x + 31, y0), (x + 31, y1))
    return picture


def disaggregated() -> Picture:
    picture = Picture(286)
    step, left = 86, 22
    picture.lane(12, 92)
    picture.label(28, 34, "attention devices: KV cache, router", anchor="start")
    picture.lane(152, 92)
    picture.label(28, 232, "expert devices: routed experts", anchor="start")
    for slot in range(6):
        style = "accent" if slot % 2 == 0 else ""
        picture.box(left + step * slot, 46, step - 4, 48, f"layer {slot // 2}", style=style)
        if slot:
            style = "accent" if slot % 2 else ""
            x = left + step * slot
            picture.box(x, 162, step - 4, 48, f"layer {(slot - 1) // 2}", style=style)
    for slot in range(5):
        ends = (left + step * slot + 41, 94), (left + step * (slot + 1) + 41, 162)
        if slot % 2:
            ends = (ends[0][0], 162), (ends[1][0], 94)
        picture.arrow(*ends, style="accent")
    picture.label(24, 147, "messages", "grey", "start")
    picture.rect(24, 258, 16, 16, "accent")
    picture.label(48, 271, "micro-batch 1", anchor="start")
    picture.rect(196, 258, 16, 16)
    picture.label(220, 271, "micro-batch 2", anchor="start")
    picture.arrow((420, 266), (536, 266))
    picture.label(412, 271, "time", "grey", "end")
    return picture


def conversation() -> Picture:
    picture = Picture(312)
    step, left, wide = 106, 24, 92
    picture.lane(12, 86)
    picture.label(28, 34, "policy", anchor="start")
    picture.lane(112, 86)
    picture.label(28, 188, "environment", anchor="start")
    columns = [left + step * number for number in range(5)]
    for number, *lines in ((1, "turn 1:", "tool call"), (3, "turn 2:", "answer")):
        picture.box(columns[number], 40, wide, 50, *lines, style="accent")
    for number, *lines in ((0, "prompt"), (2, "tool", "result"), (4, "reward,", "done")):
        picture.box(columns[number], 120, wide, 50, *lines)
    for number, (a, b) in enumerate(pairwise(columns)):
        # Up from the environment and right to the policy, or right and down to the environment.
        if number % 2 == 0:
            picture.arrow((a + 46, 120), (a + 46, 65), (b, 65))
        else:
            picture.arrow((a + wide, 65), (b + 46, 65), (b + 46, 120))
            picture.label(b + 46, 54, "`step`", "grey")
    picture.label(28, 230, "tokens of the row, and their loss mask", anchor="start")
    for number, (content, mask) in enumerate(
        [("prompt", "0 0 0"), ("turn 1", "1 1 1"), ("result", "0 0 0"), ("turn 2", "1 1 1")]
    ):
        style = "accent" if "1" in mask else ""
        picture.box(columns[number], 242, step, 54, content, f"`{mask}`", style=style)
    picture.label(columns[4] + 8, 264, "loss: only", "accent", "start")
    picture.label(columns[4] + 8, 285, "the policy", "accent", "start")
    return picture


def serving() -> Picture:
    picture = Picture(296)
    picture.box(16, 44, 104, 44, "requests")
    picture.box(16, 124, 104, 56, "queue", "`--queue`")
    picture.arrow((68, 88), (68, 124))
    picture.arrow((120, 152), (160, 152), style="accent")
    left, step = 164, 62
    picture.label(left, 28, "`--slots`: a row of the KV cache each", anchor="start")
    for tick in range(7):
        picture.line((left + step * tick, 38), (left + step * tick, 204), style="dashed")
    rows = (
        [("A", 0, 1.7), ("E", 2, 6)],
        [("B", 0, 4.6), ("G", 5, 6)],
        [("C", 0, 2.5), ("F", 3, 6)],
        [("D", 0, 6)],
    )
    for row, requests in enumerate(rows):
        for name, begin, end in requests:
            style = "accent" if begin else ""
            size = step * (end - begin)
            picture.box(left + step * begin, 46 + 40 * row, size, 30, name, style=style)
    picture.label(left, 226, "`--window` tokens between two lines", "grey", "start")
    picture.label(left, 254, "at each line: flush streams,", anchor="start")
    picture.label(left, 276, "admit from the queue", "accent", "start")
    picture.box(16, 232, 104, 44, "streams")
    picture.arrow((158, 254), (120, 254))
    return picture


def processes() -> Picture:
    picture = Picture(300)
    for node, left in enumerate((16, 288)):
        picture.rect(left, 12, 256, 146)
        picture.label(left + 128, 36, f"node{node}")
        coordinator = ", coordinator" if node == 0 else ""
        picture.box(left + 12, 48, 232, 36, f"process {node}{coordinator}")
        picture.arrow((left + 128, 158), (left + 128, 228))
    picture.arrow((300, 66), (260, 66))
    picture.rect(20, 100, 520, 46, "accent")
    for device in range(16):
        left = 26 if device < 8 else 58
        picture.box(left + 30 * device, 108, 27, 30, str(device))
    picture.label(280, 182, "one mesh: `tp2 dp8 / ep8`", "accent")
    picture.label(136, 214, "its part", "grey", "end")
    picture.label(424, 214, "its part", "grey", "start")
    picture.box(16, 228, 528, 56, "run folder on a shared file system", "checkpoint")
    return picture


def fault() -> Picture:
    picture = Picture(270)
    picture.label(24, 34, "a metric of all machines", anchor="start")
    waves = (0, 5, -3, 4, -5, 2, -4, 5, 0, -4, 3, -2, 4, -5, 1, 3)
    points = [24 + 23 * number for number in range(16)]
    for shift in range(3):
        heights = [72 + 7 * shift + waves[(5 * shift + number) % 16] for number in range(16)]
        picture.line(*zip(points, heights, strict=True))
    drop = [0] * 8 + [30, 80, 112, 118, 116, 119, 115, 117]
    heights = [78 + fall + wave for fall, wave in zip(drop, waves, strict=True)]
    picture.line(*zip(points, heights, strict=True), style="accent")
    picture.line((208, 52), (208, 222), style="dashed")
    picture.arrow((24, 236), (370, 236))
    picture.label(116, 258, "before", "grey")
    picture.label(288, 258, "four minutes", "grey")
    picture.label(200, 200, "one machine", "accent", "end")
    picture.arrow((330, 94), (330, 186), style="accent")
    picture.label(322, 146, "level", "accent", "end")
    picture.box(398, 60, 146, 76, "score", "level - before,", "in spreads")
    picture.box(398, 176, 146, 56, "2.5 or more:", "alarm", style="accent")
    picture.arrow((471, 136), (471, 176))
    return picture


def sft() -> Picture:
    picture = Picture(322)
    picture.box(16, 16, 330, 40, '`{"prompt": "2+2?", "answer": "4"}`')
    picture.box(400, 16, 144, 40, "chat template")
    picture.arrow((346, 36), (400, 36))
    picture.arrow((472, 56), (472, 74), (181, 74), (181, 98))
    picture.label(16, 88, "tokens", anchor="start")
    picture.label(400, 98, "loss mask", anchor="start")
    lines = ("`<|im_start|>user`", "`2+2?<|im_end|>`", "`<|im_start|>assistant`", "`4<|im_end|>`")
    for number, line in enumerate(lines):
        style = "accent" if number == 3 else ""
        y = 98 + 31 * number
        picture.box(16, y, 330, 29, line, style=style)
        picture.label(400, y + 24, "`1` in the loss" if style else "`0` context", style, "start")
    picture.label(16, 250, "packing: conversations in one row", anchor="start")
    x = 16
    for context, turn in ((90, 56), (60, 96), (104, 44)):
        picture.box(x, 260, context, 46, "`0 0`")
        picture.box(x + context, 260, turn, 46, "`1 1`", style="accent")
        x += context + turn + 4
    picture.box(x, 260, WIDTH - MARGIN - x, 46, "pad", style="dashed")
    return picture


def evaluation() -> Picture:
    picture = Picture(264)
    picture.label(230, 30, "`--k 4` samples")
    picture.label(390, 30, "greedy")
    picture.label(508, 30, "any of 4")
    rows = ((1, 0, 1, 1), 1), ((0, 0, 0, 0), 0), ((0, 1, 1, 0), 1)
    for row, (samples, greedy) in enumerate(rows):
        y = 44 + 44 * row
        picture.label(24, y + 23, f"prompt {row + 1}", anchor="start")
        for column, correct in enumerate(samples):
            style = "accent" if correct else ""
            picture.box(130 + 52 * column, y, 46, 36, str(correct), style=style)
        for x, correct in ((367, greedy), (485, max(samples))):
            picture.box(x, y, 46, 36, str(correct), style="accent" if correct else "")
    picture.line((16, 182), (544, 182))
    picture.label(24, 206, "mean", anchor="start")
    for x, value in ((230, "5 / 12"), (390, "2 / 3"), (508, "2 / 3")):
        picture.label(x, 206, value)
    picture.label(230, 232, "sampled accuracy", "accent")
    picture.label(230, 252, "`pass@1`", "accent")
    picture.label(390, 232, "greedy accuracy", "accent")
    picture.label(508, 232, "`pass@4`", "accent")
    return picture


def checkpoints() -> Picture:
    picture = Picture(264)
    files = "`config.json`", "`safetensors`", "tokenizer"
    picture.box(16, 16, 132, 100, "`hf:DIR`", *files)
    picture.box(196, 16, 160, 100, "`jrl.train`", "RL, SFT, LoRA", style="accent")
    picture.box(404, 16, 140, 100, "run folder", "checkpoints")
    picture.arrow((148, 66), (196, 66))
    picture.arrow((356, 66), (404, 66))
    picture.arrow((474, 116), (474, 148))
    picture.box(404, 148, 140, 100, "`jrl.export`", style="accent")
    picture.box(196, 148, 160, 100, "`my-model`", *files)
    picture.box(16, 148, 132, 100, "vLLM,", "transformers")
    picture.arrow((404, 198), (356, 198))
    picture.arrow((196, 198), (148, 198))
    return picture


def rewards() -> Picture:
    picture = Picture(312)
    picture.box(16, 16, 176, 64, "prompt `fade=`", "answer `edaf`")
    picture.box(238, 16, 100, 64, "policy")
    picture.box(384, 16, 160, 64, "completion", "`edae`")
    picture.arrow((192, 48), (238, 48))
    picture.arrow((338, 48), (384, 48))
    picture.arrow((104, 80), (104, 116))
    picture.arrow((464, 80), (464, 116))
    call = "`reward(prompt, completion, answer)`"
    picture.box(16, 116, 528, 64, "reward process", call, style="accent")
    picture.arrow((104, 180), (104, 216))
    picture.arrow((272, 180), (272, 216))
    picture.box(28, 216, 152, 76, "`letters`", "0.75 x 1.0")
    picture.label(188, 259, "+")
    picture.box(196, 216, 152, 76, "`length`", "1 x 0.2")
    picture.arrow((348, 254), (404, 254))
    picture.box(404, 216, 140, 76, "score", "0.95", style="accent")
    return picture


def answers() -> Picture:
    picture = Picture(294)
    picture.label(24, 32, "completion", anchor="start")
    picture.box(16, 42, 528, 38, r"`<think>7 + 11 = 17?</think>She has \boxed{18}.`")
    picture.arrow((264, 80), (264, 112))
    picture.box(16, 112, 144, 64, "reference", "`18`")
    picture.box(192, 112, 144, 64, "extracted", "`18`", style="accent")
    picture.arrow((264, 176), (264, 212))
    picture.arrow((88, 176), (88, 234), (176, 234))
    picture.box(176, 212, 176, 44, "equal, final form?")
    picture.arrow((352, 226), (380, 226), (380, 141), (408, 141))
    picture.arrow((352, 242), (408, 242))
    picture.box(408, 112, 136, 58, "correct", "score 1", style="accent")
    picture.box(408, 182, 136, 96, "wrong", "unevaluated", "unparsable", "score 0")
    return picture


def objectives() -> Picture:
    picture = Picture(284)
    picture.label(262, 50, "`values`", "grey")
    picture.label(476, 30, "`logprobs`", "grey")
    picture.label(476, 50, "`old_logprobs`", "grey")
    picture.box(16, 88, 112, 72, "rewards")
    picture.box(172, 88, 180, 72, "advantages", "`grpo_advantages`", "`gae`")
    picture.box(396, 88, 148, 72, "policy loss", "per token:", "ratio, clip")
    picture.arrow((262, 58), (262, 88))
    picture.arrow((470, 58), (470, 88))
    picture.arrow((128, 124), (172, 124))
    picture.arrow((352, 124), (396, 124))
    picture.arrow((470, 160), (470, 200))
    picture.box(396, 200, 148, 64, "importance", "weights", style="dashed")
    picture.box(172, 200, 180, 64, "aggregation", "over the loss mask", style="accent")
    picture.box(16, 200, 112, 64, "loss")
    picture.arrow((396, 232), (352, 232))
    picture.arrow((172, 232), (128, 232))
    return picture


PICTURES: dict[str, Callable[[], Picture]] = {
    "answers.svg": answers,
    "asynchronous.svg": asynchronous,
    "checkpoints.svg": checkpoints,
    "conversation.svg": conversation,
    "disaggregated.svg": disaggregated,
    "evaluation.svg": evaluation,
    "fault.svg": fault,
    "layout.svg": layout,
    "objectives.svg": objectives,
    "processes.svg": processes,
    "rewards.svg": rewards,
    "serving.svg": serving,
    "sft.svg": sft,
    "training_loop.svg": training_loop,
}


def main() -> None:
    for name, draw in PICTURES.items():
        (FOLDER / name).write_bytes(draw().svg().encode())


if __name__ == "__main__":
    main()
