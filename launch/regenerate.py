"""A conversation set answered anew by the target, to train its draft on: `longdraft prepare regenerate --source chats/
--target smollm2-135m --out data/answered`, then `longdraft prepare --source data/answered --chat-field messages ...`.
With `--prompt-tokens 64-256` texts are continued, and prepared with `--chat-template plain` beside.

Argument parsing and wiring; the work is in data_prep/regenerate.py and infer/engine.py. In fp32 neither batch nor
drafter changes a byte; in bf16 passes of other widths round otherwise, and a near-tie may fall the other way.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longdraft.launch.console import ends_on_ctrl_c, framed, leave, note, show
from longdraft.launch.shared_options import NUMBERS as SHARED

if TYPE_CHECKING:
    from longdraft.data_prep.endpoints import EndpointClient
    from longdraft.data_prep.responses import Completion, Generate
    from longdraft.infer.sampling import SamplingParams

# Options of SamplingParams, by their names there.
NUMBERS = {
    "max_new_tokens": (
        int,
        1024,
        "tokens of an answer (default: 1024); see --unfinished",
    ),
    "temperature": (float, 0.0, "0, the default, is greedy"),
    "top_k": (int, 0, "sample from the k most probable tokens; 0 is off"),
    "top_p": (float, 1.0, "sample from the most probable tokens of this share together; 1 is off"),
    "min_p": (float, 0.0, "drop tokens less probable than this times the most probable one; 0 is off"),
    "seed": (int, 0, "with each conversation's content and turn it gives the answer's seed"),
}
# More of them, which count as settings where they are given; those that servers' interfaces have, and those of ours.
SERVED = ("repetition_penalty", "presence_penalty", "frequency_penalty")
OWN = ("eta_cutoff", "min_tokens_to_keep", "contextual_penalty", "contextual_window")
# Defaults of options that not every call reads, and that are errors where they are given and not read.
DEFAULTS = {"chat_field": "messages", "dtype": "bf16", "concurrency": 64, "batch": 8}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="longdraft prepare regenerate",
        description="Let the target answer the prompts of a conversation set, or continue texts.",
    )
    many: dict[str, Any] = {"nargs": "+", "action": "extend"}
    add = parser.add_argument_group("conversations").add_argument
    add("--source", required=True, metavar="PATH", help="files, folders, data sets of the hub or 'stdlib-chat'", **many)
    add("--files", default=[], metavar="PATTERN", help="of a folder or set only files of such names", **many)
    add("--chat-field", help="field that holds the messages (default: messages)")
    begins = "continue texts instead: of each document behind its first N tokens, or N to M, by the document's hash"
    add("--prompt-tokens", metavar="N[-M]", help=begins)
    add("--text-field", help="with --prompt-tokens: field of a record that holds the text (default: text)")
    add("--out", required=True, type=Path, help="folder to make, or to go on with")
    size = "conversations of a file of --out; what a kill can lose (default: 256)"
    add("--part-size", type=int, default=256, metavar="N", help=size)
    shard = "do every n-th file of --out from the i-th on, one of several machines; then call without, to finish"
    add("--shard", metavar="i/n", help=shard)
    add("--overwrite", action="store_true", help="answer anew into a folder that was answered with something else")
    add = parser.add_argument_group("target").add_argument
    add("--target", help="a folder, a hub name, a .gguf file or smollm2-135m (default: the draft's own target)")
    add("--gguf-file", help="with --target: name of a .gguf file inside it")
    add("--chat-template", type=Path, metavar="FILE", help="Jinja, as `longdraft prepare` is given it")
    add("--dtype", choices=("fp32", "bf16"), help="default: bf16")
    add("--device", help="default: cuda where there is one")
    add("--max-length", type=int, help="most positions of a prompt and its answer (default: the target's)")
    add = parser.add_argument_group("answers").add_argument
    for name, (kind, default, text) in NUMBERS.items():
        flag = f"--{name.replace('_', '-')}"
        add(flag, type=kind, default=default, metavar="N" if kind is int else "X", help=text)
    for name in (*SERVED, *OWN):
        kind, text = SHARED[name]
        add(f"--{name.replace('_', '-')}", type=kind, metavar="N" if kind is int else "X", help=text)
    cut = "a longer answer leaves its conversation out (default), or ends it, without an end to be learned (of texts)"
    add("--unfinished", choices=("drop", "keep"), help=cut)
    add = parser.add_argument_group("servers, in place of an engine here").add_argument
    where = "OpenAI-style servers of the target (vLLM, SGLang, longdraft serve); their key: OPENAI_API_KEY"
    add("--endpoint", default=[], metavar="URL", help=where, **many)
    add("--model", help="as the servers call it (default: the only one that they have)")
    add("--concurrency", type=int, metavar="N", help="requests under way at a time (default: 64)")
    add = parser.add_argument_group("speed only: in fp32 never the text").add_argument
    add("--batch", type=int, metavar="N", help="conversations decoded together (default: 8)")
    add("--drafter", help="a name, or a+b for several in one tree; default: the draft's own, else plain")
    add("--draft", nargs=1, default=[], help="folder that `longdraft export` wrote, or one that comes with longdraft")
    add(
        "--option",
        default=[],
        metavar="KEY=VALUE",
        help="a drafter's own; DRAFTER.KEY=VALUE for one of several",
        **many,
    )
    add(
        "--nodes",
        help="proposed nodes that a step verifies: auto (the default: what pays), all, or a number at most",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 2 after an error, 130 after Ctrl-C."""
    parser = _parser()

    def work() -> None:
        args = parser.parse_args(argv)
        with ends_on_ctrl_c(parser.prog):
            _regenerate(args)

    return framed(parser.prog, work, "interrupted; finished parts are kept, the same call goes on", shows=False)


