"""A benchmark's figures, and its training run's, as a table for people and one picture. Not here: any measurement."""

from pathlib import Path


def table(result: dict, metrics: list[dict]) -> str:
    """Plain decoding beside the draft, with exactness, and why a ratio below 1 is what it is."""
    drafters = result["drafters"]
    rows: list[tuple[str, list[str]]] = [
        (f"{result['target']}, {result['dtype']}, {result['device']}", list(drafters)),
        ("nodes below the root", [f"{one['nodes']}" for one in drafters.values()]),
        ("tokens/step", [f"{one['tokens_per_step']:.3f}" for one in drafters.values()]),
        ("tokens/s, decoding", [f"{one['tokens_per_second']:.1f}" for one in drafters.values()]),
        ("first token, s", [f"{one['first_token_seconds']:.2f}" for one in drafters.values()]),
        ("acceptance", [f"{one['acceptance']:.3f}" for one in drafters.values()]),
    ]
    for part in ("draft", "target", "commit", "host"):
        rows.append((f"{part}, ms/step", [f"{one[f'{part}_ms']:.2f}" for one in drafters.values()]))
    rows[0] = (rows[0][0], [name.rjust(10) for name in rows[0][1]])
    width = max(len(name) for name, _ in rows) + 2
    lines = [name.ljust(width) + "".join(value.rjust(14) for value in values) for name, values in rows]
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join([*lines, "", *_verdicts(result), *_training(metrics)])


def _verdicts(result: dict) -> list[str]:
    """One line each: exactness, flips, transformers, speed and its reason."""
    lines = []
    if "exact" in result:
        lines.append(f"exact: {'yes' if result['exact'] else 'NO'} ({result['exact_checked']})")
    if "same_tokens" in result:
        same, compared = result["same_tokens"]
        lines.append(f"the timed runs in {result['dtype']}: {same} of {compared} tokens are plain decoding's")
    flips = result["flips"]
    lines.append(
        f"{result['dtype']} flips: {flips['flips']} of {flips['positions']} greedy choices differ between passes of 1 "
        f"and {flips['width']} rows" + (f", gap up to {flips['largest_gap']:.3f}" if flips["flips"] else "") +
        f" (logit error of {result['dtype']}: {flips['dtype_error']:.3f})"
    )  # fmt: skip
    if "plain_over_transformers" in result:
        lines.append(
            f"plain decoding over transformers' generate: {result['plain_over_transformers']:.2f}x "
            f"({result['transformers_tokens_per_second']:.1f} tokens/s)"
        )
    if "speedup" in result:
        lines.append(f"speed over plain decoding: {result['speedup']:.2f}x" + _reason(result))
    return lines


def _reason(result: dict) -> str:
    """Why speculation does not pay, where it does not."""
    if result["speedup"] >= 1:
        return ""
    draft, plain = result["drafters"]["tokenswift"], result["drafters"]["plain"]
    step = sum(draft[f"{part}_ms"] for part in ("draft", "target", "commit", "host"))
    alone = sum(plain[f"{part}_ms"] for part in ("draft", "target", "commit", "host"))
    return (
        f", below 1: a step of {1 + draft['nodes']} rows costs {step / alone:.2f} times a plain one here and must "
        f"bring as many tokens, but brings {draft['tokens_per_step']:.2f}; train longer"
    )


def _training(metrics: list[dict]) -> list[str]:
    """The last loss and the last held-out agreement of a run."""
    heldout = [record for record in metrics if "heldout_loss" in record]
    if not heldout:
        return []
    last = heldout[-1]
    shares = ", ".join(
        f"head {i} {rates[0]:.1%} / {sum(rates):.1%}" for i, rates in enumerate(last["heldout_rank_rates"], start=1)
    )
    return [f"after {last['step']} steps, held-out: loss {last['heldout_loss']:.2f}; top-1 / top-3 {shares}"]


def draw(result: dict, metrics: list[dict], path: str | Path) -> None:
    """Loss, agreement by head, the width curve and the speeds, as one PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, ((loss, agreement), (curve, speed)) = plt.subplots(2, 2, figsize=(11, 7.5), constrained_layout=True)
    figure.suptitle(f"{result['target']}: TokenSwift heads against plain decoding", fontsize=13)
    training = [record for record in metrics if "loss" in record]
    heldout = [record for record in metrics if "heldout_loss" in record]
    _draw_loss(loss, training, heldout)
    _draw_agreement(agreement, training, heldout)
    _draw_curve(curve, result)
    _draw_speed(speed, result)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_loss(axes, training: list[dict], heldout: list[dict]) -> None:
    axes.set(title="Loss (sum of the heads)", xlabel="step", ylabel="nats")
    if training:
        axes.plot([r["step"] for r in training], [r["loss"] for r in training], color="0.6", lw=1, label="training")
    if heldout:
        axes.plot([r["step"] for r in heldout], [r["heldout_loss"] for r in heldout], "o-", ms=4, label="held-out")
    if training or heldout:
        axes.legend()


def _draw_agreement(axes, training: list[dict], heldout: list[dict]) -> None:
    axes.set(title="Held-out agreement with the text", xlabel="step", ylabel="share of positions")
    if not heldout:
        return
    steps = [record["step"] for record in heldout]
    for head in range(len(heldout[0]["heldout_rank_rates"])):
        rates = [record["heldout_rank_rates"][head] for record in heldout]
        axes.plot(steps, [r[0] for r in rates], "o-", ms=4, color=f"C{head}", label=f"head {head + 1}, top-1")
        axes.plot(steps, [sum(r) for r in rates], "s--", ms=4, color=f"C{head}", label=f"head {head + 1}, top-3")
    axes.set_ylim(0, 1.4 * axes.get_ylim()[1])  # room for the legend
    axes.legend(fontsize=8, ncols=3, loc="upper left")


def _draw_curve(axes, result: dict) -> None:
    widths = {int(width): ms for width, ms in result["width_curve_ms"].items()}
    axes.set(title=f"One target pass, {result['dtype']}", xlabel="rows of the pass", ylabel="ms", xscale="log")
    axes.plot(list(widths), list(widths.values()), "o-", ms=4)
    axes.set_xticks(list(widths), [str(width) for width in widths])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    if nodes := result.get("nodes"):
        axes.axvline(nodes + 1, color="C1", ls=":", label=f"the tree's width: {nodes + 1}")
        axes.legend()


def _draw_speed(axes, result: dict) -> None:
    names = list(result["drafters"])
    speeds = [result["drafters"][name]["tokens_per_second"] for name in names]
    if "transformers_tokens_per_second" in result:
        names, speeds = ["transformers", *names], [result["transformers_tokens_per_second"], *speeds]
    bars = axes.bar(names, speeds, color=["0.7"] * (len(names) - 1) + ["C0"] if len(names) > 1 else "C0", width=0.55)
    steps = {name: f"\n{one['tokens_per_step']:.2f} a step" for name, one in result["drafters"].items()}
    labels = [f"{speed:.1f}{steps.get(name, '')}" for name, speed in zip(names, speeds, strict=True)]
    axes.bar_label(bars, labels, padding=3)
    exact = f", exact: {'yes' if result['exact'] else 'NO'}" if "exact" in result else ""
    axes.set(title=f"Decoding{exact}", ylabel=f"tokens/s, {result['dtype']}", ylim=(0, 1.25 * max(speeds)))
