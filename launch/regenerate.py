"""Let the target answer a conversation set, as training data for its draft:

    longdraft prepare regenerate --source chats/ --target smollm2-135m --out data/answered
    longdraft prepare --source data/answered --chat-field messages ...

With `--prompt-tokens 64-256` texts are continued instead, and then prepared with `--chat-template plain`.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longdraft.data_prep.chat import PLAIN, ChatEncoder
from longdraft.data_prep.endpoints import SECONDS, EndpointClient
from longdraft.data_prep.regenerate import Completion, Due, Generate, RegenerateConfig, regenerate
from longdraft.infer.sampling import SamplingParams
from longdraft.launch.arguments import DRAFTING, MANY, SAMPLING, add_drafters, add_fields, add_model, at_least
from longdraft.launch.console import flag, read_text, run_command, show

if TYPE_CHECKING:
    from longdraft.infer.engine import Engine

# For an option: those that are ignored without it, and with it.
ONLY_WITH = {"endpoint": ("model", "concurrency", "timeout"), "prompt_tokens": ("text_field",)}
NOT_WITH = {
    "endpoint": ("loader", "dtype", "device", "prefill_chunk", "batch", "drafter", "option", "nodes"),
    "prompt_tokens": ("chat_field",),
}
# Fields of SamplingParams that apply to every answer, with their help.
OPTIONAL = ("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
NUMBERS = {
    "max_new_tokens": "maximum tokens of an answer (default: 1024); see --unfinished",
    "temperature": "0, the default, is greedy",
    "seed": "each answer's seed is derived from this, the conversation's content and the turn (default: 0)",
    **{name: SAMPLING[name] for name in OPTIONAL},
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="longdraft prepare regenerate",
        description="Let the target answer the prompts of a conversation set, or continue texts.",
    )
    add = parser.add_argument_group("conversations").add_argument
    help = "files, folders, data sets on the hub, or 'stdlib-chat'"
    add("--source", required=True, metavar="PATH", help=help, **MANY)
    add("--chat-field", default="messages", help="field of a record that holds the messages (default: messages)")
    help = "continue texts instead, after each document's first N tokens (N-M: a number chosen by the document's hash)"
    add("--prompt-tokens", type=_token_range, metavar="N[-M]", help=help)
    add("--text-field", default="text", help="with --prompt-tokens: field with the text (default: text)")
    add("--chat-template", type=Path, metavar="FILE", help="a Jinja file, the same as for `longdraft prepare`")
    add("--out", required=True, type=Path, help="folder to create, or to continue")
    add = parser.add_argument_group("answers").add_argument
    add_fields(add, NUMBERS, max_new_tokens=1024, seed=0)
    help = "for a cut-off answer: drop its conversation (default), or keep the answer so far, without an end token "
    add("--unfinished", choices=("drop", "keep"), help=help + "to learn (default for texts)")
    parser.set_defaults(tensor_parallel=1)
    help = "conversations decoded together (default: 8)"
    add_model(parser)("--batch", type=at_least(1), default=8, metavar="N", help=help)
    add_drafters(parser.add_argument_group(DRAFTING).add_argument, several=False)
    add = parser.add_argument_group("servers, instead of decoding on this machine").add_argument
    help = "OpenAI-style servers of the target (vLLM, SGLang, longdraft serve); OPENAI_API_KEY sets their key"
    add("--endpoint", default=[], metavar="URL", help=help, **MANY)
    add("--model", help="the target's name, for servers that need one")
    add("--concurrency", type=at_least(1), default=64, metavar="N", help="requests in flight (default: 64)")
    help = f"how long to wait for a complete answer (default: {SECONDS:g})"
    add("--timeout", type=at_least(1), default=int(SECONDS), metavar="SECONDS", help=help)
    return parser


def _token_range(text: str) -> tuple[int, int]:
    """The minimum and maximum number of tokens, from N or N-M."""
    least, _, most = text.partition("-")
    try:
        first, last = sorted((at_least(1)(least), at_least(1)(most or least)))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text}; give a number of at least 1, or a range such as 64-256") from None
    return first, last


def main(argv: Sequence[str]) -> int:
    """Run the command. Returns the exit status: 2 after an error, 130 after Ctrl-C."""
    parser = _parser()
    on_ctrl_c = "interrupted; finished parts are kept, and the same command continues"
    return run_command(
        parser.prog, lambda: _regenerate(parser.parse_args(argv)), on_ctrl_c, needs_output=False, by_force=True
    )


def _regenerate(args: argparse.Namespace) -> None:
    # Imported here so that --help and a wrong argument need not wait for torch.
    from longdraft.launch.runtime import Drafting
    from longdraft.models.fingerprint import tokenizer_hash
    from longdraft.models.hf import load_tokenizer, read_limits

    sampling = SamplingParams(**{name: getattr(args, name) for name in NUMBERS if getattr(args, name) is not None})
    settings = {name: getattr(sampling, name) for name in NUMBERS if name != "seed"}
    template = None if args.chat_template is None else read_text(args.chat_template, "--chat-template")
    drafting = Drafting(args, template)
    limit, vocab_size, shape_sha256 = read_limits(drafting.source, drafting.max_positions, drafting.loader)
    tokenizer, positions = load_tokenizer(drafting.source), min(args.max_length or limit, limit)
    served = _served(sampling, vocab_size, args.model)
    client = EndpointClient(args.endpoint, served, positions, args.concurrency, args.timeout)
    defaults = _parser().get_default
    for option in ONLY_WITH:
        for name in (NOT_WITH if getattr(args, option) else ONLY_WITH)[option]:
            if getattr(args, name) != defaults(name):
                how = "not with" if getattr(args, option) else "only with"
                raise ValueError(f"{flag(name)}: {how} {flag(option)}; omit it")
    made_by = {"made_by": "servers" if args.endpoint else f"{drafting.loader}, {args.dtype}"}
    made_by |= {"model": args.model} if args.model else {}
    config = RegenerateConfig(
        sources=tuple(args.source),
        out=args.out,
        max_prompt=positions - 1,
        answering=settings | {"target": drafting.source, "config_sha256": shape_sha256} | made_by,
        field=args.text_field if args.prompt_tokens else args.chat_field,
        seed=args.seed,
        keep_unfinished=(args.unfinished or ("keep" if args.prompt_tokens else "drop")) == "keep",
        beginning=args.prompt_tokens,
    )

    def start() -> Generate:
        if args.endpoint:
            return client
        return partial(_generate, drafting.open_engine(args.batch), tokenizer, sampling)

    encoder = ChatEncoder(tokenizer, PLAIN if args.prompt_tokens else template)
    regenerate(config, encoder, tokenizer_hash(tokenizer), start, lambda line: show(f"{line}\n"))


def _served(sampling: SamplingParams, vocab_size: int, model: str | None) -> dict[str, Any]:
    """The sampling fields of a server's request. Those that are off are sent too, since vLLM would read missing ones
    from the model's generation_config.json. Servers differ in the top_k that means off, but all accept the size of the
    vocabulary. Special tokens in an answer must be visible, so that it can be dropped."""
    fields = {name: getattr(sampling, name) for name in ("temperature", *OPTIONAL)}
    fields |= {"max_tokens": sampling.max_new_tokens, "top_k": sampling.top_k or vocab_size}
    return fields | {"skip_special_tokens": False} | ({"model": model} if model else {})


def _generate(engine: "Engine", tokenizer: Any, sampling: SamplingParams, due: Due) -> Iterator[Completion]:
    """Decode the first open turn of every conversation, then the second turns, and so on, so that as many prompts as
    possible are decoded together."""
    from longdraft.infer.text import text_after

    while due:
        indices, asked = list(due), list(due.values())
        due.clear()
        prompts, params = [prompt for prompt, _ in asked], [replace(sampling, seed=seed) for _, seed in asked]
        for piece in engine.stream(prompts, params):
            if done := piece.generation:
                ended = done.finish_reason == "stop"
                tokens = done.tokens[:-1] if ended else done.tokens
                text = text_after(tokenizer, done.prompt, tokens, skip_special=False)
                yield Completion(indices[done.index], text, ended)