def _regenerate(args: argparse.Namespace) -> None:
    # Here, not above: --help and a wrong argument should not wait for torch.
    from longdraft.data_prep.chat import PLAIN, make_chat_encoder
    from longdraft.data_prep.regenerate import RegenerateConfig, regenerate
    from longdraft.data_prep.tasks import read_machine
    from longdraft.infer.sampling import SamplingParams
    from longdraft.launch import runtime
    from longdraft.models.fingerprint import shape_hash, tokenizer_hash
    from longdraft.models.hf import load_tokenizer, read_target_config

    machine = None if args.shard is None else read_machine(args.shard)
    _check_endpoints(args)
    continued = _continued(args)
    for name, value in DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    device = runtime.read_device(args.device)
    more = {name: value for name in (*SERVED, *OWN) if (value := getattr(args, name)) is not None}
    sampling = SamplingParams(**{name: getattr(args, name) for name in NUMBERS}, **more)
    runtime.check_filters(sampling)
    engine_settings = _engine_settings(args)
    path, gguf_file = runtime.target_source(args.target, args.gguf_file, args.draft)
    allowed = runtime.max_positions(args.draft)
    shape = read_target_config(path, gguf_file, allowed)
    positions = _positions(args.max_length, shape.max_positions)
    tokenizer = load_tokenizer(path, gguf_file)
    template = PLAIN if continued else None
    if args.chat_template is not None:
        template = runtime.read_text(args.chat_template, "--chat-template")
    encoder = make_chat_encoder(tokenizer, template)
    answering = {name: getattr(sampling, name) for name in NUMBERS if name != "seed"} | more
    fingerprint = {"target": _target_name(path, gguf_file), "config_sha256": shape_hash(shape)}
    if args.endpoint:
        client = _endpoint_client(args, answering, tokenizer, positions)
        answering |= {**fingerprint, "model": client.model}
    else:
        client, answering = None, answering | {**fingerprint, "dtype": args.dtype}
    config = RegenerateConfig(
        tuple(args.source),
        args.out,
        positions - 1,
        answering,
        args.chat_field,
        tuple(args.files),
        args.seed,
        args.part_size,
        args.overwrite,
        (args.unfinished or ("keep" if continued else "drop")) == "keep",
        continued,
        args.text_field,
    )

    def start() -> "Generate":
        if client is not None:
            client.check()
            return client
        build = runtime.build_fitting(path, sampling.max_new_tokens, args.batch)
        return generator(
            runtime.open_target(path, gguf_file, args.dtype, device, allowed, build), sampling, **engine_settings
        )

    regenerate(config, encoder, tokenizer_hash(tokenizer), start, machine, lambda line: show(f"{line}\n"))


