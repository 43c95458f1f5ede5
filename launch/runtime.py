"""What the decoding commands share: the drafters, options and target that were asked for, and held-out rows."""

import argparse
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from longdraft.data_prep.shards import ShardSet
from longdraft.infer.drafters.build import DRAFTERS, TRAINED
from longdraft.infer.engine import Engine
from longdraft.infer.sampling import SamplingParams
from longdraft.launch.console import flag, note
from longdraft.models.decoder import Decoder
from longdraft.models.decoder_config import DecoderConfig
from longdraft.models.device import available_bytes, check_device, default_device, start
from longdraft.models.draft_folder import draft_method, read_info
from longdraft.models.footprint import size, weight_count
from longdraft.models.hf import LOADERS, build_decoder
from longdraft.models.special_tokens import chat_end
from longdraft.models.target import Target

FILTERS = ("top_k", "top_p", "min_p", "eta_cutoff")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Drafting:
    """The drafters and the target that a command's arguments (launch/shared_options.py) ask for, checked.

    Attributes:
        names: the drafters' names.
        options: the drafters' options, as --option gives them.
        nodes: as `Engine` takes it.
        source: path and .gguf file of the target.
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
        check_options(self.names, self.options)
        self.nodes = node_budget(args.nodes, self.names)
        check_drafts(self.names, args.draft, args.target)
        # The section `target` of the run that trained the first draft, if the draft says it.
        trained = read_info(args.draft[0]).train_config.get("target") if args.draft else None
        trained = trained if isinstance(trained, dict) else {}
        self.source = _source(args, trained)
        self.loader = args.loader or trained.get("loader", "longdraft")
        self.max_positions = most = trained.get("max_positions")
        wrong = "" if most is None or (type(most) is int and most > 0) else f"max_positions {most!r}"
        wrong = wrong or ("" if self.loader in LOADERS else f"loader {self.loader!r}")
        if wrong:
            raise ValueError(f"draft: {args.draft[0]} says target.{wrong} in its train_config; export again")

    def check_sampling(self, params: SamplingParams) -> None:
        """Raise ValueError for a sampling option that would have no effect."""
        given = [name for name in FILTERS if getattr(params, name) != getattr(SamplingParams, name)]
        if given and params.temperature == 0:
            raise ValueError(
                f"{flag(given[0])}: {getattr(params, given[0])}, but at --temperature 0 the most probable token is "
                "taken; give a --temperature above 0 or leave it out"
            )
        if (keep := params.min_tokens_to_keep) > 1 and not (params.min_p or params.eta_cutoff):
            raise ValueError(f"--min-tokens-to-keep: {keep}, but --min-p and --eta-cutoff are off; give one of them")
        window = params.contextual_window
        if params.contextual_penalty == 1 and window != SamplingParams.contextual_window:
            raise ValueError(f"--contextual-window: {window}, but --contextual-penalty is off; give one")
        if self.args.no_noise and (params.temperature == 0 or self.names == ["plain"]):
            raise ValueError("--no-noise: only drafters at a --temperature above 0 rank with noise; give both or none")

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
                    f"--device: {device} has {size(free)} free, but the weights of {self.source[0]} take "
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
        (path, gguf_file), most, loader = self.source, self.max_positions, self.loader
        by = "" if loader == "longdraft" else f" through {loader}"
        positions = f", with {most} positions as its draft was trained" if most else ""
        note(f"Loading {path}{by}{f' in {dtype}' if dtype else ''} on {self.device}{positions}")
        building = {"build": build} if loader == "longdraft" else {}
        target = LOADERS[loader](path, DTYPES[dtype or "fp32"], self.device, gguf_file, most, **building)
        if self.template is not None and (end := chat_end(target.tokenizer, self.template)) is not None:
            target.end_tokens.setdefault(end, "--chat-template")
        if self.args.verbose:
            for token, sources in target.end_tokens.items():
                spelled = "" if target.tokenizer is None else f" {target.tokenizer.convert_ids_to_tokens(token)}"
                note(f"End token {token}{spelled}: named by {sources}")
        return target

    def of(self, name: str) -> dict[str, Any]:
        """One drafter's draft folder and options, as `build_drafter` and `Engine` take them."""
        return {"draft": draft_for(name, self.args.draft), "options": options_for(name, self.options)}

    def open_engines(self, target: Target, slots: int | None = None) -> dict[str, Engine]:
        """An engine for each drafter, by name."""
        args = self.args
        settings = {"max_length": args.max_length, "prefill_chunk": args.prefill_chunk, "slots": slots, "log": note}
        settings |= {"nodes": self.nodes, "noise_in_ranking": not args.no_noise}
        return {name: Engine(target, name, **self.of(name), **settings) for name in self.names}

    def open_engine(self, positions: int, slots: int) -> Engine:
        """Load the target and open the engine of a command that takes one drafter."""
        (engine,) = self.open_engines(self.open_target(positions, slots), slots).values()
        return engine


