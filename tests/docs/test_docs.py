"""The pages tell the truth: their commands run, or at least parse, and what they name is there.

A fenced block of commands (bash) or of Python runs on tiny real data, page by page in the order of PAGES, in one
folder: what a page prepares, trains and exports, the next ones use. Where it cannot, a word after the language says
why, which a reader does not see: `hub` (weights or data sets of the model hub), `gpu`, `cluster` (several machines) or
`long` (minutes). Such commands are parsed: their options, and the fields of their configs. A block `text output` has
lines that the commands so far have printed, whatever the numbers.
"""

import argparse
import ast
import contextlib
import importlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import get_type_hints

import pytest

from longdraft.data_prep.recipe import PrepareConfig
from longdraft.launch import cli, quickstart
from longdraft.models.schema import validate
from longdraft.train.config import DRAFT_SECTIONS, Config, to_yaml
from longdraft.train.config_file import load_config, load_stages, read_yaml, resolve

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("train", "data_prep", "models", "kernels", "infer", "launch", "benchmarks")
# In the order in which their commands need each other.
PAGES = (
    *("docs/data.md", "docs/training.md", "docs/decoding.md", "docs/serving.md", "docs/exactness.md", "docs/gpus.md"),
    *("docs/adding_a_drafter.md", "docs/architecture.md", "README.md", "CONTRIBUTING.md", "benchmarks/README.md"),
    "docs/log/2026-11.md",
)
# Why a block does not run here.
REASONS = {"hub", "gpu", "cluster", "long"}
# What is no command of ours, and is not tried.
FOREIGN = {"make", "pip", "source", "git", "cd", "export", "vllm", "lm_eval", "guidellm", "aiperf"}
FENCE = re.compile(r"^```(\w+)?([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<to>[^)\s]+)\)|(?:src|srcset|href)=\"(?P<to_html>[^\"]+)\"")
CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
# What stands in the tiny world for what is too large.
SMALL = (
    (r"smollm2-135m(?!-)", "tiny"),  # but not the drafts of SmolLM2, which run with it
    ("--suite spec-bench ", "--suite spec-bench --prompts 2 "),
    ("--source stdlib-chat ", "--source my/chats.jsonl --chat-field messages "),
    ("--source stdlib ", "--source my/code "),
    ("--max-new-tokens 48", "--max-new-tokens 8"),
)


@dataclass(frozen=True)
class Block:
    """A fenced block: `line` is where it begins, `words` stand after the language."""

    page: str
    line: int
    language: str
    words: frozenset[str]
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """Of a shell: continued lines joined, without comments."""
        joined = self.text.replace("\\\n", " ")
        lines = (re.sub(r"(^|\s)#.*", "", line) for line in joined.splitlines())
        return [command.strip() for line in lines for command in line.split("&&") if command.strip()]


@cache
def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@cache
def blocks(page: str) -> tuple[Block, ...]:
    text = read(page)
    return tuple(
        Block(page, text[: found.start()].count("\n") + 1, found[1] or "", frozenset(found[2].split()), found[3])
        for found in FENCE.finditer(text)
    )


def prose(page: str) -> str:
    """A page without its fenced blocks."""
    return FENCE.sub("", read(page))


ALL = [block for page in PAGES for block in blocks(page)]
RUN = [block for block in ALL if block.language in ("bash", "python") and not block.words & REASONS]
PARSED = [block for block in ALL if block.language == "bash"]


# ---- what pages name


def test_the_readme_fits_150_lines_beside_a_line_for_each_file():
    page, _, rest = read("README.md").partition("<details>")
    tree, _, end = rest.partition("</details>")
    assert len((page + end).splitlines()) <= 150
    named, folder = set(), ""
    for line in tree.splitlines():
        folder = found[1] if (found := re.match(r"(\w+/) ", line)) else folder
        if line.startswith("  "):
            files = line.partition(": ")[0] if re.match(r"  [\w/]+, ", line) else line.split()[0]
            named |= {f"{folder}{name.strip()}.py" for name in files.split(",")}
    there = {path.relative_to(ROOT).as_posix() for name in FOLDERS for path in (ROOT / name).rglob("*.py")}
    assert named == there