def _continued(args: argparse.Namespace) -> tuple[int, int] | None:
    """Tokens of a text's beginning, at least and at most; None for conversations."""
    if args.prompt_tokens is None:
        if args.text_field is not None:
            raise ValueError(f"--text-field: {args.text_field} is of texts to continue; give --prompt-tokens too")
        return None
    if args.chat_template is not None:
        raise ValueError("--chat-template: texts that are continued have none; leave it or --prompt-tokens out")
    if args.chat_field is not None:
        raise ValueError(
            f"--chat-field: {args.chat_field} is of conversations, and --prompt-tokens continues texts, whose field "
            "--text-field names; leave one out"
        )
    least, dash, most = args.prompt_tokens.partition("-")
    if not (least.isdecimal() and (most.isdecimal() or not dash)):
        raise ValueError(f"--prompt-tokens: {args.prompt_tokens}; give a number of tokens, or two as 64-256")
    return int(least), int(most or least)


def _check_endpoints(args: argparse.Namespace) -> None:
    """Raises ValueError for what has no meaning with endpoints, or without."""
    ours = ("drafter", "draft", "option", "nodes", "device", "dtype", "batch")
    if args.endpoint and (given := [name for name in OWN if getattr(args, name) is not None]):
        option = given[0].replace("_", "-")
        raise ValueError(f"--{option}: no server's interface has it; leave it out, or decode here, without --endpoint")
    if args.endpoint and (given := [name for name in ours if getattr(args, name) not in (None, [])]):
        raise ValueError(f"--{given[0]}: that is of an engine here, and --endpoint asks servers; leave one out")
    if args.endpoint and args.target is None:
        raise ValueError("--target: missing; of it, prompts are made for --endpoint's servers (no weights are read)")
    if not args.endpoint and (given := [name for name in ("model", "concurrency") if getattr(args, name) is not None]):
        raise ValueError(f"--{given[0]}: that is of servers, and no --endpoint is given")


def _endpoint_client(args: argparse.Namespace, answering: dict, tokenizer: Any, positions: int) -> "EndpointClient":
    from longdraft.data_prep.endpoints import EndpointClient, Endpoints

    # An answer's control tokens are to be seen, so that it is left out, as an engine's is.
    asked = {"max_tokens": answering["max_new_tokens"], "skip_special_tokens": False}
    asked |= {name: answering[name] for name in ("temperature", "top_p")}
    # What only some servers know is said where it is wanted.
    asked |= {name: answering[name] for name in ("top_k", "min_p") if answering[name]}
    asked |= {name: answering[name] for name in SERVED if name in answering}
    endpoints = Endpoints(tuple(args.endpoint), args.model, args.concurrency)
    return EndpointClient(endpoints, asked, tokenizer, tokenizer.eos_token_id, positions)


def _engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Of the Engine, for speed alone. Raises ValueError for an option that fits no drafter."""
    from longdraft.launch import runtime

    (drafter,) = runtime.drafter_names(None if args.drafter is None else [args.drafter], args.draft)
    options = runtime.read_options(args.option)
    runtime.check_options([drafter], options)
    runtime.check_drafts([drafter], args.draft, args.target)
    if args.batch < 1:
        raise ValueError(f"--batch: {args.batch}; decode at least 1 conversation at a time")
    return {
        "drafter": drafter,
        "draft": runtime.draft_for(drafter, args.draft),
        "options": runtime.options_for(drafter, options),
        "nodes": runtime.node_budget(args.nodes, [drafter]),
        "slots": args.batch,
        "max_length": args.max_length,
    }


def generator(target, sampling: "SamplingParams", **settings) -> "Generate":
    """The target as a function from prompts to completions. settings: of the Engine."""
    from longdraft.data_prep.responses import Completion
    from longdraft.infer.engine import Engine

    engine = Engine(target, log=note, **settings)

    def generate(prompts: Sequence[list[int]], seeds: Sequence[int]) -> "Iterator[Completion]":
        for piece in engine.stream(prompts, [replace(sampling, seed=seed) for seed in seeds]):
            if done := piece.generation:
                yield Completion(done.index, done.tokens, done.finish_reason == "stop")

    return generate


def _positions(asked: int | None, limit: int) -> int:
    if asked is not None and not 2 <= asked <= limit:
        raise ValueError(f"--max-length: {asked} must lie in 2..{limit}, the target's positions")
    return asked or limit


def _target_name(path: str, gguf_file: str | None) -> str:
    """Without folders of this machine; a plan is compared by it, for no hash here tells weights apart."""
    name = Path(path).expanduser().resolve().name if Path(path).expanduser().exists() else path
    return name if gguf_file is None else f"{name}/{gguf_file}"


if __name__ == "__main__":
    leave(main())
