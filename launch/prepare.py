"""Pack text into shards of tokens, by options or by a recipe, or inspect the result:

    longdraft prepare --source stdlib --target smollm2-135m --out data/quickstart --seq-len 256
    longdraft prepare configs/data/pg19.yaml --target meta-llama/Llama-3.1-8B
    longdraft prepare --inspect data/quickstart --target smollm2-135m

Only argument parsing is here; the work is in data_prep/prepare.py and data_prep/inspection.py. `prepare regenerate` is
another command, launch/regenerate.py.
"""

import argparse
import os
from argparse import SUPPRESS
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from longdraft.data_prep.prepare import prepare
from longdraft.data_prep.recipe import PrepareConfig, Source, same_way
from longdraft.launch.console import flag, run_command, show
from longdraft.models.schema import validate


def main(argv: Sequence[str]) -> int | None:
    if argv and argv[0] == "regenerate":
        from longdraft.launch.regenerate import main as regenerate

        return regenerate(argv[1:])
    parser = _parser()
    given = vars(parser.parse_intermixed_args(argv))
    required = ("target",) if "recipe" in given else ("source", "target", "seq_len", "out")
    missing = [flag(name) for name in required if name not in given]
    if "inspect" not in given and missing:
        without = "" if "recipe" in given else " without a recipe"
        parser.error(f"the following arguments are required{without}: {', '.join(missing)}")
    others = [name for name in given if name not in ("inspect", "target") and given[name] != []]
    if "inspect" in given and others:
        named = [name if name in ("recipe", "overrides") else flag(name) for name in others]
        parser.error(f"--inspect: it takes --target alone; omit {', '.join(named)}")
    work = partial(_inspect if "inspect" in given else _prepare, given)
    on_ctrl_c = "interrupted; finished shards are kept, and the same command continues"
    if status := run_command(parser.prog, work, on_ctrl_c, needs_output="inspect" in given):
        parser.exit(status)
    return None


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
    add("--out", type=Path, help="folder to create, or to continue (default with a recipe: data/RECIPE)")
    add("--seq-len", type=int, help="tokens in a packed row")
    help = f"pack: all tokens; first: only the first --seq-len of long documents (default: {default['documents']})"
    add("--documents", help=help)
    add("--text-field", help="field of a record (JSONL, Parquet, ...) that holds the text")
    help = "field of a record that holds a conversation; the loss then counts only its answers"
    add("--chat-field", help=help)
    help = "a Jinja file for a target without its own chat template (see configs/chat_templates/), or plain"
    add("--chat-template", type=Path, metavar="FILE", help=help)
    help = "patterns of the files to read (default: all with a known suffix)"
    add("--files", nargs="+", metavar="PATTERN", help=help)
    help = f"fraction of the documents to hold out, chosen by their hash (default: {default['heldout_share']})"
    add("--heldout-share", type=float, help=help)
    add("--max-tokens", type=int, help="keep at most this many tokens, sampled from all files of each source")
    add("--seed", type=int, help=f"seed of the split and the order (default: {default['seed']})")
    help = "number of processes, which does not change the result (default: one for each core)"
    add("--workers", type=int, help=help)
    help = "instead of preparing, print what this folder holds (with --target, samples too)"
    add("--inspect", type=Path, metavar="FOLDER", help=help)
    return parser


def _prepare(given: dict[str, Any]) -> None:
    config = _config(given)
    # Imported here so that --help and a wrong argument need not wait for transformers.
    from longdraft.models.fingerprint import tokenizer_hash
    from longdraft.models.hf import load_tokenizer

    tokenizer = load_tokenizer(given["target"])
    named = {source.tokenizer for source in config.sources.values() if source.tokenizer is not None}
    tokenizers = {name: load_tokenizer(name) for name in sorted(named)}
    prepare(config, tokenizer, tokenizer_hash(tokenizer), tokenizers, lambda line: show(f"{line}\n"))


def _config(given: dict[str, Any]) -> PrepareConfig:
    """The config from the options, which override those of the recipe if there is one."""
    reading = {name: value for name, value in given.items() if name in Source.model_fields}
    if "recipe" in given:
        from longdraft.train.config_file import read_yaml, resolve

        if "source" in given or reading:
            option, recipe = flag(next(iter(reading), "source")), given["recipe"]
            raise ValueError(f"{option} is given with the recipe {recipe}; write sources.NAME.FIELD=... instead")
        values = {"out": Path("data", Path(given["recipe"]).stem)}
        values |= resolve(read_yaml(given["recipe"], given.get("overrides", [])))
    else:
        values = {"sources": same_way(given["source"], **reading)} if "source" in given else {}
    values |= {name: value for name, value in given.items() if name in PrepareConfig.model_fields}
    return validate(PrepareConfig, {"workers": os.cpu_count() or 1, **values})


def _inspect(given: dict[str, Any]) -> None:
    from longdraft.data_prep.inspection import inspect

    tokenizer = None
    if "target" in given:
        from longdraft.models.hf import load_tokenizer

        tokenizer = load_tokenizer(given["target"])
    show(f"{inspect(given['inspect'], tokenizer)}\n")
