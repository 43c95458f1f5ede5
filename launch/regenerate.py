"""Let the target answer a conversation set, to train its draft on:

    longdraft prepare regenerate --source chats/ --target smollm2-135m --out data/answered
    longdraft prepare --source data/answered --chat-field messages ...

With `--prompt-tokens 64-256` texts are continued instead, and then prepared with `--chat-template plain`.

Only arguments and wiring are here; the work is in data_prep/regenerate.py and infer/engine.py. In fp32 neither the
batch nor the drafter changes a byte. In bf16, passes of other widths round differently, which can decide a near-tie.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longdraft.data_prep.chat import PLAIN, ChatEncoder
from longdraft.data_prep.endpoints import EndpointClient
from longdraft.data_prep.regenerate import RegenerateConfig, regenerate
from longdraft.data_prep.response_generation import Completion, Generate
from longdraft.data_prep.tasks import read_machine
from longdraft.infer.sampling import SamplingParams
from longdraft.launch.arguments import MANY, SAMPLING, add_drafters, add_numbers, add_target, at_least, check_used
from longdraft.launch.console import read_text, run_command, show

if TYPE_CHECKING:
    from longdraft.infer.engine import Engine

# Fields of SamplingParams that are settings of every answer, and their help.
NUMBERS = {
    "max_new_tokens": "maximum tokens of an answer (default: 1024); see --unfinished",
    "temperature": "0, the default, is greedy",
    **{name: SAMPLING[name] for name in ("top_k", "top_p", "min_p")},
    "seed": "an answer's seed is made of this, the conversation's content and the turn (default: 0)",
}
# Further fields, which are settings only if they are given: those that servers take too, and those that only we have.
SERVED = ("repetition_penalty", "presence_penalty", "frequency_penalty")
OURS = ("eta_cutoff", "min_tokens_to_keep", "contextual_penalty", "contextual_window")
# As in launch/arguments.py.
WITHOUT_EFFECT = (
    (("endpoint",), True, (*OURS, "drafter", "draft", "option", "nodes", "device", "dtype", "batch")),
    (("endpoint",), False, ("model", "concurrency")),
    (("prompt_tokens",), True, ("chat_template", "chat_field")),
    (("prompt_tokens",), False, ("text_field",)),
)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="longdraft prepare regenerate",
        description="Let the target answer the prompts of a conversation set, or continue texts.",
    )
    add = parser.add_argument_group("conversations").add_argument
    help = "files, folders, data sets on the hub, or 'stdlib-chat'"
    add("--source", required=True, metavar="PATH", help=help, **MANY)
    help = "take only files with names like these from folders and data sets"
    add("--files", default=[], metavar="PATTERN", help=help, **MANY)
    add("--chat-field", help="field of a record that holds the messages (default: messages)")
    help = "continue texts instead, after each document's first N tokens (N-M: a number chosen by the document's hash)"
    add("--prompt-tokens", type=_token_range, metavar="N[-M]", help=help)
    add("--text-field", help="with --prompt-tokens: field of a record that holds the text (default: text)")
    add("--out", required=True, type=Path, help="folder to create, or to continue")
    help = "conversations in a file of --out, and the most that a kill can lose (default: 256)"
    add("--part-size", type=at_least(1), default=256, metavar="N", help=help)
    help = "make only every n-th file of --out, starting with the i-th, on one of n machines; then run once without it"
    add("--shard", metavar="i/n", help=help)
    help = "clear a folder that was answered with something else, and answer anew"
    add("--overwrite", action="store_true", help=help)
    add = parser.add_argument_group("target").add_argument
    add_target(add)
    add("--chat-template", type=Path, metavar="FILE", help="Jinja, the same as for `longdraft prepare`")
    add("--dtype", choices=("fp32", "bf16"), help="default: bf16")
    add("--device", help="default: cuda if there is a GPU, else cpu")
    add("--max-length", type=int, help="maximum tokens of a prompt and its answer (default: the target's limit)")
    add = parser.add_argument_group("answers").add_argument
    add_numbers(add, {**NUMBERS, **{name: SAMPLING[name] for name in (*SERVED, *OURS)}})
    help = "drop a conversation whose answer gets longer (default), or keep the answer up to there, without an end "
    add("--unfinished", choices=("drop", "keep"), help=help + "token to learn (default for texts)")
    add = parser.add_argument_group("servers, instead of decoding here").add_argument
    help = "OpenAI-style servers of the target (vLLM, SGLang, longdraft serve); OPENAI_API_KEY sets their key"
    add("--endpoint", default=[], metavar="URL", help=help, **MANY)
    add("--model", help="the servers' name for the target (default: the only model that they have)")
    add("--concurrency", type=at_least(1), metavar="N", help="requests in flight at a time (default: 64)")
    add = parser.add_argument_group("decoding here (affects speed; in fp32, never the text)").add_argument
    add("--batch", type=at_least(1), metavar="N", help="conversations decoded together (default: 8)")
    add_drafters(add, several=False)
    # `Drafting` reads these too. The answers are always our own decoder's, however the draft was trained.
    parser.set_defaults(loader="longdraft", prefill_chunk=None)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status: 2 after an error, 130 after Ctrl-C."""
    parser = _parser()
    on_ctrl_c = "interrupted; finished parts are kept, and the same command continues"
    return run_command(
        parser.prog, lambda: _regenerate(parser.parse_args(argv)), on_ctrl_c, needs_output=False, by_force=True
    )


