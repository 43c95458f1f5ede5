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

from longdraft.launch.console import ends_on_ctrl_c, flag, framed, leave, read_text, show
from longdraft.launch.shared_options import NUMBERS as SHARED
from longdraft.launch.shared_options import add_drafters, add_numbers, add_target

if TYPE_CHECKING:
    from longdraft.data_prep.endpoints import EndpointClient
    from longdraft.data_prep.responses import Completion, Generate
    from longdraft.infer.engine import Engine
    from longdraft.infer.sampling import SamplingParams

# Options of SamplingParams, by their names there, and what they are where nothing is said: settings of every answer.
NUMBERS = {
    "max_new_tokens": (int, "tokens of an answer (default: 1024); see --unfinished"),
    "temperature": (float, "0, the default, is greedy"),
    **{name: SHARED[name] for name in ("top_k", "top_p", "min_p")},
    "seed": (int, "with each conversation's content and turn it gives the answer's seed"),
}
SETTINGS = {"max_new_tokens": 1024, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0}
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
    add_target(add)
    add("--chat-template", type=Path, metavar="FILE", help="Jinja, as `longdraft prepare` is given it")
    add("--dtype", choices=("fp32", "bf16"), help="default: bf16")
    add("--device", help="default: cuda where there is one")
    add("--max-length", type=int, help="most positions of a prompt and its answer (default: the target's)")
    add = parser.add_argument_group("answers").add_argument
    add_numbers(add, NUMBERS, **SETTINGS)
    add_numbers(add, {name: SHARED[name] for name in (*SERVED, *OWN)})
    cut = "a longer answer leaves its conversation out (default), or ends it, without an end to be learned (of texts)"
    add("--unfinished", choices=("drop", "keep"), help=cut)
    add = parser.add_argument_group("servers, in place of an engine here").add_argument
    where = "OpenAI-style servers of the target (vLLM, SGLang, longdraft serve); their key: OPENAI_API_KEY"
    add("--endpoint", default=[], metavar="URL", help=where, **many)
    add("--model", help="as the servers call it (default: the only one that they have)")
    add("--concurrency", type=int, metavar="N", help="requests under way at a time (default: 64)")
    add = parser.add_argument_group("speed only: in fp32 never the text").add_argument
    add("--batch", type=int, metavar="N", help="conversations decoded together (default: 8)")
    add_drafters(add, several=False)
    # Of `Drafting`, and not asked for here: our own decoder's answers, whatever the draft was trained with.
    parser.set_defaults(loader="longdraft", prefill_chunk=None, no_noise=False)
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
    from longdraft.launch.runtime import Drafting
    from longdraft.models.fingerprint import shape_hash, tokenizer_hash
    from longdraft.models.hf import load_tokenizer, read_target_config

    machine = None if args.shard is None else read_machine(args.shard)
    _check_endpoints(args)
    continued = _continued(args)
    for name, value in DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.batch < 1:
        raise ValueError(f"--batch: {args.batch}; decode at least 1 conversation at a time")
    more = {name: value for name in (*SERVED, *OWN) if (value := getattr(args, name)) is not None}
    sampling = SamplingParams(**{name: getattr(args, name) for name in NUMBERS}, **more)
    asked = Drafting(args)
    asked.check_sampling(sampling)
    path, gguf_file = asked.source
    shape = read_target_config(path, gguf_file, asked.max_positions)
    positions = _positions(args.max_length, shape.max_positions)
    tokenizer = load_tokenizer(path, gguf_file)
    template = PLAIN if continued else None
    if args.chat_template is not None:
        template = read_text(args.chat_template, "--chat-template")
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
        return _generator(asked.open_engine(sampling.max_new_tokens, args.batch), sampling)

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
        raise ValueError(
            f"{flag(given[0])}: no server's interface has it; leave it out, or decode here, without --endpoint"
        )
    if args.endpoint and (given := [name for name in ours if getattr(args, name) not in (None, [])]):
        raise ValueError(f"--{given[0]}: that is of an engine here, and --endpoint asks servers; leave one out")
    if args.endpoint and args.target is None:
        raise ValueError("--target: missing; of it, prompts are made for --endpoint's servers (no weights are read)")
    if not args.endpoint and (given := [name for name in ("model", "concurrency") if getattr(args, name) is not None]):
        raise ValueError(f"--{given[0]}: that is of servers, and no --endpoint is given")


def _endpoint_client(args: argparse.Namespace, answering: dict, tokenizer: Any, positions: int) -> "EndpointClient":
    from longdraft.data_prep.endpoints import EndpointClient

    # An answer's control tokens are to be seen, so that it is left out, as an engine's is.
    asked = {"max_tokens": answering["max_new_tokens"], "skip_special_tokens": False}
    asked |= {name: answering[name] for name in ("temperature", "top_p")}
    # What only some servers know is said where it is wanted.
    asked |= {name: answering[name] for name in ("top_k", "min_p") if answering[name]}
    asked |= {name: answering[name] for name in SERVED if name in answering}
    return EndpointClient(args.endpoint, asked, tokenizer, positions, args.model, args.concurrency)


def _generator(engine: "Engine", sampling: "SamplingParams") -> "Generate":
    """The target as a function from prompts to completions."""
    from longdraft.data_prep.responses import Completion

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
