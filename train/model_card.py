"""An exported draft as a repository of the hub: its model card with curves, its `custom_generate`, and the upload.

The card says only what the run recorded.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCard, ModelCardData
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import validate_repo_id
from yaml import YAMLError

from longdraft.models.draft_folder import CONFIG, HUB_NAME, WEIGHTS, DraftInfo, read_info
from longdraft.models.files import write_atomically
from longdraft.train.config import Config, to_yaml
from longdraft.train.tracking import read_metrics

CARD, CURVES, GENERATE = "README.md", "curves.png", "custom_generate/generate.py"
# OSError, and the error of the HTTP library that this version of the client uses.
HUB_ERRORS: tuple[type[Exception], ...] = HfHubHTTPError.__bases__  # type: ignore[assignment]
# The names of a record's numbers about decoding (evaluate.py, `as_record`).
DECODED = re.compile(r"decode_(tokens_per_step|acceptance)/ctx(\d+)\.T([^/]+?)(?:\.depth\d+)?")
# transformers' `custom_generate` reads this file from a repository and calls its function `generate`.
GENERATE_TEXT = '''"""Decoding with this draft, for `model.generate(custom_generate=..., trust_remote_code=True)`."""

from longdraft.infer.transformers_api import generate_with_draft

DRAFT = {draft!r}


def generate(model, inputs=None, **kwargs):
    return generate_with_draft(DRAFT, model, inputs, **kwargs)
'''
CARD_TEXT = """---
{metadata}
---

# {title}

A `{method}` draft for speculative decoding with `{target}` by longdraft: step {step}, trained on rows of {length:,}
tokens. Decoding with it gives the target's own tokens.

```bash
longdraft generate --draft {where} --target {path} --prompt TEXT
```

```python
model.generate(**inputs, custom_generate={where!r}, trust_remote_code=True)  # transformers
```

## Target

{target_table}

## Training

![training and held-out loss, and decoding with the draft]({curves})

{results}`longdraft train config.yaml`, with {versions}

```yaml
{config}```
"""


def check_name(name: str) -> None:
    """Raises ValueError for an invalid name of a repository, before anything is written."""
    if HUB_NAME.fullmatch(name) is None:
        raise ValueError(f"push: {name!r} is not the name of a repository; give OWNER/NAME")
    validate_repo_id(name)


def write_card(run_dir: str | Path, folder: Path, config: Config, step: int, name: str | None = None) -> None:
    """Write README.md, its figure and custom_generate/generate.py beside the draft.

    Args:
        folder: the draft's, exported from this step of a run with this config.
        name: the repository that it will become. None: generate.py names the folder where it lies.
    """
    info, method, target = read_info(folder), config.draft.method, config.target.path
    records = [record for record in read_metrics(run_dir) if record["step"] <= step]
    draw_curves(folder, records)
    text = CARD_TEXT.format(
        metadata=card_data(info, method, target).to_yaml(),
        title=name.split("/")[1] if name else f"{method} draft for {info.target['name']}",
        method=method,
        target=info.target["name"],
        step=step,
        length=info.train_length,
        where=name or "FOLDER",
        path=target,
        target_table=_table(("", ""), [(key, f"`{value}`") for key, value in info.target.items()]),
        curves=CURVES,
        results="".join(_results(info, records)),
        versions=", ".join(f"{key} {value}" for key, value in info.versions.items()),
        config=to_yaml(config),
    )
    (folder / GENERATE).parent.mkdir(exist_ok=True)
    written = {CARD: text, GENERATE: GENERATE_TEXT.format(draft=name or str(folder.resolve()))}
    for path, content in written.items():
        write_atomically(folder / path, lambda partial, content=content: partial.write_text(content, encoding="utf-8"))


def push(folder: Path, name: str) -> str:
    """Create the repository where there is none, upload the draft, its card and its generate.py; returns the address.
    Raises ValueError with the hub's reason where that fails; the folder stays as it is."""
    api = HfApi()
    try:
        address = api.create_repo(name, exist_ok=True)
        api.upload_folder(
            repo_id=name,
            folder_path=folder,
            allow_patterns=[CONFIG, WEIGHTS, CARD, CURVES, GENERATE],
            commit_message="Draft exported by longdraft",
        )
    except HUB_ERRORS as error:
        raise ValueError(
            f"push: {folder} could not be uploaded to {name}: {error}. The folder is whole: log in with `hf auth "
            "login` as a user who may write there, and push again"
        ) from error
    return str(address)


