"""What the decoding commands share: the drafters, options and target that were asked for, and held-out rows."""

import argparse
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ConfigDict

from longdraft.data_prep.shards import ShardSet
from longdraft.infer.drafters.base import Count
from longdraft.infer.drafters.build import DRAFTERS, TRAINED
from longdraft.infer.engine import Engine
from longdraft.launch.console import note
from longdraft.models.decoder import Decoder
from longdraft.models.decoder_config import DecoderConfig
from longdraft.models.device import available_bytes, check_device, default_device, start
from longdraft.models.draft_folder import draft_method, read_info
from longdraft.models.footprint import size, weight_count
from longdraft.models.hf import LOADERS, build_decoder
from longdraft.models.schema import Schema, validate
from longdraft.models.special_tokens import chat_end
from longdraft.models.target import Target

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class TrainedTarget(Schema):
    """What a draft says of its target: the section `target` of the run that trained it. Other fields are not read.
    gguf_file: of older drafts, a file in the folder or repository `path`."""

    model_config = ConfigDict(extra="ignore")
    path: str | None = None
    gguf_file: str | None = None
    loader: Literal["longdraft", "transformers"] = "longdraft"
    max_positions: Count | None = None


class Drafting:
    """The drafters and the target that a command's arguments (launch/arguments.py) ask for.

    Attributes:
        names: the drafters' names.
        options: the drafters' options, as --option gives them.
        nodes: as `Engine` takes it.
        source: path or name of the target.
        loader: a key of LOADERS.
        max_positions: positions that the target is limited to; None for its config.json's.
        template: a chat template in place of the tokenizer's own, whose end token counts too; None without one.
    """

    def __init__(self, args: argparse.Namespace, template: str | None = None):
        self.args, self.template, device = args, template, args.device
        self.device = (
            default_device("--device", "give --device cpu") if device is None else check_device(device, "--device")
        )
        start(self.device, "--device")  # CUDA: nothing is loaded for a device that cannot be used
        self.names, self.options = drafter_names(args.drafter, args.draft), read_options(args.option)
        for key in self.options:
            if not any(key in options_for(name, self.options) for name in self.names):
                raise ValueError(f"--option: {key} is for none of the drafters {', '.join(self.names)}; leave it out")
        if unused := set(args.draft) - {draft_for(name, args.draft) for name in self.names}:
            raise ValueError(
                f"--draft: {unused.pop()} is for none of the drafters {', '.join(self.names)}; leave it out"
            )
        if self.names == ["plain"] and args.nodes is not None:
            raise ValueError("--nodes: plain decoding drafts nothing; omit it, or name a --drafter")
        self.nodes = {None: "auto", "all": None}.get(args.nodes, args.nodes)
        said = (read_info(args.draft[0]).train_config.get("target") if args.draft else None) or {}
        trained = validate(TrainedTarget, said, "--draft: target")
        self.loader, self.max_positions = args.loader or trained.loader, trained.max_positions
        self.source = _source(args, trained)

    def open_target(self, positions: int, slots: int = 1) -> Target:
        """Load the target. Raises ValueError, before any weight is read, if weights and a cache of `positions` per slot
        do not fit into the device's free memory. The engine checks what drafters and passes add."""

        def build(config: DecoderConfig, dtype: torch.dtype, device: torch.device | str) -> Decoder:
            free = available_bytes(torch.device(device))
            weights = dtype.itemsize * weight_count(config)
            held = min(positions, config.max_positions) * slots
            cache = 2 * config.n_layers * config.n_kv_heads * config.head_dim * dtype.itemsize * held
            if free is not None and weights + cache > free:
                raise ValueError(
                    f"--device: {device} has {size(free)} free, but the weights of {self.source} take "
                    f"{size(weights)} in {self.args.dtype} and a cache of {held} positions {size(cache)}; take a "
                    "larger device, a smaller target or fewer positions"
                )
            return build_decoder(config, dtype, device)

        return self.load(self.args.dtype, build)

    def load(
        self, dtype: str | None, build: Callable[[DecoderConfig, torch.dtype, torch.device | str], Decoder]
    ) -> Target:
        """Load the target and announce it. From here on, warnings are shown as one line, without the code's place.

        Args:
            dtype: a key of DTYPES; None leaves the choice to `build`.
            build: as `load_target` takes it; other loaders do not use it.
        """
        warnings.showwarning = lambda message, *_, **__: note(f"warning: {message}")
        path, most, loader = self.source, self.max_positions, self.loader
        by = "" if loader == "longdraft" else f" through {loader}"
        positions = f", with {most} positions as its draft was trained" if most else ""
        note(f"Loading {path}{by}{f' in {dtype}' if dtype else ''} on {self.device}{positions}")
        building = {"build": build} if loader == "longdraft" else {}
        target = LOADERS[loader](path, DTYPES[dtype or "fp32"], self.device, most, **building)
        if self.template is not None and (end := chat_end(target.tokenizer, self.template)) is not None:
            target.eos_token_ids = tuple({*target.eos_token_ids, end})
        return target

    def of(self, name: str) -> dict[str, Any]:
        """One drafter's draft folder and options, as `build_drafter` and `Engine` take them."""
        return {"draft": draft_for(name, self.args.draft), "options": options_for(name, self.options)}

    def open_engines(self, target: Target, slots: int | None = None) -> dict[str, Engine]:
        """An engine for each drafter, by name."""
        args = self.args
        settings = {"max_length": args.max_length, "prefill_chunk": args.prefill_chunk, "slots": slots, "log": note}
        settings["nodes"] = self.nodes
        return {name: Engine(target, name, **self.of(name), **settings) for name in self.names}

    def open_engine(self, positions: int, slots: int) -> Engine:
        """Load the target and open the engine of a command that takes one drafter."""
        (engine,) = self.open_engines(self.open_target(positions, slots), slots).values()
        return engine


