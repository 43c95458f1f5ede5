"""The page of a record: what it shows, and that it needs nothing from elsewhere."""

import re
from html import unescape

from longdraft.benchmarks.drafters.record import Answer, Entry, Record, recorded
from longdraft.benchmarks.drafters.report import bars, collect, line_chart, page, table
from longdraft.launch import cli


def made(drafters: dict[str, int], every: int = 5120, temperatures=(0.0,)) -> Record:
    """Six questions of three tasks; a drafter commits so many tokens a step, plain decoding one, a millisecond each."""
    record = Record({"suite": "mrcr", "drafters": drafters, "dtype": "bf16", "nodes": 4, "seed": 0, "sampling": {}})
    record.add("proof", {"exact": True, "exact_checked": "96 tokens a drafter in fp32", "proof": {"form": "fp32"}})
    record.add(
        "machine", {"target": "a <target>", "device": "a machine", "threads": 2, "date": "2026-01-01", "versions": {}}
    )
    for temperature in temperatures:
        for i in range(6):
            for name, length in {"plain": 1, **drafters}.items():
                steps = [length] * (every * (1 + i) // length)
                seconds = [0.001 * (place + 1) for place in range(len(steps))]
                answer = Answer(
                    900 << i, [1] * sum(steps), "", "stop", steps, seconds, 4 * len(steps) * (length > 1),
                    decode_seconds=seconds[-1], draft_seconds=seconds[-1] / 4, target_seconds=seconds[-1] / 2,
                )  # fmt: skip
                record.add("entry", Entry(i, f"{2 << i % 3}needle", "", name, temperature, [answer]))
    return record


def test_a_page_has_what_was_asked_for_the_table_and_every_chart():
    text = page({"one": made({"longspec": 4, "a+b": 2})})
    box, table = (unescape(one).splitlines() for one in re.findall("<pre>(.*?)</pre>", text, re.S))
    assert {"exact: yes (96 tokens a drafter in fp32)", "prompts: 6", "nodes: 4", "target: a <target>"} <= set(box)
    cells = [re.split("  +", line.strip()) for line in table]
    assert cells[0] == ["plain", "longspec", "a+b"]
    assert {row[0]: row[2] for row in cells[1:]}.items() >= {
        "tokens/step": "4.000", "95 % interval": "4.00-4.00", "acceptance": "0.750",
        "nodes/step": "4.0", "tokens/s, decoding": "4000.0", "draft, ms/step": "0.25", "verify, ms/step": "0.50",
        "speed over plain": "4.00", "2needle": "4.00", "plain decoding's tokens": "107520 of 107520",
    }.items()  # fmt: skip
    drawn = re.findall(r"<svg.*?</svg>", text, re.S)
    titles = ("plain decoding, by context", "plain decoding, by task", "Steps that", "ms/token")
    assert len(drawn) == len(titles) and all(title in one for title, one in zip(titles, drawn, strict=True))
    one_task = made({"longspec": 4}, 50)
    one_task.entries = {key: entry for key, entry in one_task.entries.items() if entry.task == "4needle"}
    text = page({"one": one_task})
    assert titles[0] in text and titles[1] not in text


def test_the_table_has_the_time_of_a_token_along_the_longest_text():
    runs = [{"temperature": 0.0, "drafters": collect({"one": made({"longspec": 4})})}]
    asked = {"prompts": 6, "prompt_tokens": [9, 9], "new_tokens": 9, "seed": 0, "sampling": {}, "ignore_eos": True}
    machine = {"target": "a", "dtype": "bf16", "device": "b", "threads": 1, "peak_memory_mib": 1}
    shown = table({"settings": asked, "runs": runs, "width_curves_ms": {}, **machine}).splitlines()
    along = [line for line in shown if "ms/token" in line]
    assert along[1] == "longspec, ms/token up to token 10,240: 0.25, 20,480: 0.25, 25,600: 0.25"
    assert along[0].startswith("plain, ") and len(along) == 2


def test_it_needs_nothing_from_elsewhere_and_escapes_names():
    text = page({"one": made({"longspec": 4}, 50), "<two>": made({"longspec": 2}, 50)})
    outside = re.sub(r'xmlns(:\w+)?="[^"]*"|<metadata>.*?</metadata>', "", text, flags=re.S)
    assert not re.search(r"https?:|\bsrc=|url\((?!#)|@import|<script|<link|<img", outside)
    assert "a &lt;target&gt;" in text and "<two>" not in text and text.count("<section>") == 2


def test_runs_of_other_tasks_and_lengths_stand_side_by_side():
    """Also a run that has not ended. A drafter has one colour in all groups."""
    one, two = made({"longspec": 4}, 50), made({"longspec": 2}, 50)
    for key in [key for key, entry in two.entries.items() if entry.task != "4needle"]:
        del two.entries[key]
    for runs in ({"one": one, "two": two}, {"two": two, "one": one}):
        text = page(runs)
        (table,) = (unescape(box) for box in re.findall("<pre>(.*?)</pre>", text, re.S) if "2needle" in box)
        rows = {line.split()[0]: line.split()[1:] for line in table.splitlines() if "needle" in line}
        assert sorted(rows["2needle"]) == ["-", "-", "1.00", "4.00"] and "-" not in rows["4needle"]
    groups = {"t": [("a", 1, 1, 1), ("b", 1, 1, 1)], "u": [("b", 1, 1, 1)]}
    colours = [patch.get_facecolor() for patch in bars("speeds", groups).axes[0].patches]
    assert colours[1] == colours[2] != colours[0]


def test_runs_and_temperatures_stand_side_by_side():
    found = collect({"one": made({"d": 4}, 50, (0.0, 1.0)), "two": made({"d": 2}, 50)})
    assert list(found)[1::2] == ["d, T 0, one", "d, T 1, one", "d, two"]


def test_numbers_stand_at_their_marks():
    figure = bars("speeds", {"t": [("d", 2.0, 1.5, 2.5), ("e", 1.0, 1.0, 1.0)]})
    (axes,) = figure.axes
    assert [patch.get_width() for patch in axes.patches] == [2.0, 1.0]
    assert [text.get_text().strip() for text in axes.texts] == ["2.00 (1.50-2.50)", "1.00 (1.00-1.00)"]
    (axes,) = line_chart("places", {"d": [(1, 0.8), (2, 0.4)]}, "place", "share").axes
    assert axes.lines[0].get_ydata().tolist() == [0.8, 0.4] and axes.get_ylim()[0] == 0
    assert all(x == int(x) for x in axes.get_xticks())


def test_the_command_names_what_is_wrong(tmp_path, capsys):
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "plan.json" in capsys.readouterr().err
    for entries in ([], [Entry(1, "t", "t", "plain", 0.0, []), Entry(2, "t", "t", "d", 0.0, [])]):
        with recorded(tmp_path, {"suite": None}) as record:
            for entry in entries:
                record.add("entry", entry)
        assert cli.main(["report", str(tmp_path), "--out", str(tmp_path / "r.html")]) == 2
        assert "no question has been answered" in capsys.readouterr().err
