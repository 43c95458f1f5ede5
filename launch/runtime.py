"""What the decoding commands share: opening the drafters and the target that were asked for, and held-out rows."""

import argparse
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from longdraft.data_prep.shards import ShardSet
from longdraft.infer.drafters.build import TRAINED, parse_drafters
from longdraft.infer.engine import Engine
from longdraft.launch.console import note
from longdraft.models.device import option_device, start
from longdraft.models.draft_folder import draft_method, read_info
from longdraft.models.fingerprint import tokenizer_hash
from longdraft.models.hf import LOADERS
from longdraft.models.special_tokens import chat_end
from longdraft.models.target import Target
from longdraft.models.tensor_parallel import join

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Asked(NamedTuple):
    """A drafter that was asked for, as `parse_drafters` takes it: name, draft folder and options."""

    drafter: str
    draft: str | None
    options: dict[str, Any]


class Drafting:
    """The drafters and the target that a command's arguments (launch/arguments.py) ask for.

    Attributes:
        drafters: by name, or as NAME@DRAFT where several drafts fit a drafter.
        options: the drafters' options, as --option gives them.
        nodes: as `Engine` takes it.
        source: path or name of the target.
        loader: a key of LOADERS.
        max_positions: the limit of the target's positions; None for that of its config.json.
        ranks: the processes that compute the target.
        template: a chat template in place of the tokenizer's own; its end token also ends texts. None without one.
    """

    def __init__(self, args: argparse.Namespace, template: str | None = None, alone: Sequence[str] = ()):
        self.args, self.template = args, template
        self.device = option_device(args.device)
        if args.tensor_parallel > 1 and self.device.type == "cuda":
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(self.device)
        start(self.device, "--device")  # fails before anything is loaded if CUDA does not start
        self.options = read_options(args.option)
        self.drafters = asked_drafters(args.drafter, args.draft, self.options)
        for one in (one for name, one in self.drafters.items() if name not in alone):
            parse_drafters(*one)
        for key in self.options:
            if not any(key in one.options for one in self.drafters.values()):
                raise ValueError(f"--option: {key} applies to none of the drafters {', '.join(self.drafters)}; omit it")
        if unused := set(args.draft) - {one.draft for one in self.drafters.values()}:
            raise ValueError(f"--draft: {unused.pop()} fits none of the drafters {', '.join(self.drafters)}; omit it")
        self.nodes = {None: "auto", "all": None}.get(args.nodes, args.nodes)
        # The section `target` of the run that trained the first draft.
        trained = (read_info(args.draft[0]).train_config.get("target") if args.draft else None) or {}
        self.loader = args.loader or trained.get("loader", "longdraft")
        if args.tensor_parallel > 1 and self.loader != "longdraft":
            raise ValueError(f"--tensor-parallel: not with {self.loader}'s classes; omit it, or --loader")
        self.max_positions = trained.get("max_positions")
        self.source = args.target or _source(args.draft, trained)
        self.ranks = join(args.tensor_parallel, self.device)

    def open_target(self) -> Target:
        """Load the target and print a line about it. From here on, warnings are printed as one line, without location.
        The engine checks the memory of caches and passes.
        """
        warnings.showwarning = lambda message, *_, **__: note(f"warning: {message}")
        most, dtype = self.max_positions, self.args.dtype
        by = "" if self.loader == "longdraft" else f" through {self.loader}"
        positions = f", with {most} positions, as in its draft's training" if most else ""
        device = self.device if self.ranks.size == 1 else f"{self.ranks.size} ranks, the first on {self.device}"
        note(f"Loading {self.source}{by} in {dtype} on {device}{positions}")
        loading: dict[str, Any] = {"ranks": self.ranks} if self.loader == "longdraft" else {}
        target = LOADERS[self.loader](self.source, DTYPES[dtype], self.device, most, **loading)
        if self.template is not None and (end := chat_end(target.tokenizer, self.template)) is not None:
            target.eos_token_ids = tuple({*target.eos_token_ids, end})
        return target

    def open_engines(self, target: Target, slots: int | None = None) -> dict[str, Engine]:
        """An engine for each drafter, by name."""
        settings = {name: getattr(self.args, name) for name in ("max_length", "prefill_chunk")}
        settings |= {"slots": slots, "nodes": self.nodes, "log": note}
        asked = self.drafters.items()
        return {name: Engine(target, one.drafter, one.draft, options=one.options, **settings) for name, one in asked}

    def open_engine(self, slots: int) -> Engine:
        """Load the target and open the engine of a command that takes one drafter."""
        (engine,) = self.open_engines(self.open_target(), slots).values()
        return engine