def _source(args: argparse.Namespace, trained: TrainedTarget) -> str:
    """Path or name of the target that was named, else of the one that the first draft was trained for."""
    if args.target is not None:
        return args.target
    if not args.draft:
        raise ValueError("--target: name a model, or give --draft, whose own target is then loaded")
    if trained.path is None:
        name = read_info(args.draft[0]).target.get("name")
        raise ValueError(
            f"--target: {args.draft[0]} does not say where its target is; give {name} or a copy of it as --target"
        )
    return trained.path if trained.gguf_file is None else f"{trained.path}/{trained.gguf_file}"


def drafter_names(given: Sequence[str] | None, drafts: Sequence[str]) -> list[str]:
    """The drafters that were named. Without any, those of the draft folders' methods, or plain."""
    methods = [draft_method(draft) for draft in drafts] if len(drafts) > 1 or given is None else []
    if len(set(methods)) < len(methods):
        raise ValueError(f"--draft: {', '.join(drafts)}: two are made for one method; give one of each method")
    names = list(given or methods or ["plain"])
    for part in "+".join(names).split("+"):
        if part not in DRAFTERS:
            known = ", ".join(DRAFTERS)
            raise ValueError(f"--drafter: unknown name {part!r}; known: {known}, or several as a+b in one tree")
    if len(set(names)) < len(names):
        raise ValueError(f"--drafter: {', '.join(names)}: name each once")
    return names


def draft_for(name: str, drafts: Sequence[str]) -> str | None:
    """The draft folder for a drafter that needs one: the only one, or among several the one of its method."""
    if not (methods := TRAINED.intersection(name.split("+"))):
        return None
    return next((draft for draft in drafts if len(drafts) == 1 or draft_method(draft) in methods), None)


def read_options(given: Sequence[str]) -> dict[str, Any]:
    """Drafter options from KEY=VALUE. Values may be true, false, numbers and lists of numbers (3,3,3); anything else is
    text."""
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
    """The options for one drafter: those without a drafter's name, and those with its name or one inside its a+b."""
    if name == "plain":
        return {}
    return {key: value for key, value in options.items() if "." not in key or key.split(".")[0] in name.split("+")}


def heldout_rows(data: str | Path) -> ShardSet:
    """The held-out rows of a prepared folder."""
    return ShardSet(Path(data) / "heldout")


def check_rows(rows: ShardSet, target: Target) -> None:
    """Raise ValueError if the rows' token ids are not those of the target's tokenizer."""
    if rows.manifest["tokenizer_sha256"] != target.fingerprint["tokenizer"]:
        raise ValueError(
            f"{rows.folder} was prepared with another tokenizer than that of {target.name}; give data prepared for it"
        )


def used_tokens(row: dict) -> list[int]:
    """A packed row's tokens, without the padding at its end."""
    return row["tokens"][: row["borders"][-1]].tolist()
