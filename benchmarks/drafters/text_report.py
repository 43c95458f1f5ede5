"""Shows the result of `longdraft bench` as a text table."""

from collections.abc import Callable, Mapping
from typing import Any

from longdraft.benchmarks.drafters import papers
from longdraft.benchmarks.drafters.forced import LABEL
from longdraft.benchmarks.drafters.metrics import lay_out

Figures = Mapping[str, Any]


def table(result: dict) -> str:
    """Plain decoding beside the drafters at every temperature, with exactness and the cost of a pass by its width."""
    settings = result["settings"]
    shortest, longest = settings["prompt_tokens"]
    on_gpu = result.get("on_gpu", False)
    sampling = "".join(f"{name} {value}, " for name, value in settings["sampling"].items())
    sampling += "" if settings["ignore_eos"] else "stop at end tokens, "
    lines = [
        f"{result['target']}, {result['dtype']}, {result['device']}, {result['threads']} threads, batch 1: "
        f"{settings['prompts']} prompts of {shortest} to {longest} tokens, {settings['new_tokens']} new tokens each, "
        f"seed {settings['seed']}, {sampling}peak memory {result['peak_memory_mib']} MiB"
    ]
    for run in result["runs"]:
        title = "greedy" if run["temperature"] == 0 else f"T {run['temperature']}"
        names, *rest = ("  ".join(cells) for cells in lay_out(rows(title, run["drafters"], on_gpu)))
        lines += ["", names, "-" * len(names), *rest]
    lines += papers.table(result["paper"]) if "paper" in result else []
    lines += ["", *([f"exact: {exactness(result)}"] if "exact" in result else [])]
    for name, rates in settings.get(LABEL, {}).items():
        levels = [f"{rate:g}" for rate in rates]
        shown = ", ".join(levels) if len({*levels}) > 1 else f"{levels[0]} at {len(levels)} levels"
        lines.append(f"{name}: {LABEL} (rates {shown})")
    for context, curve in result["width_curves_ms"].items():
        shown = ", ".join(f"{width}: {ms / curve['1']:.2f}" for width, ms in curve.items())
        lines.append(f"a pass after {context} tokens, {curve['1']:.1f} ms for one row; by rows: {shown}")
    return "\n".join(lines)


def rows(title: str, drafters: Mapping[str, Figures], on_gpu: bool) -> list[list[str]]:
    """The rows of a table: a name, and a cell for each drafter. The first one has the drafters' names."""
    found = [[f"{title}  ", *drafters]]

    def row(name: str, write: Callable[[Figures], str]) -> None:
        found.append([f"{name}  ", *(write(one) for one in drafters.values())])

    row("tokens/step", lambda one: f"{one['tokens_per_step']:.3f}")
    row("  95 % of it", lambda one: "{:.2f}-{:.2f}".format(*one["intervals"]["per_step"]))
    row("acceptance", lambda one: f"{one['acceptance']:.3f}")
    row("nodes/step", lambda one: f"{one['nodes_per_step']:.1f}")
    row("tokens/s, decoding", lambda one: f"{one['tokens_per_second']:.1f}")
    row("first token, s", lambda one: f"{one['first_token_seconds']:.2f}")
    if on_gpu:  # the parts of a step would be the times of launching kernels
        row("step, ms", lambda one: f"{1e3 * one['tokens_per_step'] / one['tokens_per_second']:.2f}")
    else:
        for part, name in (("draft", "draft"), ("target", "verify"), ("commit", "commit"), ("host", "host")):
            row(f"{name}, ms/step", lambda one, part=part: f"{one[f'{part}_ms']:.2f}")
        row("host, share of a step", lambda one: f"{one['host_share']:.1%}")
    if len(drafters) > 1:
        row("speed over plain", lambda one: f"{one['speedup']:.2f}")
        row("  95 % of it", lambda one: "{:.2f}-{:.2f}".format(*one["intervals"]["speedup"]))
        for part in ("tasks", "contexts"):
            groups = next(iter(drafters.values()))[part]
            for group in groups if len(groups) > 1 else ():
                row(f"  {group}", lambda one, part=part, group=group: f"{one[part][group]['speedup']:.2f}")
        row("  slowest prompt", lambda one: f"{min(one['prompt_speedups']):.2f}")
        row("plain decoding's tokens", lambda one: "{} of {}".format(*one["same_tokens"]))
    return found


def exactness(result: Mapping[str, Any]) -> str:
    """Whether exactness was proved, in which form, and otherwise how many tokens flipped. result: of `prove`."""
    if result["exact"]:
        return f"yes ({result['exact_checked']})"
    if result["proof"]["form"] == "off":
        return f"not shown ({result['exact_checked']})"
    flips = result["proof"]["flips"].items()
    parts = [f"{name} {found['flips']} near-ties of {found['tokens']} tokens differ" for name, found in flips]
    return f"not proved in fp32 ({result['exact_checked']}): {'; '.join(parts)}"
