"""Text to packed shards: `python launch/prepare.py --source stdlib --target smollm2-135m --out data/quickstart
--seq-len 256`, or by a recipe: `python launch/prepare.py configs/data/pg19.yaml --target meta-llama/Llama-3.1-8B`; what
came out: `python launch/prepare.py --inspect data/quickstart --target smollm2-135m`.

Argument parsing and nothing else; the work is in data_prep/prepare.py and data_prep/inspection.py. The word
`regenerate` before the arguments is another command, launch/regenerate.py.
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
from longdraft.launch.console import ends_on_ctrl_c, flag, framed, note, show

# Flags that a recipe has as fields of its own, and those that say how a source is read.
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
        with ends_on_ctrl_c(parser.prog):
            if args.inspect is not None:
                with failures_described(args.inspect):
                    _inspect(args.inspect, args.target, args.json)
            elif args.merge:
                how = {"max_bad_share": args.max_bad_share} if "max_bad_share" in args else {}
                merge(_needed(parser, out=args.out)["out"], **how, log=_log)
            else:
                _prepare(parser, args)

    on_ctrl_c = "interrupted; finished shards are kept, the same call goes on"
    if status := framed(parser.prog, work, on_ctrl_c, shows=args.inspect is not None):
        parser.exit(status)
    return None


def _log(text: str) -> None:
    show(f"{text}\n")


def _check_used(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """An option that the mode does not read is an error: --inspect and --merge prepare nothing."""
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
    text = "Text to packed shards for one target. `longdraft prepare regenerate` lets the target answer prompts itself."
    parser = argparse.ArgumentParser(prog="longdraft prepare", description=text)
    default = PrepareConfig(sources={}, out=Path(), seq_len=2)
    add = parser.add_argument
    add("recipe", nargs="?", help="a YAML file of configs/data/, instead of --source and the settings below")
    add("overrides", nargs="*", metavar="field=value", help="of the recipe: seq_len=4096 sources.books.path=/data/pg19")
    source = "files, folders, data sets of the hub (owner/name[@revision]), 'stdlib': Python's own library, or "
    add("--source", nargs="+", metavar="PATH", help=source + "'stdlib-chat': conversations from its docstrings")
    add("--target", help="model whose tokenizer is used: a folder, a hub name or smollm2-135m")
    out = "folder to make, or to go on with; {address} in it becomes the hash of sources, tokenizer and settings "
    add("--out", type=Path, help=out + "(default: data/RECIPE-{address})")
    add("--seq-len", type=int, default=SUPPRESS, help="tokens of a row")
    what = f"pack: all tokens; first: the first --seq-len of long documents (default: {default.documents})"
    add("--documents", default=SUPPRESS, help=what)
    add("--text-field", default=SUPPRESS, help="field of a record (JSONL, CSV, Parquet, ...) that holds the text")
    add("--chat-field", default=SUPPRESS, help="field that holds a conversation; the loss counts its answers alone")
    what = "Jinja, for a target without a chat template of its own (configs/chat_templates/ holds some), or plain"
    add("--chat-template", type=Path, metavar="FILE", default=SUPPRESS, help=what)
    what = "patterns of the files to take (default: all of a known suffix)"
    add("--files", nargs="+", default=SUPPRESS, metavar="PATTERN", help=what)
    what = "of a data set, by name, instead of --files: what its README or its files' names say (default: the only one)"
    add("--config", default=SUPPRESS, metavar="NAME", help=what)
    what = "train, test, ..., of a data set, by the same rules, instead of --files (default: all)"
    add("--split", default=SUPPRESS, metavar="NAME", help=what)
    what = f"of the documents, chosen by their hash (default: {default.heldout_share})"
    add("--heldout-share", type=float, default=SUPPRESS, help=what)
    add("--max-tokens", type=int, default=SUPPRESS, help="keep at most this many tokens, sampled over all files")
    add("--seed", type=int, default=SUPPRESS, help=f"of the split and the order (default: {default.seed})")
    what = f"of bad documents; above it, an error (default: {default.max_bad_share})"
    add("--max-bad-share", type=float, default=SUPPRESS, help=what)
    what = "processes; the result does not depend on it (default: one a core)"
    add("--workers", type=int, default=SUPPRESS, help=what)
    add("--overwrite", action="store_true", help="prepare anew a folder that was prepared with something else")
    what = "make every n-th shard from the i-th on, one of several machines; then put the folders together and --merge"
    add("--shard", metavar="i/n", help=what)
    add("--merge", action="store_true", help="do not prepare: finish --out, whose shards were made with --shard")
    what = "do not prepare: print what this prepared folder holds, samples too if --target is given; draw lengths.png"
    add("--inspect", type=Path, metavar="FOLDER", help=what)
    add("--json", action="store_true", help="with --inspect: one JSON object")
    return parser


def _prepare(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    how = {"max_bad_share": PrepareConfig.max_bad_share, "workers": os.cpu_count() or 1, "overwrite": args.overwrite}
    how |= {name: getattr(args, name) for name in how if name in args}
    if args.recipe is None:
        given = vars(args)
        needed = _needed(parser, source=args.source, target=args.target, out=args.out, seq_len=given.get("seq_len"))
        reading = {name: given[name] for name in OF_A_SOURCE if name in given}
        reading |= {"files": tuple(reading["files"])} if "files" in reading else {}
        settings = {name: given[name] for name in SETTINGS if name in given}
        config = PrepareConfig(same_way(needed["source"], **reading), args.out, **settings, **how)
    else:
        _needed(parser, target=args.target)
        config = _recipe(args, how)
    machine = None if args.shard is None else read_machine(args.shard)
    # Here, not above: --help and a wrong argument should not wait for transformers.
    from longdraft.models.fingerprint import tokenizer_hash
    from longdraft.models.hf import load_tokenizer

    tokenizer = load_tokenizer(args.target)
    named = {source.tokenizer for source in config.sources.values() if source.tokenizer is not None}
    tokenizers = {name: load_tokenizer(name) for name in sorted(named)}
    prepare(config, tokenizer, tokenizer_hash(tokenizer), tokenizers, machine, _log)


def _recipe(args: argparse.Namespace, how: dict[str, Any]) -> PrepareConfig:
    from longdraft.train.typed import build, read_yaml, resolve

    doubled = [name for name in (*SETTINGS, *OF_A_SOURCE) if name in args] + ["source"] * (args.source is not None)
    if doubled:
        option, where = flag(doubled[0]), "" if doubled[0] in SETTINGS else "sources.NAME."
        raise ValueError(f"{option} is given beside the recipe {args.recipe}; write {where}{doubled[0]}=... instead")
    values = resolve(read_yaml(args.recipe, args.overrides))
    if set(values) & {"out", *how}:
        raise ValueError(f"{args.recipe}: out, {', '.join(how)} belong to the command line, not into a recipe")
    out = args.out or Path("data", f"{Path(args.recipe).stem}-{{address}}")
    return build(PrepareConfig, {"out": out, **values, **how})


def _needed(parser: argparse.ArgumentParser, **values: Any) -> dict[str, Any]:
    if missing := [flag(name) for name, value in values.items() if value is None]:
        parser.error(f"the following arguments are required: {', '.join(missing)}")
    return values


def _inspect(folder: Path, target: str | None, as_json: bool) -> None:
    from longdraft.data_prep.inspection import as_text, draw_lengths, inspect

    if target is None:
        found = inspect(folder)
    else:
        from longdraft.models.fingerprint import tokenizer_hash
        from longdraft.models.hf import load_tokenizer

        tokenizer = load_tokenizer(target)
        found = inspect(folder, tokenizer, tokenizer_hash(tokenizer))
    _log(found.as_json() if as_json else as_text(found, colour=sys.stdout.isatty()))
    try:
        draw_lengths(found, folder / LENGTHS_PNG)
    except OSError as error:
        note(f"longdraft prepare: {LENGTHS_PNG} could not be written ({error})")


if __name__ == "__main__":
    sys.exit(main())
