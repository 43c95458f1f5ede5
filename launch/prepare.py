"""Pack text into shards of tokens, by options or by a recipe, or inspect the result:

    python launch/prepare.py --source stdlib --target smollm2-135m --out data/quickstart --seq-len 256
    python launch/prepare.py configs/data/pg19.yaml --target meta-llama/Llama-3.1-8B
    python launch/prepare.py --inspect data/quickstart --target smollm2-135m

Only argument parsing is here; the work is in data_prep/prepare.py and data_prep/inspection.py. `prepare regenerate` is
another command, launch/regenerate.py.
"""

import argparse
import json
import os
import sys
from argparse import SUPPRESS
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from longdraft.data_prep.failures import failures_described
from longdraft.data_prep.prepare import merge, prepare
from longdraft.data_prep.recipe import PrepareConfig, Source, same_way
from longdraft.data_prep.tasks import read_machine
from longdraft.launch.console import flag, run_command, show
from longdraft.models.schema import validate

# What the modes that prepare nothing read, and what each mode needs; with a recipe, only the target.
READ_BY = {"inspect": ("inspect", "target", "json"), "merge": ("merge", "out", "max_bad_share")}
NEEDED_BY = {"inspect": (), "merge": ("out",), "prepare": ("source", "target", "out", "seq_len")}


def main(argv: Sequence[str] | None = None) -> int | None:
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] == "regenerate":
        from longdraft.launch.regenerate import main as regenerate

        return regenerate(argv[1:])
    parser = _parser()
    given = vars(parser.parse_intermixed_args(argv))
    mode = next((mode for mode in READ_BY if mode in given), "prepare")
    if unread := [flag(name) for name in given if name not in READ_BY.get(mode, given)]:
        parser.error(f"--{mode} prepares nothing and does not read {', '.join(unread)}; leave it out")
    if "json" in given and mode != "inspect":
        parser.error("--json goes with --inspect")
    needed = ("target",) if "recipe" in given and mode == "prepare" else NEEDED_BY[mode]
    if missing := [flag(name) for name in needed if name not in given]:
        parser.error(f"the following arguments are required: {', '.join(missing)}")
    work = partial({"inspect": _inspect, "merge": _merge, "prepare": _prepare}[mode], given)
    on_ctrl_c = "interrupted; finished shards are kept, and the same command continues"
    if status := run_command(parser.prog, work, on_ctrl_c, needs_output=mode == "inspect"):
        parser.exit(status)
    return None


def _log(text: str) -> None:
    show(f"{text}\n")


