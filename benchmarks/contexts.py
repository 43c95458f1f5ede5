"""What trained drafts bring by kind of text and length of context, beside drafters that need no training.

`python benchmarks/contexts.py --out runs/contexts` shows exactness, asks for continuations of prose, code and chats of
several lengths with every drafter in turns, and prints Markdown: speed over plain decoding with the middle 95 % of
bootstraps over prompts, and tokens a step. The texts are of installed packages: their descriptions, their code, and
conversations made of its docstrings; the drafts that come with longdraft saw none of them. `--out` keeps
every answer: the same command goes on where it was stopped, and `longdraft report` makes a page of it.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

import torch

from longdraft.benchmarks.answers import Record
from longdraft.benchmarks.drafters import BenchSettings, bench
from longdraft.benchmarks.questions import Asked, Question
from longdraft.benchmarks.report import markdown
from longdraft.data_prep.docstrings import read_docstrings
from longdraft.data_prep.documents import Conversation
from longdraft.infer.drafters.build import build_drafter
from longdraft.models.draft_files import WEIGHTS
from longdraft.models.draft_folder import draft_method, local_folder, shipped_drafts
from longdraft.models.files import file_digest
from longdraft.models.fingerprint import weights_hash
from longdraft.models.hf import load_target
from longdraft.models.target import Target

KINDS = ("prose", "code", "chat")
DRAFTERS = ("longspec", "tokenswift", "prompt_lookup", "token_recycling", "longspec+prompt_lookup")
CODE = ("transformers", "torch", "numpy")  # packages whose files are long enough, one after the other
CHARACTERS = 8  # of a token, at most, in these texts


def packages() -> list[Distribution]:
    return sorted(distributions(), key=lambda one: one.metadata["Name"].lower())


def descriptions(length: int) -> Iterator[str]:
    """Stretches of what packages say of themselves, without links and tables."""
    lines = "\n\n".join(str(one.metadata.json.get("description", "")) for one in packages()).split("\n")
    whole = "\n".join(line for line in lines if "://" not in line and not line.lstrip().startswith(("|", "+-", ".. ")))
    for start in range(0, len(whole) - length, length):
        yield whole[start : start + length]


def modules(length: int) -> Iterator[Path]:
    """Files of code of so many characters at least, of CODE's packages in turn."""
    files = {one.metadata["Name"]: one.files or [] for one in packages()}
    long = [[Path(str(f.locate())) for f in sorted(files[name]) if f.suffix == ".py"] for name in CODE]
    chosen = [[path for path in paths if path.is_file() and path.stat().st_size >= length] for paths in long]
    for of_all in zip(*chosen, strict=False):
        yield from of_all


def chat(target: Target, files: Sequence[Path], context: int) -> list[int]:
    """A conversation of the files' docstrings, with as many turns as the context holds, which ends with a question."""
    messages, ids = list[dict[str, str]](), list[int]()
    for one in (found for path in files for found in read_docstrings(path.name, path.read_bytes())):
        if not isinstance(one, Conversation):
            continue
        *asked, answer = ({"role": role, "content": content} for role, content in one.messages)
        found = target.tokenizer.apply_chat_template([*messages, *asked], add_generation_prompt=True, return_dict=False)
        if len(found) <= context:
            ids, messages = found, [*messages, *asked, answer]
        if len(ids) > 0.8 * context:
            break
    if not ids:
        raise ValueError(f"--contexts: {context}; no conversation of {files[0].name} is so short, give more")
    return ids


def questions(target: Target, contexts: Sequence[int], each: int) -> list[Asked]:
    """`each` prompts of every kind at every length; of one kind those of all lengths begin alike."""
    characters, found = CHARACTERS * max(contexts), []
    prose = [text for text, _ in zip(descriptions(characters), range(each), strict=False)]
    files = [path for path, _ in zip(modules(characters), range(20 * each), strict=False)]
    texts = {"prose": prose, "code": [path.read_text(encoding="utf-8") for path in files[:each]]}
    for context in contexts:
        for kind in KINDS:
            for number in range(each):
                if kind == "chat":
                    ids = chat(target, files[each + number :: each], context)
                else:
                    ids = target.tokenizer(texts[kind][number]).input_ids[:context]
                task = f"{kind}, {context:,}"
                found.append(Asked(Question(f"{task}, {number}", task, (ids,)), len(ids)))
    return found


def table(result: dict[str, Any]) -> str:
    parts = []
    for run in result["runs"]:
        names = [name for name in run["drafters"] if name != "plain"]
        title = "greedy" if run["temperature"] == 0 else f"T {run['temperature']:g}"
        rows = []
        for task in [*run["drafters"][names[0]]["tasks"], "all"]:
            cells = [run["drafters"][name] if task == "all" else run["drafters"][name]["tasks"][task] for name in names]
            rows.append([task, *map(_cell, cells)])
        parts.append(markdown([f"{title}: text, tokens", *names], rows))
    return "\n\n".join(parts)


def _cell(one: dict[str, Any]) -> str:
    low, high = one["intervals"]["speedup"]
    return f"{one['speedup']:.2f} ({low:.2f} to {high:.2f}); {one['tokens_per_step']:.2f}"


def asked_for(args: argparse.Namespace, target: Target, asked: Sequence[Asked]) -> dict[str, Any]:
    """What answers depend on, by which a record knows its own; target and drafts by the digests of their weights."""
    given: dict[str, Any] = {key: str(value) for key, value in vars(args).items() if key != "out"}
    given["target_weights"] = weights_hash(target.model)
    given["weights"] = [file_digest(local_folder(draft) / WEIGHTS) for draft in args.draft]
    return given | {"questions": [one.question.turns for one in asked]}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Drafters by kind of text and length of context.")
    add = parser.add_argument
    add("--target", default="smollm2-135m")
    add("--draft", nargs="+", default=shipped_drafts(), help="of one method each (default: those that come along)")
    add("--drafter", nargs="+", default=list(DRAFTERS))
    add("--contexts", nargs="+", type=int, default=[512, 2048, 8000])
    add("--each", type=int, default=2, help="prompts of every kind at every length")
    add("--new-tokens", type=int, default=64)
    add("--temperature", nargs="+", type=float, default=[0.0, 1.0])
    add("--exactness", choices=("fp32", "off"), default="fp32", help="whether it is shown first, in fp32 (the default)")
    add("--out", type=Path, required=True, help="folder of the record")
    args = parser.parse_args(argv)
    target = load_target(args.target, torch.float32 if args.exactness == "fp32" else torch.bfloat16)
    asked = questions(target, args.contexts, args.each)
    settings = BenchSettings(args.new_tokens, temperatures=tuple(args.temperature), proof=args.exactness, passes=False)
    drafts = {draft_method(draft): draft for draft in args.draft}
    builders = {
        name: lambda target, name=name: build_drafter(
            name, target, next((drafts[part] for part in name.split("+") if part in drafts), None)
        )
        for name in args.drafter
    }
    result = bench(target, builders, asked, settings, record=Record(args.out, asked_for(args, target, asked)))
    print(f"exact: {result['exact_checked']}\n\n{table(result)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
