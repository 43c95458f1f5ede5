"""What the commands that decode share: drafters, their options and the target that were asked for, and texts."""

import argparse
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from longdraft.data_prep.shards import ShardSet
from longdraft.infer.drafters.build import DRAFTERS, TRAINED
from longdraft.infer.engine import Engine
from longdraft.infer.memory import available_bytes, size, weight_count
from longdraft.infer.sampling import SamplingParams
from longdraft.launch.console import flag, note
from longdraft.models.decoder import Decoder
from longdraft.models.decoder_config import DecoderConfig
from longdraft.models.device import check_device, default_device, start
from longdraft.models.draft_folder import draft_method, read_info
from longdraft.models.hf import LOADERS, build_decoder
from longdraft.models.target import Target

FILTERS = ("top_k", "top_p", "min_p", "eta_cutoff")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Drafting:
    """What a command's arguments (launch/shared_options.py) ask for, checked: drafters, and a target to load.

    Attributes:
        names: of the drafters. options: of all of them. nodes: as the Engine's.
        source: path and .gguf file of the target. loader: of LOADERS. max_positions: those that the target is to have;
            None: as its config.json says.
    """

    def __init__(self, args: argparse.Namespace):
        self.args, device = args, args.device
        self.device = (
            default_device("--device", "give --device cpu") if device is None else check_device(device, "--device")
        )
        start(self.device, "--device")  # CUDA: nothing is loaded for a device that cannot be used
        self.names, self.options = drafter_names(args.drafter, args.draft), read_options(args.option)
        check_options(self.names, self.options)
        self.nodes = node_budget(args.nodes, self.names)
        check_drafts(self.names, args.draft, args.target)
        # The section `target` of the run that made the first draft, where it is known.
        trained = read_info(args.draft[0]).train_config.get("target") if args.draft else None
        trained = trained if isinstance(trained, dict) else {}
        self.source = _source(args, trained)
        self.loader, self.max_positions = (
            args.loader or trained.get("loader", "longdraft"),
            trained.get("max_positions"),
        )
        most = self.max_positions
        wrong = [] if most is None or (type(most) is int and most > 0) else [f"max_positions {most!r}"]
        wrong += [] if self.loader in LOADERS else [f"loader {self.loader!r}"]
        if wrong:
            raise ValueError(f"draft: {args.draft[0]} says target.{wrong[0]} in its train_config; export again")

    def check_sampling(self, params: SamplingParams) -> None:
        """Raise ValueError for an option of sampling that nothing looks at."""
        given = [name for name in FILTERS if getattr(params, name) != getattr(SamplingParams, name)]
        if given and params.temperature == 0:
            raise ValueError(
                f"{flag(given[0])}: {getattr(params, given[0])}, but at --temperature 0 the most probable token is "
                "taken; give a --temperature above 0 or leave it out"
            )
        if params.min_tokens_to_keep > 1 and not (params.min_p or params.eta_cutoff):
            raise ValueError(
                f"--min-tokens-to-keep: {params.min_tokens_to_keep}, of --min-p and --eta-cutoff, which are off; "
                "give one"
            )
        if params.contextual_penalty == 1 and params.contextual_window != SamplingParams.contextual_window:
            raise ValueError(
                f"--contextual-window: {params.contextual_window}, of a --contextual-penalty, which is off; give one"
            )
        if self.args.no_noise and (params.temperature == 0 or self.names == ["plain"]):
            raise ValueError("--no-noise: of drafters that rank at a --temperature above 0; give both or leave it out")

    def open_target(self, positions: int, slots: int = 1) -> Target:
        """Load it on a device that has room for the weights and a cache of so many positions a slot: what does not fit
        is refused before a weight is read. What drafter and passes add, the engine looks at."""

        def build(config: DecoderConfig, dtype: torch.dtype, device: torch.device | str) -> Decoder:
            free = available_bytes(torch.device(device))
            weights = dtype.itemsize * weight_count(config)
            held = min(positions, config.max_positions) * slots
            cache = 2 * config.n_layers * config.n_kv_heads * config.head_dim * dtype.itemsize * held
            if free is not None and weights + cache > free:
                raise ValueError(
                    f"--device: {device} has {size(free)} free, but the weights of {self.source[0]} take "
                    f"{size(weights)} in {self.args.dtype} and a cache of {held} positions {size(cache)}; take a "
                    "larger device, a smaller target or fewer positions"
                )
            return build_decoder(config, dtype, device)

        return self.load(self.args.dtype, build)

    def load(
        self, dtype: str | None, build: Callable[[DecoderConfig, torch.dtype, torch.device | str], Decoder]
    ) -> Target:
        """Load the target, and say so. What a drafter warns of is a line from here on, without the code's place.

        Args:
            dtype: of DTYPES; None: `build` chooses. build: as `load_target` takes it; other loaders do not ask it.
        """
        warnings.showwarning = lambda message, *_, **__: note(f"warning: {message}")
        (path, gguf_file), allowed, loader = self.source, self.max_positions, self.loader
        by = "" if loader == "longdraft" else f" through {loader}"
        positions = f", with {allowed} positions as its draft was trained" if allowed else ""
        note(f"Loading {path}{by}{f' in {dtype}' if dtype else ''} on {self.device}{positions}")
        building = {"build": build} if loader == "longdraft" else {}
        return LOADERS[loader](path, DTYPES[dtype or "fp32"], self.device, gguf_file, allowed, **building)

    def of(self, name: str) -> dict[str, Any]:
        """This drafter's draft folder and options, as `build_drafter` and Engine take them."""
        return {"draft": draft_for(name, self.args.draft), "options": options_for(name, self.options)}

    def open_engines(self, target: Target, slots: int | None = None) -> dict[str, Engine]:
        """An engine for each drafter."""
        args = self.args
        given = {"max_length": args.max_length, "prefill_chunk": args.prefill_chunk, "slots": slots, "log": note}
        given |= {"nodes": self.nodes, "noise_in_ranking": not args.no_noise}
        return {name: Engine(target, name, **self.of(name), **given) for name in self.names}

    def open_engine(self, positions: int, slots: int) -> Engine:
        """The engine of a command that takes one drafter, with its target loaded."""
        (engine,) = self.open_engines(self.open_target(positions, slots), slots).values()
        return engine