def _source(drafts: Sequence[str], trained: Mapping[str, Any]) -> str:
    """Path or name of the target that the first draft was trained for. Older drafts store a .gguf file's name apart."""
    if not drafts:
        raise ValueError("--target: name a model, or give --draft, so that its own target is loaded")
    if not isinstance(path := trained.get("path"), str):
        name = read_info(drafts[0]).target.get("name")
        raise ValueError(f"--target: {drafts[0]} has no path to its target; give {name} or a copy as --target")
    return f"{path}/{trained['gguf_file']}" if trained.get("gguf_file") else path


def asked_drafters(given: Sequence[str] | None, drafts: Sequence[str], options: Mapping[str, Any]) -> dict[str, Asked]:
    """The drafters that were named, else those of the draft folders' methods, else plain. One that needs a draft gets
    the only folder, or that of its method; if several have it, the drafter stands once for each, as NAME@DRAFT."""
    methods = {draft: draft_method(draft) for draft in drafts} if len(drafts) > 1 or given is None else {}
    found = dict[str, Asked]()
    for name in dict.fromkeys(given or list(methods.values()) or ["plain"]):
        parts = name.split("+")
        method = next((part for part in parts if part in methods.values()), None)
        fitting = [draft for draft, own in methods.items() if own == method]
        if len(drafts) == 1 and TRAINED.intersection(parts):
            fitting = list(drafts)
        for draft in fitting or [None]:
            found[f"{name}@{draft}" if len(fitting) > 1 else name] = Asked(name, draft, options_for(name, options))
    return found


def read_options(given: Sequence[str]) -> dict[str, Any]:
    """Parse drafter options from KEY=VALUE. Values may be true, false, numbers and lists of numbers (3,3,3); anything
    else is text."""
    options = {}
    for pair in given:
        key, equals, text = pair.partition("=")
        if not (key and equals) or key in options:
            raise ValueError(f"--option: {pair!r}; write KEY=VALUE once for each key, or DRAFTER.KEY=VALUE")
        try:
            values = tuple(json.loads(f"[{text}]"))
            options[key] = values[0] if len(values) == 1 else values
        except ValueError:
            options[key] = text
    return options


def options_for(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options for one drafter: those without a drafter's name, and those with its name or with one of its a+b."""
    if name == "plain":
        return {}
    names = name.split("+")
    return {key: value for key, value in options.items() if "." not in key or key.split(".")[0] in names}


def heldout_rows(data: str | Path, tokenizer: Any) -> ShardSet:
    """The held-out rows of a prepared folder. Raises ValueError if there are none, or of another tokenizer."""
    rows = ShardSet(Path(data) / "heldout")
    if rows.manifest["tokenizer_sha256"] != tokenizer_hash(tokenizer):
        raise ValueError(f"{rows.folder} was prepared with another tokenizer than the target's; give data that fits it")
    if not rows:
        raise ValueError(f"{rows.folder} has no rows; prepare with --heldout-share, or give other data")
    return rows


def used_tokens(row: dict) -> list[int]:
    """A packed row's tokens, without the padding at its end."""
    return row["tokens"][: row["borders"][-1]].tolist()
