"""Text to packed shards: `python launch/prepare.py --source stdlib --target smollm2-135m --out data/quickstart`; and
what came out: `python launch/prepare.py --inspect data/quickstart --target smollm2-135m`.

Argument parsing and nothing else; the work is in data_prep/prepare.py and data_prep/inspection.py.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from longdraft.data_prep.prepare import PrepareConfig, prepare


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="longdraft prepare", description="Text to packed shards for one target.")
    default = PrepareConfig(sources=(), out=Path(), seq_len=2)
    add = parser.add_argument
    source = "files, folders, 'stdlib': Python's own library, or 'stdlib-chat': conversations from its docstrings"
    add("--source", nargs="+", metavar="PATH", help=source)
    add("--target", help="model whose tokenizer is used: a folder, a hub name or smollm2-135m")
    add("--out", type=Path, help="folder to make, or to go on with")
    add("--seq-len", type=int, help="tokens of a row")
    add("--documents", default=default.documents, help="pack: all tokens; first: the first --seq-len of long documents")
    add("--text-field", default=default.text_field, help="field of a JSONL line or a table that holds the text")
    add("--chat-field", help="field that holds a conversation; the loss counts its answers alone")
    add("--chat-template", type=Path, metavar="FILE", help="Jinja, for a target that has no chat template of its own")
    add("--suffixes", nargs="+", default=default.suffixes, help="files of a folder to take")
    add("--heldout-share", type=float, default=default.heldout_share, help="of the documents, chosen by their hash")
    add("--max-tokens", type=int, help="keep at most this many tokens, sampled over all files")
    add("--max-bad-share", type=float, default=default.max_bad_share, help="of bad documents; above it, an error")
    add("--seed", type=int, default=default.seed, help="of the split and the order")
    add("--workers", type=int, default=os.cpu_count() or 1, help="processes; the result does not depend on it")
    add("--overwrite", action="store_true", help="prepare anew a folder that was prepared with something else")
    what = "do not prepare: print what this prepared folder holds, samples too if --target is given; draw lengths.png"
    add("--inspect", type=Path, metavar="FOLDER", help=what)
    add("--json", action="store_true", help="with --inspect: one JSON object")
    args = vars(parser.parse_args(argv))
    target, inspected, as_json = (args.pop(name) for name in ("target", "inspect", "json"))
    if inspected is not None:
        return _inspect(parser, inspected, target, as_json)
    needed = {"--source": args["source"], "--target": target, "--out": args["out"], "--seq-len": args["seq_len"]}
    if missing := [name for name, value in needed.items() if value is None]:
        parser.error(f"the following arguments are required: {', '.join(missing)}")
    try:
        config = PrepareConfig(sources=tuple(args.pop("source")), suffixes=tuple(args.pop("suffixes")), **args)
        # Here, not above: --help and a wrong argument should not wait for transformers.
        from longdraft.models.fingerprint import tokenizer_hash
        from longdraft.models.hf import load_tokenizer

        tokenizer = load_tokenizer(target)
        prepare(config, tokenizer, tokenizer_hash(tokenizer))
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")


def _inspect(parser: argparse.ArgumentParser, folder: Path, target: str | None, as_json: bool) -> None:
    from longdraft.data_prep.inspection import LENGTHS_PNG, as_text, draw_lengths, inspect

    try:
        if target is None:
            found = inspect(folder)
        else:
            from longdraft.models.fingerprint import tokenizer_hash
            from longdraft.models.hf import load_tokenizer

            tokenizer = load_tokenizer(target)
            found = inspect(folder, tokenizer, tokenizer_hash(tokenizer))
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    draw_lengths(found, folder / LENGTHS_PNG)
    print(found.as_json() if as_json else as_text(found, colour=sys.stdout.isatty()))


if __name__ == "__main__":
    main()