def test_every_page_is_reached_from_the_readme():
    reached = {(ROOT / page).resolve() for page in ("README.md",)}
    todo = ["README.md"]
    while todo:
        page = todo.pop()
        for _, target in links(page):
            file = (ROOT / page).parent.joinpath(target.partition("#")[0]).resolve()
            if file.suffix == ".md" and file not in reached:
                reached.add(file)
                todo.append(str(file.relative_to(ROOT)))
    assert {ROOT / page for page in PAGES} <= reached


def links(page: str) -> list[tuple[str, str]]:
    """(text, target) of every link and picture that is none of the web's."""
    found = [(one["text"] or "", one["to"] or one["to_html"]) for one in LINK.finditer(prose(page))]
    return [(text, target) for text, target in found if not re.match(r"https?:|mailto:", target)]


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for _, target in links(page):
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), f"{page} links to {target}"
        assert not anchor or anchor in anchors(file), f"{page} links to {target}, which has {sorted(anchors(file))}"


@pytest.mark.parametrize("page", PAGES)
def test_code_that_is_linked_is_in_its_file(page):
    """A link `[`Name`](file.py)` or `[`Class.method`](file.py)`."""
    for text, target in links(page):
        if target.endswith(".py") and text.startswith("`") and not text.endswith(".py`"):
            defined = names((ROOT / page).parent / target)
            assert text.strip("`").removesuffix("()") in defined, f"{page}: {text} is not in {target}"


@cache
def names(file: Path) -> frozenset[str]:
    """What a module defines: functions, classes, their methods and fields, constants."""
    found = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        found |= _defined(node)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{name}" for inner in node.body for name in _defined(inner)}
    return frozenset(found)


