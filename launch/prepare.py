"""Pack text into shards of tokens, by options or by a recipe, or inspect the result:

    python launch/prepare.py --source stdlib --target smollm2-135m --out data/quickstart --seq-len 256
    python launch/prepare.py configs/data/pg19.yaml --target meta-llama/Llama-3.1-8B
    python launch/prepare.py --inspect data/quickstart --target smollm2-135m

Only argument parsing is here; the work is in data_prep/prepare.py and data_prep/inspection.py. `prepare regenerate` is
another command, launch/regenerate.py.
"""

import argparse
import os
import sys
from argparse import SUPPRESS
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longdraft.data_prep.failures import failures_described
from longdraft.data_prep.prepare import LENGTHS_PNG, merge, prepare
from longdraft.data_prep.settings import PrepareConfig, same_way
from longdraft.data_prep.tasks import read_machine
from longdraft.launch.console import flag, note, run_command, show

# Options that are fields of a recipe, and options that are fields of a recipe's source.
SETTINGS = ("seq_len", "documents", "chat_template", "heldout_share", "max_tokens", "seed")
OF_A_SOURCE = ("files", "config", "split", "text_field", "chat_field")


def main(argv: Sequence[str] | None = None) -> int | None:
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] == "regenerate":
        from longdraft.launch.regenerate import main as regenerate

        return regenerate(argv[1:])
    parser = _parser()
    args = parser.parse_intermixed_args(argv)
    _check_used(parser, args)

    def work() -> None:
        if args.inspect is not None:
            with failures_described(args.inspect):
                _inspect(args.inspect, args.target, args.json)
        elif args.merge:
            limit = {"max_bad_share": args.max_bad_share} if "max_bad_share" in args else {}
            merge(_needed(parser, out=args.out)["out"], **limit, log=_log)
        else:
            _prepare(parser, args)

    on_ctrl_c = "interrupted; finished shards are kept, and the same command continues"
    if status := run_command(parser.prog, work, on_ctrl_c, needs_output=args.inspect is not None, by_force=True):
        parser.exit(status)
    return None


def _log(text: str) -> None:
    show(f"{text}\n")