def card_data(info: DraftInfo, method: str, target: str) -> ModelCardData:
    """The card's metadata: base_model where the target has a hub name, and the licence where that model's card, or one
    in the target's folder, states it. `target`: the config's target.path."""
    base = target if HUB_NAME.fullmatch(info.target["name"]) and info.target["name"] == target else None
    tags = ["longdraft", "speculative-decoding", "draft-model", method, "long-context", "custom_generate"]
    about: dict[str, Any] = {"base_model": base, "tags": tags}
    if base is not None or (Path(target) / CARD).is_file():
        try:
            data = ModelCard.load(base or Path(target) / CARD).data.to_dict()
            about |= {key: data[key] for key in ("license", "license_name", "license_link") if data.get(key)}
        except (OSError, ValueError, YAMLError):  # no network, no card, or a card without readable metadata
            pass
    return ModelCardData(library_name="longdraft", pipeline_tag="text-generation", **about)


def _results(info: DraftInfo, records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Tokens/step and acceptance in the last evaluation, and how often the draft's candidates were right on held-out
    text, by head or level."""
    parts = []
    evaluations = [record for record in records if "decode_tokens_per_step" in record]
    if evaluations:
        header = ("context", "temperature", "tokens a step", "share of steps that accepted depth 1, 2, ...")
        rows = [
            (f"{context:,}", f"{temperature:g}", f"{tokens:.2f}", ", ".join(f"{share:.2f}" for share in shares))
            for (context, temperature), (tokens, shares) in decoded(evaluations[-1]).items()
        ]
        parts.append(f"Decoding after step {evaluations[-1]['step']}:\n\n{_table(header, rows)}\n\n")
    for key, what in (("choice_rates", "the target's own choice"), ("rank_rates", "the text's token")):
        if rates := info.tree.get(key):
            rows = [(i, ", ".join(f"{rate:.3f}" for rate in level)) for i, level in enumerate(rates, start=1)]
            header = ("head or level", f"share of held-out positions where candidate 1, 2, ... is {what}")
            parts.append(f"{_table(header, rows)}\n\n")
    return parts


def decoded(record: Mapping[str, Any]) -> dict[tuple[int, float], tuple[float, list[float]]]:
    """By context length and temperature: tokens/step, and the shares of steps that accepted depth 1, 2, ..."""
    tokens: dict[tuple[int, float], float] = {}
    shares: dict[tuple[int, float], list[float]] = {}
    for key, value in record.items():
        if found := DECODED.fullmatch(key):
            setting = int(found[2]), float(found[3])
            if found[1] == "acceptance":
                shares.setdefault(setting, []).append(value)
            else:
                tokens[setting] = value
    return {setting: (n, shares.get(setting, [])) for setting, n in tokens.items()}


def draw_curves(folder: str | Path, records: Sequence[Mapping[str, Any]]) -> Path:
    """Draw folder/curves.png from the records of metrics.jsonl: the losses and, where the run decoded, tokens/step over
    training steps and the acceptance by depth of the last evaluation. Each context length has a colour; lines are
    dashed above temperature 0. The file is replaced atomically."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # takes a second to import
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    evaluations = [record for record in records if "decode_tokens_per_step" in record]
    figure = Figure(figsize=(16 if evaluations else 6, 4.2), layout="constrained")
    panels: list[Any] = list(figure.subplots(1, 3 if evaluations else 1, squeeze=False)[0])
    for key, label in (("loss", "training, as minimised"), ("heldout_loss", "held out, cross-entropy")):
        points = [(record["step"], record[key]) for record in records if isinstance(record.get(key), float)]
        if points:
            panels[0].plot(*zip(*points, strict=True), label=label)
    panels[0].set(title="loss", xlabel="training step")
    settings = list(decoded(evaluations[-1])) if evaluations else []
    contexts = list(dict.fromkeys(context for context, _ in settings))
    for setting in settings:
        context, temperature = setting
        label = f"{context:,} tokens, {f'T {temperature:g}' if temperature else 'greedy'}"
        style = {"color": f"C{contexts.index(context)}", "linestyle": "--" if temperature else "-", "label": label}
        points = [(record["step"], decoded(record)[setting][0]) for record in evaluations if setting in decoded(record)]
        panels[1].plot(*zip(*points, strict=True), marker="o", markersize=4, **style)
        shares = decoded(evaluations[-1])[setting][1]
        panels[2].plot(range(1, len(shares) + 1), shares, marker="o", markersize=4, **style)
    if evaluations:
        last, best = evaluations[-1]["step"], evaluations[-1]["decode_best_step"]
        panels[1].axvline(best, color="grey", linestyle=":", label=f"best: step {best}")
        panels[1].set(title="tokens per step of the target", xlabel="training step", ylabel="tokens/step")
        panels[2].set(title=f"acceptance by depth, step {last}", xlabel="depth", ylabel="share of steps", ylim=(0, 1))
    for panel in panels:
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.grid(alpha=0.3)
        if panel.lines:
            panel.legend(fontsize=8)
    write_atomically(Path(folder) / CURVES, FigureCanvasAgg(figure).print_png)
    return Path(folder) / CURVES


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