def _source(args: argparse.Namespace, trained: Mapping[str, Any]) -> tuple[str, str | None]:
    """Path and .gguf file of the target that was named, or of the one that the first draft was trained for."""
    if args.target is not None:
        return args.target, args.gguf_file
    if args.gguf_file is not None:
        raise ValueError("--gguf-file: a file of --target, which is not given")
    if not args.draft:
        raise ValueError("--target: name a model, or give --draft, whose own target is then loaded")
    path, gguf_file = trained.get("path"), trained.get("gguf_file")
    if not isinstance(path, str) or not isinstance(gguf_file, str | None):
        name = read_info(args.draft[0]).target.get("name")
        raise ValueError(
            f"--target: {args.draft[0]} does not say where its target lies; name {name} or a copy of it by --target"
        )
    return path, gguf_file


def drafter_names(given: Sequence[str] | None, drafts: Sequence[str]) -> list[str]:
    """The drafters that were named, checked; else those that the draft folders are made for, else plain."""
    methods = [draft_method(draft) for draft in drafts] if len(drafts) > 1 or given is None else []
    for method in methods:
        if methods.count(method) > 1:
            raise ValueError(f"--draft: {', '.join(drafts)}: two are made for {method}; give one of each method")
    if given is None:
        return methods or ["plain"]
    for part in "+".join(given).split("+"):
        if part not in DRAFTERS:
            known = ", ".join(DRAFTERS)
            raise ValueError(f"--drafter: unknown name {part!r}; known: {known}, or several as a+b in one tree")
    if len(set(given)) < len(given):
        raise ValueError(f"--drafter: {', '.join(given)}: name each once")
    return list(given)


def draft_for(name: str, drafts: Sequence[str]) -> str | None:
    """The draft folder, for a drafter that takes one: of several the one of its method."""
    if not (methods := TRAINED.intersection(name.split("+"))):
        return None
    return next((draft for draft in drafts if len(drafts) == 1 or draft_method(draft) in methods), None)


def read_options(given: Sequence[str]) -> dict[str, Any]:
    """Drafter options from KEY=VALUE: whole numbers and lists of them (3,3,3), numbers, true and false are read
    as such, the rest is text."""
    options = {}
    for pair in given:
        key, equals, text = pair.partition("=")
        if not (key and equals):
            raise ValueError(f"--option: {pair!r}; write KEY=VALUE, or DRAFTER.KEY=VALUE for one of several drafters")
        if key in options:
            raise ValueError(f"--option: {key} is given twice")
        options[key] = _typed(text)
    return options


def _typed(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        return text


def options_for(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """What of the options is this drafter's: those without a drafter's name, and those with its own or a part's."""
    if name == "plain":
        return {}
    return {key: value for key, value in options.items() if "." not in key or key.split(".")[0] in name.split("+")}


def check_options(names: Sequence[str], options: Mapping[str, Any]) -> None:
    """Raise ValueError for an option that is no drafter's here."""
    for key in options:
        if not any(key in options_for(name, options) for name in names):
            raise ValueError(f"--option: {key} is for none of the drafters {', '.join(names)}; leave it out")


def check_drafts(names: Sequence[str], drafts: Sequence[str], target: str | None) -> None:
    """Raise ValueError for a draft folder that gives neither drafter nor target."""
    used = {draft_for(name, drafts) for name in names}
    for draft in drafts:
        if draft not in used and (target is not None or len(drafts) > 1):
            named = f"{', '.join(names)} {'does' if len(names) == 1 else 'do'}"
            raise ValueError(f"--draft: {draft}, but {named} not take it; leave it out or name its drafter")


def node_budget(text: str | None, names: Sequence[str]) -> int | str | None:
    """`Engine`'s nodes: "auto", also where nothing is given, a number, or None for all."""
    if text is None or text in ("auto", "all"):
        nodes = None if text == "all" else "auto"
    elif text.isdecimal() and 1 <= int(text) < 2**31:
        nodes = int(text)
    else:
        raise ValueError(f"--nodes: {text!r}; give auto, all or a number from 1 on; for no nodes use the plain drafter")
    if text is not None and list(names) == ["plain"]:
        raise ValueError(f"--nodes: {text}, but plain decoding verifies none; name a --drafter")
    return nodes


def heldout_rows(data: str | Path) -> ShardSet:
    """The held-out rows of a prepared folder."""
    return ShardSet(Path(data) / "heldout")


def check_rows(rows: ShardSet, target: Target) -> None:
    """Raise ValueError for rows of another tokenizer than the target's: their ids would be other words to it."""
    if rows.manifest["tokenizer_sha256"] != target.fingerprint["tokenizer"]:
        raise ValueError(
            f"{rows.folder} was prepared with another tokenizer than that of {target.name}; give data prepared for it"
        )


def used_tokens(row: dict) -> list[int]:
    """A row's tokens without the filler behind them."""
    return row["tokens"][: row["borders"][-1]].tolist()
