"""What generate, serve and bench share: opening the target that was asked for, texts, drafters and their options."""

import argparse
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from longdraft.data_prep.shards import ShardSet
from longdraft.infer.drafters.build import DRAFTERS, TRAINED
from longdraft.infer.engine import Engine
from longdraft.infer.memory import available_bytes, size, weight_count
from longdraft.infer.sampling import SamplingParams
from longdraft.launch.console import note, said
from longdraft.models.decoder import Decoder
from longdraft.models.decoder_config import DecoderConfig
from longdraft.models.device import check_device, default_device, start
from longdraft.models.draft_folder import draft_method, read_info
from longdraft.models.hf import LOADERS, build_decoder
from longdraft.models.target import Target

# What leaves all tokens in.
FILTERS = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "eta_cutoff": 0.0}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Drafting:
    """The drafters that a command's arguments ask for (launch/shared_options.py), and their target."""

    args: argparse.Namespace
    device: torch.device
    names: list[str]
    options: Mapping[str, Any]
    nodes: int | str | None
    source: tuple[str, str | None]

    def open_target(self, positions: int, slots: int = 1) -> Target:
        """Load it, where it fits with so many positions a slot."""
        args, build = self.args, build_fitting(self.source[0], positions, slots)
        allowed, loader = max_positions(args.draft), target_loader(args.loader, args.draft)
        return open_target(*self.source, args.dtype, self.device, allowed, build, loader)

    def open_engines(self, target: Target, slots: int | None = None) -> dict[str, Engine]:
        """An engine for each drafter."""
        own = {"nodes": self.nodes, "slots": slots, "log": note}
        own["noise_in_ranking"] = not self.args.no_noise
        own |= {name: getattr(self.args, name) for name in ("max_length", "prefill_chunk")}
        return {
            name: Engine(target, name, draft_for(name, self.args.draft), options=options_for(name, self.options), **own)
            for name in self.names
        }


def read_drafting(args: argparse.Namespace) -> Drafting:
    """What is asked for, checked; nothing is loaded."""
    device, names = read_device(args.device), drafter_names(args.drafter, args.draft)
    options = read_options(args.option)
    check_options(names, options)
    nodes = node_budget(args.nodes, names)
    check_drafts(names, args.draft, args.target)
    return Drafting(args, device, names, options, nodes, target_source(args.target, args.gguf_file, args.draft))


def target_source(path: str | None, gguf_file: str | None, drafts: Sequence[str]) -> tuple[str, str | None]:
    """Path and .gguf file of the target that was named, or of the one that the first draft was trained for."""
    if path is not None:
        return path, gguf_file
    if gguf_file is not None:
        raise ValueError("--gguf-file: a file of --target, which is not given")
    if not drafts:
        raise ValueError("--target: name a model, or give --draft, whose own target is then loaded")
    where = _trained_on(drafts)
    path, gguf_file = where.get("path"), where.get("gguf_file")
    if not isinstance(path, str) or not isinstance(gguf_file, str | None):
        raise ValueError(
            f"--target: {drafts[0]} does not say where its target lies; name {read_info(drafts[0]).target.get('name')} "
            "or a copy of it by --target"
        )
    return path, gguf_file


def read_device(given: str | None) -> torch.device:
    """The device that was named; else the first GPU, where there is one. CUDA is started there: nothing is loaded for
    a device that cannot be used."""
    device = default_device("--device", "give --device cpu") if given is None else check_device(given, "--device")
    start(device, "--device")
    return device


def _trained_on(drafts: Sequence[str]) -> dict[str, Any]:
    """The section `target` of the run that made the first draft; empty where it is not known."""
    trained = read_info(drafts[0]).train_config.get("target") if drafts else None
    return trained if isinstance(trained, dict) else {}


def max_positions(drafts: Sequence[str]) -> int | None:
    """`target.max_positions` of the run that made the draft; None where it is as the target's config.json says."""
    found = _trained_on(drafts).get("max_positions")
    if found is not None and (type(found) is not int or found < 1):
        raise ValueError(f"draft: {drafts[0]} says target.max_positions {found!r} in its train_config; export again")
    return found


def target_loader(given: str | None, drafts: Sequence[str]) -> str:
    """The loader that was named, else `target.loader` of the run that made the draft."""
    found = given or _trained_on(drafts).get("loader", "longdraft")
    if found not in LOADERS:
        raise ValueError(f"draft: {drafts[0]} says target.loader {found!r} in its train_config; export again")
    return found


