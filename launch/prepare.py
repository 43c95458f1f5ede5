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

from longdraft.data_prep.failures import failures_described
from longdraft.data_prep.prepare import merge, prepare
from longdraft.data_prep.recipe import PrepareConfig, same_way
from longdraft.data_prep.tasks import read_machine
from longdraft.launch.console import flag, run_command, show
from longdraft.models.schema import validate

# Options that are fields of a recipe, and options that are fields of a recipe's source.
SETTINGS = ("out", "seq_len", "documents", "chat_template", "heldout_share", "max_tokens", "seed")
SETTINGS += ("max_bad_share", "workers", "overwrite")
OF_A_SOURCE = ("files", "config", "split", "text_field", "chat_field")
# What the two modes that prepare nothing read.
READ_BY = {"inspect": ("inspect", "target", "json"), "merge": ("merge", "out", "max_bad_share")}


def main(argv: Sequence[str] | None = None) -> int | None:
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] == "regenerate":
        from longdraft.launch.regenerate import main as regenerate

        return regenerate(argv[1:])
    parser = _parser()
    args = parser.parse_intermixed_args(argv)
    mode = "inspect" if "inspect" in args else "merge" if "merge" in args else None
    if mode is not None and (unread := [name for name in vars(args) if name not in READ_BY[mode]]):
        parser.error(f"--{mode} prepares nothing and does not read {', '.join(map(flag, unread))}; leave it out")
    if "json" in args and mode != "inspect":
        parser.error("--json goes with --inspect")

    def work() -> None:
        if mode == "inspect":
            with failures_described(args.inspect):
                _inspect(args.inspect, vars(args).get("target"), "json" in args)
        elif mode == "merge":
            _check_given(parser, args, "out")
            limit = {"max_bad_share": args.max_bad_share} if "max_bad_share" in args else {}
            merge(args.out, **limit, log=_log)
        else:
            _prepare(parser, args)

    on_ctrl_c = "interrupted; finished shards are kept, and the same command continues"
    if status := run_command(parser.prog, work, on_ctrl_c, needs_output=mode == "inspect", by_force=True):
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


def _prepare(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    _check_given(parser, args, *(("target",) if "recipe" in args else ("source", "target", "out", "seq_len")))
    config = _config(args)
    machine = read_machine(args.shard) if "shard" in args else None
    # Imported here so that --help and a wrong argument need not wait for transformers.
    from longdraft.models.fingerprint import tokenizer_hash
    from longdraft.models.hf import load_tokenizer

    tokenizer = load_tokenizer(args.target)
    named = {source.tokenizer for source in config.sources.values() if source.tokenizer is not None}
    tokenizers = {name: load_tokenizer(name) for name in sorted(named)}
    prepare(config, tokenizer, tokenizer_hash(tokenizer), tokenizers, machine, _log)


def _config(args: argparse.Namespace) -> PrepareConfig:
    """What the options ask for, laid over the recipe if there is one."""
    given = vars(args)
    reading = {name: given[name] for name in OF_A_SOURCE if name in given}
    if "recipe" in args:
        from longdraft.train.config_file import read_yaml, resolve

        if "source" in args or reading:
            option = next(iter(reading), "source")
            raise ValueError(
                f"{flag(option)} is given with the recipe {args.recipe}; write sources.NAME.FIELD=... instead"
            )
        values = {"out": Path("data", f"{Path(args.recipe).stem}-{{address}}")}
        values |= resolve(read_yaml(args.recipe, given.get("overrides", [])))
    else:
        values = {"sources": same_way(args.source, **reading)}
    values |= {name: given[name] for name in SETTINGS if name in given}
    return validate(PrepareConfig, {"workers": os.cpu_count() or 1, **values})


def _check_given(parser: argparse.ArgumentParser, args: argparse.Namespace, *names: str) -> None:
    """Ends with argparse's own error for options that are missing."""
    if missing := [flag(name) for name in names if name not in args]:
        parser.error(f"the following arguments are required: {', '.join(missing)}")


def _inspect(folder: Path, target: str | None, as_json: bool) -> None:
    from longdraft.data_prep.inspection import as_text, inspect

    if target is None:
        report = inspect(folder)
    else:
        from longdraft.models.fingerprint import tokenizer_hash
        from longdraft.models.hf import load_tokenizer

        tokenizer = load_tokenizer(target)
        report = inspect(folder, tokenizer, tokenizer_hash(tokenizer))
    _log(json.dumps(report, ensure_ascii=False, indent=1) if as_json else as_text(folder, report))


if __name__ == "__main__":
    sys.exit(main())