def _parser() -> argparse.ArgumentParser:
    description = "Pack text into shards of tokens. `longdraft prepare regenerate` lets a target answer prompts first."
    parser = argparse.ArgumentParser(prog="longdraft prepare", description=description)
    default = {name: field.default for name, field in PrepareConfig.model_fields.items()}
    add = partial(parser.add_argument, default=SUPPRESS)
    add("recipe", nargs="?", help="a YAML file such as those in configs/data/, instead of --source and its settings")
    help = "fields of the recipe: seq_len=4096 sources.books.path=/data/pg19"
    add("overrides", nargs="*", metavar="field=value", help=help)
    help = "files, folders, data sets on the hub (owner/name[@revision]), 'stdlib' (Python's own library) or "
    add("--source", nargs="+", metavar="PATH", help=help + "'stdlib-chat' (conversations made of its docstrings)")
    add("--target", help="model whose tokenizer is used: a folder, a hub name or smollm2-135m")
    help = "folder to create, or to continue; {address} in it becomes the hash of sources, tokenizer and settings "
    add("--out", type=Path, help=help + "(default with a recipe: data/RECIPE-{address})")
    add("--seq-len", type=int, help="tokens in a packed row")
    help = f"pack: all tokens; first: only the first --seq-len of long documents (default: {default['documents']})"
    add("--documents", help=help)
    add("--text-field", help="field of a record (JSONL, CSV, Parquet, ...) that holds the text")
    help = "field of a record that holds a conversation; the loss then counts only its answers"
    add("--chat-field", help=help)
    help = "a Jinja file for a target without its own chat template (see configs/chat_templates/), or plain"
    add("--chat-template", type=Path, metavar="FILE", help=help)
    help = "patterns of the files to take (default: all with a known suffix)"
    add("--files", nargs="+", metavar="PATTERN", help=help)
    help = "a data set's configuration, by its README or its files' names, instead of --files (default: the only one)"
    add("--config", metavar="NAME", help=help)
    help = "a data set's split (train, test, ...), found in the same way, instead of --files (default: all)"
    add("--split", metavar="NAME", help=help)
    help = f"share of the documents to hold out, chosen by their hash (default: {default['heldout_share']})"
    add("--heldout-share", type=float, help=help)
    add("--max-tokens", type=int, help="keep at most this many tokens, sampled over all files")
    add("--seed", type=int, help=f"seed of the split and the order (default: {default['seed']})")
    help = f"share of bad documents above which it is an error (default: {default['max_bad_share']})"
    add("--max-bad-share", type=float, help=help)
    help = "number of processes, which does not change the result (default: one for each core)"
    add("--workers", type=int, help=help)
    help = "clear a folder that was prepared with something else, and prepare anew"
    add("--overwrite", action="store_true", help=help)
    help = "make only every n-th shard, starting with the i-th, on one of n machines; then join the folders and --merge"
    add("--shard", metavar="i/n", help=help)
    add("--merge", action="store_true", help="instead of preparing, finish --out, whose shards were made with --shard")
    help = "instead of preparing, print what this folder holds (with --target, samples too)"
    add("--inspect", type=Path, metavar="FOLDER", help=help)
    add("--json", action="store_true", help="with --inspect: print one JSON object")
    return parser


def _prepare(given: dict[str, Any]) -> None:
    config = _config(given)
    machine = read_machine(given["shard"]) if "shard" in given else None
    # Imported here so that --help and a wrong argument need not wait for transformers.
    from longdraft.models.fingerprint import tokenizer_hash
    from longdraft.models.hf import load_tokenizer

    tokenizer = load_tokenizer(given["target"])
    named = {source.tokenizer for source in config.sources.values() if source.tokenizer is not None}
    tokenizers = {name: load_tokenizer(name) for name in sorted(named)}
    prepare(config, tokenizer, tokenizer_hash(tokenizer), tokenizers, machine, _log)


def _config(given: dict[str, Any]) -> PrepareConfig:
    """What the options ask for, laid over the recipe if there is one."""
    reading = {name: value for name, value in given.items() if name in Source.model_fields}
    if "recipe" in given:
        from longdraft.train.config_file import read_yaml, resolve

        if "source" in given or reading:
            option, recipe = flag(next(iter(reading), "source")), given["recipe"]
            raise ValueError(f"{option} is given with the recipe {recipe}; write sources.NAME.FIELD=... instead")
        values = {"out": Path("data", f"{Path(given['recipe']).stem}-{{address}}")}
        values |= resolve(read_yaml(given["recipe"], given.get("overrides", [])))
    else:
        values = {"sources": same_way(given["source"], **reading)}
    values |= {name: value for name, value in given.items() if name in PrepareConfig.model_fields}
    return validate(PrepareConfig, {"workers": os.cpu_count() or 1, **values})


def _merge(given: dict[str, Any]) -> None:
    merge(given["out"], given.get("max_bad_share", PrepareConfig.model_fields["max_bad_share"].default), _log)


def _inspect(given: dict[str, Any]) -> None:
    from longdraft.data_prep.inspection import as_text, inspect

    folder, tokenizer, digest = given["inspect"], None, ""
    if "target" in given:
        from longdraft.models.fingerprint import tokenizer_hash
        from longdraft.models.hf import load_tokenizer

        tokenizer = load_tokenizer(given["target"])
        digest = tokenizer_hash(tokenizer)
    with failures_described(folder):
        report = inspect(folder, tokenizer, digest)
    _log(json.dumps(report, ensure_ascii=False, indent=1) if "json" in given else as_text(folder, report))


if __name__ == "__main__":
    sys.exit(main())
