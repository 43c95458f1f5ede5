"""Decode a prompt: `longdraft generate --draft FOLDER --prompt "..."`, streamed; or two drafters side by side.

Argument parsing and printing; the work is in infer/engine.py.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="longdraft generate", description="Decode a prompt with any drafter.")
    add = parser.add_argument
    add("--target", help="a folder, a hub name, a .gguf file or smollm2-135m (default: the draft's own target)")
    add("--gguf-file", help="with --target: name of a .gguf file inside it")
    add("--draft", help="draft folder that `longdraft export` wrote")
    add("--drafter", nargs="+", help="one or more; default: tokenswift with --draft, else plain")
    add("--prompt", help="text; - or nothing reads standard input")
    add("--prompt-file", type=Path, help="a text file")
    add("--heldout", type=Path, metavar="DATA", help="take the prompt from the held-out rows of a prepared folder")
    add("--row", type=int, help="with --heldout: which row (default: the first)")
    add("--prompt-tokens", type=int, help="use only the first so many tokens of the prompt")
    add("--nodes", type=int, help="tokenswift: size of the tree (default: what pays by the measured pass times)")
    add("--dtype", choices=("fp32", "bf16"), default="bf16")
    add("--device", help="default: cuda where there is one")
    add("--max-new-tokens", type=int, default=256)
    add("--temperature", type=float, default=0.0, help="0 is greedy")
    add("--top-k", type=int, default=0)
    add("--top-p", type=float, default=1.0)
    add("--min-p", type=float, default=0.0)
    add("--seed", type=int, help="same seed, same text, whichever drafter; drawn and shown when left out")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        return _generate(args)
    except ValueError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2


def _generate(args: argparse.Namespace) -> int:
    # Here, not above: --help and a wrong argument should not wait for torch.
    from longdraft.infer.engine import Engine
    from longdraft.infer.sampling import SamplingParams, draw_seed
    from longdraft.launch.runtime import open_target, paying_tree_of, prompt_tokens, target_source, tree_of

    drafters = args.drafter or (["tokenswift"] if args.draft else ["plain"])
    if args.nodes is not None and "tokenswift" not in drafters:
        raise ValueError("--nodes: the size of tokenswift's tree, which is not among the drafters")
    if args.row is not None and args.heldout is None:
        raise ValueError("--row: a row of --heldout, which is not given")
    params = SamplingParams(
        args.temperature, args.top_k, args.top_p, args.min_p, args.seed, max_new_tokens=args.max_new_tokens
    )
    params = replace(params, seed=draw_seed() if params.seed is None else params.seed)
    target = open_target(*target_source(args.target, args.gguf_file, args.draft), args.dtype, args.device)
    prompt = prompt_tokens(args, target)
    if sys.stdout.isatty():
        print(f"\033[2m{target.tokenizer.decode(prompt)[-600:]}\033[0m", end="")
    texts = []
    for name in drafters:
        if len(drafters) > 1:
            print(f"\n--- {name} ---", flush=True)
        draft, options = None if name == "plain" else args.draft, {}
        if name == "tokenswift" and draft:
            shape = paying_tree_of(target, draft, len(prompt)) if args.nodes is None else tree_of(draft, args.nodes)
            options = {"shape": shape}
        engine = Engine(target, name, draft, options=options)
        generation = _stream(engine, prompt, params)
        texts.append(generation.tokens)
        print(
            f"\n[{name}: {len(generation.tokens)} tokens, {generation.tokens_per_second:.1f} tokens/s, "
            f"{generation.tokens_per_step:.2f} tokens/step, ended by {generation.finish_reason}, "
            f"seed {generation.seed}]",
            file=sys.stderr,
            flush=True,
        )
    if len(texts) > 1:
        same = all(tokens == texts[0] for tokens in texts)
        print(f"\nSame tokens from {', '.join(drafters)} ({args.dtype}): {'yes' if same else 'NO'}", file=sys.stderr)
    return 0


def _stream(engine, prompt, params):
    """Print the text as it comes; returns the Generation."""
    import torch
    from transformers import TextStreamer

    streamer = TextStreamer(engine.target.tokenizer, skip_special_tokens=True)
    for piece in engine.stream([prompt], params):
        if piece.tokens:
            streamer.put(torch.tensor(piece.tokens))
        if piece.generation:
            streamer.end()
            return piece.generation
    raise AssertionError("the stream ended without a generation")


if __name__ == "__main__":
    sys.exit(main())