def _source(args: argparse.Namespace, trained: Mapping[str, Any]) -> tuple[str, str | None]:
    """Path and .gguf file of the target that was named, else of the one that the first draft was trained for."""
    if args.target is not None:
        return args.target, args.gguf_file
    if args.gguf_file is not None:
        raise ValueError("--gguf-file: it names a file inside --target, which is not given")
    if not args.draft:
        raise ValueError("--target: name a model, or give --draft, whose own target is then loaded")
    path, gguf_file = trained.get("path"), trained.get("gguf_file")
    if not isinstance(path, str) or not isinstance(gguf_file, str | None):
        name = read_info(args.draft[0]).target.get("name")
        raise ValueError(
            f"--target: {args.draft[0]} does not say where its target is; give {name} or a copy of it as --target"
        )
    return path, gguf_file


def drafter_names(given: Sequence[str] | None, drafts: Sequence[str]) -> list[str]:
    """The drafters that were named, checked. Without any, those of the draft folders' methods, or plain."""
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
    """The draft folder for a drafter that needs one: the only one, or among several the one of its method."""
    if not (methods := TRAINED.intersection(name.split("+"))):
        return None
    return next((draft for draft in drafts if len(drafts) == 1 or draft_method(draft) in methods), None)


def read_options(given: Sequence[str]) -> dict[str, Any]:
    """Drafter options from KEY=VALUE. Values may be true, false, numbers and lists of whole numbers (3,3,3); anything
    else is text."""
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
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        return text


def options_for(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options for one drafter: those without a drafter's name, and those with its name or one inside its a+b."""
    if name == "plain":
        return {}
    return {key: value for key, value in options.items() if "." not in key or key.split(".")[0] in name.split("+")}


def check_options(names: Sequence[str], options: Mapping[str, Any]) -> None:
    """Raise ValueError for an option that is for none of the drafters."""
    for key in options:
        if not any(key in options_for(name, options) for name in names):
            raise ValueError(f"--option: {key} is for none of the drafters {', '.join(names)}; leave it out")


def check_drafts(names: Sequence[str], drafts: Sequence[str], target: str | None) -> None:
    """Raise ValueError for a draft folder that is used neither by a drafter nor to find the target."""
    used = {draft_for(name, drafts) for name in names}
    for draft in drafts:
        if draft not in used and (target is not None or len(drafts) > 1):
            drafters = f"{', '.join(names)} {'does' if len(names) == 1 else 'do'}"
            raise ValueError(f"--draft: {draft}, but {drafters} not take it; leave it out or name its drafter")


def node_budget(text: str | None, names: Sequence[str]) -> int | str | None:
    """--nodes as `Engine` takes it: "auto" (the default), a number, or None for all."""
    if text is None or text in ("auto", "all"):
        nodes = None if text == "all" else "auto"
    elif text.isdecimal() and 1 <= int(text) < 2**31:
        nodes = int(text)
    else:
        raise ValueError(f"--nodes: {text!r}; give auto, all or a number of at least 1; for none, --drafter plain")
    if text is not None and list(names) == ["plain"]:
        raise ValueError(f"--nodes: {text}, but plain decoding verifies none; name a --drafter")
    return nodes


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