def _defined(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


# Folders whose files pages name; what else looks like a path is the reader's own or a run's.
OURS = ("benchmarks", "configs", "data_prep", "docs", "infer", "kernels", "launch", "models", "tests", "train")


@pytest.mark.parametrize("page", [page for page in PAGES if page != "docs/log/2026-11.md"])
def test_files_and_fields_that_are_named_exist(page):
    """In backticks: paths of this repository, `section.field` of a training config, `--options` of a command."""
    known = known_options()
    sections = config_fields()
    for code in CODE.findall(prose(page)):
        for word in code.split():
            bare = word.rstrip(",.;:").partition("=")[0]
            if re.fullmatch(rf"(?:{'|'.join(OURS)})/[\w./*<>-]*", bare) and not set("*<>") & set(bare):
                assert (ROOT / bare).exists(), f"{page}: {word}"
            section, _, field = bare.partition(".")
            if section in sections and re.fullmatch(r"[a-z_]+", field):
                assert field in sections[section], f"{page}: {word}"
            if bare.startswith("--"):
                assert bare in known, f"{page}: {word}"


def config_fields() -> dict[str, set[str]]:
    """Fields by section; of `draft`, of every method."""
    known = {name: set(kind.model_fields) for name, kind in get_type_hints(Config).items() if name != "draft"}
    return known | {"draft": {name for kind in DRAFT_SECTIONS.values() for name in kind.model_fields}}


@cache
def known_options() -> frozenset[str]:
    """Of all our commands (`longdraft`'s are held to a file), and the few of others' that pages speak of."""
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
        call(["python", "benchmarks/kernels/run.py", "--help"])
    text = (ROOT / "tests/launch/options.json").read_text(encoding="utf-8") + shown.getvalue()
    ours = re.findall(r"(?<![\w-])--[a-z][\w-]*", f"{text} --help --version")
    return frozenset({*ours, "--num_gpus", "--include", "--hostfile", "--master_port", "--no-deps"})


@cache
def messages() -> str:
    """All of our code, with strings that stand in pieces put together."""
    code = "\n".join(file.read_text(encoding="utf-8") for folder in OURS for file in (ROOT / folder).rglob("*.py"))
    return re.sub(r'"\s*\n\s*f?"', "", code)


@pytest.mark.parametrize("page", [page for page in PAGES if "\n## When it fails" in read(page)])
def test_messages_that_are_explained_exist(page):
    """Code in the first column of the tables "When it fails": `...` stands for what varies."""
    table = prose(page).partition("\n## When it fails")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| ")]
    for message in (code for row in rows for code in CODE.findall(row) if not code.startswith("--")):
        for part in filter(None, map(str.strip, message.split("..."))):
            assert part in messages(), f"{page}: no message says {part!r}"


# ---- commands that do not run here


class Parsed(BaseException):
    """Thrown by a parser that took its arguments: none of our handlers takes it for an error."""


def call(command: list[str]) -> int:
    """One of our commands in this process; returns its exit status."""
    program, *arguments = command
    if program == "longdraft":
        main = cli.main
    elif program in ("python", "deepspeed"):
        while arguments[0].startswith("--"):  # of deepspeed's own
            del arguments[:2]
        script, *arguments = arguments
        main = importlib.import_module(f"longdraft.{script.removesuffix('.py').replace('/', '.')}").main
    else:
        raise AssertionError(f"no command of ours: {program}")
    try:
        return main(arguments) or 0
    except SystemExit as left:
        return int(left.code or 0)


@pytest.fixture
def parse_only(monkeypatch):
    """Parsers end what they begin: they throw Parsed with their namespace."""

    def ending(method):
        def parse(self, *args, **kwargs):
            raise Parsed(method(self, *args, **kwargs))

        return parse

    for name in ("parse_args", "parse_intermixed_args"):
        monkeypatch.setattr(argparse.ArgumentParser, name, ending(getattr(argparse.ArgumentParser, name)))


@pytest.mark.parametrize("block", PARSED, ids=lambda block: block.place)
def test_commands_parse(block, parse_only, monkeypatch):
    monkeypatch.chdir(ROOT)
    for line in block.commands:
        words = shlex.split(line)
        while re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            del words[0]
        program = words[0]
        if program == "make":
            targets = re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE)
            assert all(word in targets for word in words[1:] if "=" not in word), line
        elif program.startswith("launch/"):
            assert os.access(ROOT / program, os.X_OK), line
        elif program == "sbatch":
            assert (ROOT / words[1]).exists()
            _check_arguments(["longdraft", "train", *words[2:]], line)
        elif program not in FOREIGN:
            _check_arguments(words, line)


def test_what_make_runs_is_there():
    """pytest runs nothing at all where one of the files it is given is missing."""
    made = subprocess.run(["make", "-n", "quick", "nightly"], cwd=ROOT, capture_output=True, text=True, check=True)
    named = re.findall(r"(?<![\w/])tests/[\w/]+(?:\.py)?", made.stdout)
    assert len(named) > 20 and not [name for name in named if not (ROOT / name).exists()]


def _check_arguments(words: list[str], line: str) -> None:
    """The command's own parser takes them, and a config that is named has the fields that are overridden."""
    try:
        call(words)
    except Parsed as parsed:
        asked = parsed.args[0]
    else:
        raise AssertionError(f"not parsed: {line}")
    assert isinstance(asked, argparse.Namespace), line
    if hasattr(asked, "stage"):
        assert load_stages(asked.config, asked.overrides, asked.stage, None)
    if getattr(asked, "recipe", None):
        values = resolve(read_yaml(asked.recipe, vars(asked).get("overrides", [])))
        validate(PrepareConfig, {"out": "out", **values})


# ---- commands that run, as one story


