"""The page of a record: its structure against a golden text, and that it needs nothing from elsewhere."""

import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from longdraft.benchmarks.drafters.charts import Bar, bars, lines
from longdraft.benchmarks.drafters.html_report import page, picture
from longdraft.benchmarks.drafters.record import Answer, Entry, Record
from longdraft.launch import report

GOLDEN = Path(__file__).parent / "golden_report.txt"
VOID = {"meta", "line", "rect", "circle", "path"}


def made(drafters: dict[str, int], every: int = 5120, temperatures=(0.0,)) -> Record:
    """Six questions of three tasks; a drafter commits so many tokens a step, plain decoding one, a millisecond each."""
    record = Record(
        None, {"suite": "mrcr", "drafters": drafters, "dtype": "bf16", "nodes": 4, "seed": 0, "sampling": {}}
    )
    record.set_proof({"exact": True, "exact_checked": "96 tokens a drafter in fp32", "proof": {"form": "fp32"}})
    record.set_machine(
        {"target": "a <target>", "device": "a machine", "threads": 2, "date": "2026-01-01", "versions": {}}
    )
    record.leave_out([{"id": "too & long", "task": "t", "tokens": 9, "why": "too long"}])
    for temperature in temperatures:
        for i in range(6):
            for name, length in {"plain": 1, **drafters}.items():
                steps = [length] * (every * (1 + i) // length)
                seconds = [0.001 * (place + 1) for place in range(len(steps))]
                answer = Answer(
                    900 << i, [1] * sum(steps), "", "stop", steps, seconds, 4 * len(steps) * (length > 1),
                    decode_seconds=seconds[-1], draft_seconds=seconds[-1] / 4, target_seconds=seconds[-1] / 2,
                )  # fmt: skip
                record.add(Entry(i, f"{2 << i % 3}needle", "", name, temperature, [answer]))
    return record


class Outline(HTMLParser):
    """Tags with their class, nested by indentation, and texts; of a drawing what it is and how much is in it."""

    def __init__(self):
        super().__init__()
        self.lines, self.open, self.drawn = [], [], {}

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if "svg" in self.open:
            if given.get("class"):
                self.drawn[given["class"]] = self.drawn.get(given["class"], 0) + 1
        elif tag != "style":
            label = given.get("class") or given.get("aria-label") or ""
            self.lines.append(f"{'  ' * len(self.open)}{tag}{f' [{label}]' if label else ''}")
        if tag not in VOID or tag == "svg":
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag in VOID:
            return
        assert self.open.pop() == tag
        if tag == "svg":
            counted = ", ".join(f"{count} {name}" for name, count in sorted(self.drawn.items()))
            self.lines.append(f"{'  ' * (len(self.open) + 1)}{counted}")
            self.drawn = {}

    def handle_data(self, data):
        if data.strip() and not {"svg", "style"} & set(self.open):
            self.lines[-1] += f": {data.strip()}"


def outline(text: str) -> str:
    parser = Outline()
    parser.feed(text)
    assert parser.open == []
    return "\n".join(parser.lines) + "\n"


def test_the_page_of_a_record_is_the_golden_one():
    assert outline(page({"one": made({"longspec": 4, "a+b": 2})})) == GOLDEN.read_text()


def test_it_needs_nothing_from_elsewhere_and_escapes_names():
    text = page({"one": made({"longspec": 4}), "<two>": made({"longspec": 2})})
    assert not re.search(r"https?:|\bsrc=|\burl\(|@import|<script|<link|<img", text)
    assert "a &lt;target&gt;" in text and "&lt;two&gt;" in text and "<two>" not in text and "too &amp; long" in text
    assert "prefers-color-scheme: dark" in text and "@media print" in text and "width=device-width" in text
    for part in re.findall(r"<svg.*?</svg>", text):
        ElementTree.fromstring(part)


def test_runs_and_temperatures_stand_side_by_side():
    text = outline(page({"one": made({"d": 4}, 50, (0.0, 1.0)), "two": made({"d": 2}, 50)}))
    for name in ("d, T 0, one", "d, T 1, one", "d, two", "plain, two"):
        assert f"li: {name}\n" in text.replace("\n          1 s", "\n1 s") or name in text
    assert text.count("section [run]") == 2


def test_numbers_stand_at_their_marks():
    drawn = ElementTree.fromstring(bars("speeds", {"t": [Bar(0, "d", 2.0, 1.5, 2.5), Bar(9, "e", 1.0)]}, mark=1.0))
    rects = drawn.findall(".//rect")
    assert [rect.get("class") for rect in rects] == ["s0", "s1"]
    assert float(rects[0].get("width")) == pytest.approx(2 * float(rects[1].get("width")), abs=0.2)
    assert float(drawn.find("line").get("x1")) == pytest.approx(float(rects[1].get("width")), abs=0.1)
    assert [title.text for title in drawn.iter("title")] == ["t, d: 2.00 (1.50-2.50)", "t, e: 1.00"]
    drawn = ElementTree.fromstring(lines("places", {0: [(1, 0.8), (2, 0.4)]}, "place", "share"))
    first, second = drawn.findall("circle")
    base = max(float(line.get("y1")) for line in drawn.findall("line"))
    heights = [base - float(point.get("cy")) for point in (first, second)]
    assert heights[0] == pytest.approx(2 * heights[1], abs=0.2)


def test_a_picture_is_an_svg_file():
    root = ElementTree.fromstring(picture({"one": made({"longspec": 4, "a+b": 2}, 50)}))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert len(root.findall(".//{*}g/{*}rect")) == 6  # two drafters on three tasks


def test_the_command_names_what_is_wrong(tmp_path, capsys):
    for arguments, message in (
        ([str(tmp_path)], f"{tmp_path}/record.jsonl cannot be read: No such file"),
        ([str(tmp_path), "--out", "report.pdf"], "--out: report.pdf is neither a page nor a picture"),
    ):
        assert report.main(arguments) == 2
        assert message in capsys.readouterr().err
    Record(tmp_path, {"suite": None})
    assert report.main([str(tmp_path), "--out", str(tmp_path / "r.html")]) == 2
    assert "no question has been answered yet" in capsys.readouterr().err


if __name__ == "__main__":
    GOLDEN.write_text(outline(page({"one": made({"longspec": 4, "a+b": 2})})))