def open_target(
    path: str,
    gguf_file: str | None,
    dtype: str | None,
    device: torch.device,
    max_positions: int | None = None,
    build: Callable[[DecoderConfig, torch.dtype, torch.device | str], Decoder] = build_decoder,
    loader: str = "longdraft",
) -> Target:
    """Load it, and say so. What a drafter warns of is a line from here on, without the code's place.

    Args:
        dtype: of DTYPES; None: `build`, as `load_target` takes it, chooses. loader: of LOADERS; `build` is of our own.
    """
    warnings.showwarning = lambda message, *_, **__: note(f"warning: {message}")
    allowed = f", with {max_positions} positions as its draft was trained" if max_positions else ""
    by = "" if loader == "longdraft" else f" through {loader}"
    note(f"Loading {path}{by}{f' in {dtype}' if dtype else ''} on {device}{allowed}")
    building = {"build": build} if loader == "longdraft" else {}
    return LOADERS[loader](path, DTYPES[dtype or "fp32"], device, gguf_file, max_positions, **building)


def build_fitting(
    path: str, positions: int, slots: int = 1
) -> Callable[[DecoderConfig, torch.dtype, torch.device | str], Decoder]:
    """`build_decoder` for a device that has room for the weights and a cache of at least so many positions a slot: what
    does not fit is refused before a weight is read. What drafter and passes add, the engine looks at."""

    def build(config: DecoderConfig, dtype: torch.dtype, device: torch.device | str) -> Decoder:
        free = available_bytes(torch.device(device))
        weights = dtype.itemsize * weight_count(config)
        held = min(positions, config.max_positions) * slots
        cache = 2 * config.n_layers * config.n_kv_heads * config.head_dim * dtype.itemsize * held
        if free is not None and weights + cache > free:
            raise ValueError(
                f"--device: {device} has {size(free)} free, but the weights of {path} take {size(weights)} in "
                f"{next(name for name, known in DTYPES.items() if known == dtype)} and a cache of {held} positions "
                f"{size(cache)}; take a larger device, a smaller target or fewer positions"
            )
        return build_decoder(config, dtype, device)

    return build


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


def check_filters(params: SamplingParams) -> None:
    """Raise ValueError for a filter that a greedy request does not look at."""
    given = [(name, getattr(params, name)) for name, off in FILTERS.items() if getattr(params, name) != off]
    if given and params.temperature == 0:
        name, value = given[0]
        raise ValueError(
            f"--{name.replace('_', '-')}: {value}, but at --temperature 0 the most probable token is taken; give a "
            "--temperature above 0 or leave it out"
        )
    if params.min_tokens_to_keep > 1 and not (params.min_p or params.eta_cutoff):
        raise ValueError(
            f"--min-tokens-to-keep: {params.min_tokens_to_keep}, of --min-p and --eta-cutoff, which are off; give one"
        )
    if params.contextual_penalty == 1 and params.contextual_window != SamplingParams.contextual_window:
        raise ValueError(
            f"--contextual-window: {params.contextual_window}, of a --contextual-penalty, which is off; give one"
        )


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


def heldout_prompts(data: str, count: int, length: int) -> list[list[int]]:
    """The first `length` tokens of `count` held-out rows that have as many, evenly spaced."""
    rows = heldout_rows(data)
    long = [i for i in range(len(rows)) if rows[i]["borders"][-1] >= length]
    if not (1 <= count <= len(long) and length >= 2):
        raise ValueError(
            f"{rows.folder} has {len(long)} rows of {length} tokens or more: --prompts {count} must lie in "
            f"1..{len(long)} and --prompt-tokens {length} in 2..{rows.manifest['seq_len']}"
        )
    return [used_tokens(rows[long[i * len(long) // count]])[:length] for i in range(count)]


def used_tokens(row: dict) -> list[int]:
    """A row's tokens without the filler behind them."""
    return row["tokens"][: row["borders"][-1]].tolist()


def file_texts(target: Target, read: Mapping[Path, str], length: int) -> list[list[int]]:
    """The first `length` tokens of each file's text."""
    if target.tokenizer is None:
        raise ValueError("--text-file: this target has no tokenizer to read text with; use --data")
    texts = [target.tokenizer(text).input_ids[:length] for text in read.values()]
    for file, text in zip(read, texts, strict=True):
        if len(text) < 2:
            raise ValueError(f"--text-file: {file} has {len(text)} tokens; give a text of at least 2")
    return texts


def read_text(file: Path, option: str) -> str:
    """A UTF-8 file's text; ValueError, with the option that named it, where there is none."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{option}: {file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{option}: {file} is no UTF-8 text: {said(error)}; convert it, as with iconv") from error