@pytest.fixture(scope="module")
def world(tmp_path_factory, shared) -> Iterator[Path]:
    """A folder with a tiny target, texts, and our configs made small, which is the current one meanwhile."""
    world = tmp_path_factory.mktemp("world")
    library = (path.read_text(encoding="utf-8") for path in sorted(Path(os.__file__).parent.glob("[a-d]*.py")))
    text = "\n".join(library)[:400_000]
    parts = [text[start : start + 1500] for start in range(0, len(text), 1500)]
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>{% endfor %}assistant: "
    shared("tiny_checkpoint.py").save(world / "tiny", text, 600, chat_template=template, ends=3.0)
    for number, part in enumerate(parts):
        for file in (f"my/code/{number}.py", f"my/books/{number}.txt"):
            (world / file).parent.mkdir(parents=True, exist_ok=True)
            (world / file).write_text(part if "code" in file else part[:600])
    chats = [[{"role": "user", "content": p[:60]}, {"role": "assistant", "content": p[60:200]}] for p in parts]
    for name, field, many in (("chats", "messages", chats), ("notes", "body", parts)):
        (world / f"my/{name}.jsonl").write_text("".join(json.dumps({field: one}) + "\n" for one in many[:150]))
    for name in ("notes", "report"):
        (world / f"{name}.txt").write_text(parts[len(name)])
    shutil.copytree(world / "tiny", world / "my/model")
    shutil.copytree(ROOT / "configs", world / "configs")
    shutil.copytree(ROOT / "benchmarks/spec_bench", world / "benchmarks/spec_bench")
    make_small(world / "configs/quickstart.yaml")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("WANDB_MODE", "disabled")
        patch.chdir(world)
        yield world


def make_small(config: Path) -> None:
    """The same run on the tiny target, in a few steps."""
    short = ("train.steps=4", "train.save_every=2", "optimizer.warmup_steps=1", "heldout.rows=2", "heldout.choices=64")
    short = (*short, "draft.draft_vocab_size=300")
    config.write_text(to_yaml(load_config(config, [*short, "target.path=tiny", "log.wandb=disabled"])))


@pytest.fixture(scope="module")
def printed() -> list[str]:
    """What the commands have printed so far, and the headings of the quickstart, which runs the same commands."""
    steps = quickstart.commands("runs/quickstart", None)
    return [f"[{number}/{len(steps)}] {what}" for number, (what, _) in enumerate(steps, start=1)]


@pytest.fixture(scope="module")
def namespaces() -> dict[str, dict]:
    """Of each page's Python."""
    return {}


STORY = [block for block in ALL if block in RUN or (block.language == "text" and "output" in block.words)]


@pytest.mark.parametrize("block", STORY, ids=lambda block: f"{block.place}:{block.language}")
def test_the_story(block, world, printed, namespaces, capfd):
    """One after the other: a block needs what those before it left."""
    text = block.text
    for large, small in SMALL:
        text = re.sub(large, small, text)
    if block.language == "python":
        exec(compile(text, block.place, "exec"), namespaces.setdefault(block.page, {"__name__": "page"}))
        return
    if block.language == "text":
        known = {shape(line) for text in printed for line in re.split(r"[\r\n]+", text)}
        for line in text.splitlines():
            assert shape(line) in known, f"{block.place}: {line!r} was not printed, but:\n{printed[-1][-3000:]}"
        return
    for line in Block(block.page, block.line, "bash", block.words, text).commands:
        if line.split()[0] in FOREIGN:
            continue
        status = call(shlex.split(line))
        shown = capfd.readouterr()
        printed.append(shown.out + shown.err)
        assert status == 0, f"{block.place}: {line}\n{shown.err[-3000:]}"


def shape(line: str) -> str:
    """A line without its numbers, and what depends on them."""
    return re.sub(r"\s+", " ", re.sub(r"[\d,.]*\d%?", "#", line)).strip()