def _check_used(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End with an error if an option is given that --inspect or --merge, which prepare nothing, do not read."""
    if args.json and args.inspect is None:
        parser.error("--json goes with --inspect")
    mode = "inspect" if args.inspect is not None else "merge" if args.merge else None
    if mode is None:
        return
    read = {"inspect": ("inspect", "target", "json"), "merge": ("merge", "out", "max_bad_share")}[mode]
    given = [
        name
        for name, value in vars(args).items()
        if name not in read and value is not None and value is not False and value != []  # 0 is a value: of --seed
    ]
    if given:
        named = ", ".join(name if name in ("recipe", "overrides") else flag(name) for name in given)
        parser.error(f"--{mode} prepares nothing and does not read {named}; leave it out")


def _parser() -> argparse.ArgumentParser:
    description = "Pack text into shards of tokens. `longdraft prepare regenerate` lets a target answer prompts first."
    parser = argparse.ArgumentParser(prog="longdraft prepare", description=description)
    default = PrepareConfig(sources={}, out=Path(), seq_len=2)
    add = parser.add_argument
    add("recipe", nargs="?", help="a YAML file such as those in configs/data/, instead of --source and its settings")
    help = "fields of the recipe: seq_len=4096 sources.books.path=/data/pg19"
    add("overrides", nargs="*", metavar="field=value", help=help)
    help = "files, folders, data sets on the hub (owner/name[@revision]), 'stdlib' (Python's own library) or "
    add("--source", nargs="+", metavar="PATH", help=help + "'stdlib-chat' (conversations made of its docstrings)")
    add("--target", help="model whose tokenizer is used: a folder, a hub name or smollm2-135m")
    help = "folder to create, or to continue; {address} in it becomes the hash of sources, tokenizer and settings "
    add("--out", type=Path, help=help + "(default with a recipe: data/RECIPE-{address})")
    add("--seq-len", type=int, default=SUPPRESS, help="tokens in a packed row")
    help = f"pack: all tokens; first: only the first --seq-len of long documents (default: {default.documents})"
    add("--documents", default=SUPPRESS, help=help)
    add("--text-field", default=SUPPRESS, help="field of a record (JSONL, CSV, Parquet, ...) that holds the text")
    help = "field of a record that holds a conversation; the loss then counts only its answers"
    add("--chat-field", default=SUPPRESS, help=help)
    help = "a Jinja file for a target without its own chat template (see configs/chat_templates/), or plain"
    add("--chat-template", type=Path, metavar="FILE", default=SUPPRESS, help=help)
    help = "patterns of the files to take (default: all with a known suffix)"
    add("--files", nargs="+", default=SUPPRESS, metavar="PATTERN", help=help)
    help = "a data set's configuration, by its README or its files' names, instead of --files (default: the only one)"
    add("--config", default=SUPPRESS, metavar="NAME", help=help)
    help = "a data set's split (train, test, ...), found in the same way, instead of --files (default: all)"
    add("--split", default=SUPPRESS, metavar="NAME", help=help)
    help = f"share of the documents to hold out, chosen by their hash (default: {default.heldout_share})"
    add("--heldout-share", type=float, default=SUPPRESS, help=help)
    add("--max-tokens", type=int, default=SUPPRESS, help="keep at most this many tokens, sampled over all files")
    add("--seed", type=int, default=SUPPRESS, help=f"seed of the split and the order (default: {default.seed})")
    help = f"share of bad documents above which it is an error (default: {default.max_bad_share})"
    add("--max-bad-share", type=float, default=SUPPRESS, help=help)
    help = "number of processes, which does not change the result (default: one for each core)"
    add("--workers", type=int, default=SUPPRESS, help=help)
    help = "clear a folder that was prepared with something else, and prepare anew"
    add("--overwrite", action="store_true", help=help)
    help = "make only every n-th shard, starting with the i-th, on one of n machines; then join the folders and --merge"
    add("--shard", metavar="i/n", help=help)
    add("--merge", action="store_true", help="instead of preparing, finish --out, whose shards were made with --shard")
    help = "instead of preparing, print what this folder holds (with --target, samples too) and draw lengths.png"
    add("--inspect", type=Path, metavar="FOLDER", help=help)
    add("--json", action="store_true", help="with --inspect: print one JSON object")
    return parser


def _prepare(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    run = {"max_bad_share": PrepareConfig.max_bad_share, "workers": os.cpu_count() or 1, "overwrite": args.overwrite}
    run |= {name: getattr(args, name) for name in run if name in args}
    if args.recipe is None:
        given = vars(args)
        needed = _needed(parser, source=args.source, target=args.target, out=args.out, seq_len=given.get("seq_len"))
        reading = {name: given[name] for name in OF_A_SOURCE if name in given}
        reading |= {"files": tuple(reading["files"])} if "files" in reading else {}
        settings = {name: given[name] for name in SETTINGS if name in given}
        config = PrepareConfig(same_way(needed["source"], **reading), args.out, **settings, **run)
    else:
        _needed(parser, target=args.target)
        config = _recipe(args, run)
    machine = None if args.shard is None else read_machine(args.shard)
    # Imported here so that --help and a wrong argument need not wait for transformers.
    from longdraft.models.fingerprint import tokenizer_hash
    from longdraft.models.hf import load_tokenizer

    tokenizer = load_tokenizer(args.target)
    named = {source.tokenizer for source in config.sources.values() if source.tokenizer is not None}
    tokenizers = {name: load_tokenizer(name) for name in sorted(named)}
    prepare(config, tokenizer, tokenizer_hash(tokenizer), tokenizers, machine, _log)


def _recipe(args: argparse.Namespace, run: dict[str, Any]) -> PrepareConfig:
    """The recipe's config. `run`: the fields that are no settings of the data, which a recipe does not have."""
    from longdraft.train.config_file import read_yaml, resolve
    from longdraft.train.typed import build

    doubled = [name for name in (*SETTINGS, *OF_A_SOURCE) if name in args] + ["source"] * (args.source is not None)
    if doubled:
        option, where = flag(doubled[0]), "" if doubled[0] in SETTINGS else "sources.NAME."
        raise ValueError(f"{option} is given with the recipe {args.recipe}; write {where}{doubled[0]}=... instead")
    values = resolve(read_yaml(args.recipe, args.overrides))
    if set(values) & {"out", *run}:
        raise ValueError(f"{args.recipe}: out, {', '.join(run)} belong on the command line, not in a recipe")
    out = args.out or Path("data", f"{Path(args.recipe).stem}-{{address}}")
    return build(PrepareConfig, {"out": out, **values, **run})


def _needed(parser: argparse.ArgumentParser, **values: Any) -> dict[str, Any]:
    """These options' values. Ends with argparse's own error for those that are missing."""
    if missing := [flag(name) for name, value in values.items() if value is None]:
        parser.error(f"the following arguments are required: {', '.join(missing)}")
    return values


def _inspect(folder: Path, target: str | None, as_json: bool) -> None:
    from longdraft.data_prep.inspection import as_text, draw_lengths, inspect

    if target is None:
        inspection = inspect(folder)
    else:
        from longdraft.models.fingerprint import tokenizer_hash
        from longdraft.models.hf import load_tokenizer

        tokenizer = load_tokenizer(target)
        inspection = inspect(folder, tokenizer, tokenizer_hash(tokenizer))
    _log(inspection.as_json() if as_json else as_text(inspection))
    try:
        draw_lengths(inspection, folder / LENGTHS_PNG)
    except OSError as error:
        note(f"longdraft prepare: {LENGTHS_PNG} could not be written ({error})")


if __name__ == "__main__":
    sys.exit(main())