def _regenerate(args: argparse.Namespace) -> None:
    # Imported here so that --help and a wrong argument need not wait for torch.
    from longdraft.launch.runtime import Drafting
    from longdraft.models.fingerprint import shape_hash, tokenizer_hash
    from longdraft.models.hf import load_tokenizer, read_target_config

    machine = None if args.shard is None else read_machine(args.shard)
    check_used(args, WITHOUT_EFFECT)
    if args.endpoint and args.target is None:
        raise ValueError("--target: missing; --endpoint's servers are sent its tokens (no weights are read)")
    args.dtype = args.dtype or "bf16"
    given = {name: getattr(args, name) for name in (*NUMBERS, *SERVED, *OURS) if getattr(args, name) is not None}
    sampling = SamplingParams(**{"max_new_tokens": 1024, **given})
    settings = {name: getattr(sampling, name) for name in {**NUMBERS, **given} if name != "seed"}
    template = None if args.chat_template is None else read_text(args.chat_template, "--chat-template")
    drafting = Drafting(args, template)
    path, gguf_file = drafting.source
    shape = read_target_config(path, gguf_file, drafting.max_positions)
    positions = shape.max_positions if args.max_length is None else args.max_length
    if not 2 <= positions <= shape.max_positions:
        raise ValueError(f"--max-length: {positions}; give 2 to {shape.max_positions}, the target's positions")
    tokenizer = load_tokenizer(path, gguf_file)
    served = (_served_fields(settings), tokenizer, positions, args.model, args.concurrency or 64)
    client = EndpointClient(args.endpoint, *served) if args.endpoint else None
    # The target's name tells its weights from others': of a local one without the path to it.
    here = Path(path).expanduser()
    target = "/".join([here.resolve().name if here.exists() else path, *([gguf_file] if gguf_file else [])])
    answering = settings | {"target": target, "config_sha256": shape_hash(shape)}
    answering |= {"dtype": args.dtype} if client is None else {"model": client.model}
    config = RegenerateConfig(
        sources=tuple(args.source),
        out=args.out,
        max_prompt=positions - 1,
        answering=answering,
        chat_field=args.chat_field or "messages",
        files=tuple(args.files),
        seed=args.seed or 0,
        part_size=args.part_size,
        overwrite=args.overwrite,
        keep_unfinished=(args.unfinished or ("keep" if args.prompt_tokens else "drop")) == "keep",
        continued=args.prompt_tokens,
        text_field=args.text_field,
    )

    def start() -> Generate:
        if client is not None:
            client.check()
            return client
        return partial(_generate, drafting.open_engine(sampling.max_new_tokens, args.batch or 8), sampling)

    encoder = ChatEncoder(tokenizer, PLAIN if args.prompt_tokens else template)
    regenerate(config, encoder, tokenizer_hash(tokenizer), start, machine, lambda line: show(f"{line}\n"))


def _token_range(text: str) -> tuple[int, int]:
    """The least and the most tokens of N or N-M."""
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r}; give a number of tokens, or two like 64-256")
    return int(found[1]), int(found[2] or found[1])


def _served_fields(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings as servers take them. Only some servers know the last ones, so they are sent only if they are on."""
    names = ["temperature", "top_p", *(name for name in ("top_k", "min_p", *SERVED) if settings.get(name))]
    # Special tokens in an answer must be visible, so that it can be left out, as an engine's answer is.
    fields = {"max_tokens": settings["max_new_tokens"], "skip_special_tokens": False}
    return fields | {name: settings[name] for name in names}


def _generate(
    engine: "Engine", sampling: SamplingParams, prompts: Sequence[list[int]], seeds: Sequence[int]
) -> Iterator[Completion]:
    for piece in engine.stream(prompts, [replace(sampling, seed=seed) for seed in seeds]):
        if done := piece.generation:
            yield Completion(done.index, done.tokens, done.finish_reason == "stop")


if __name__ == "__main__":
    sys.exit(main())
