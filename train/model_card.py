"""Makes a hub repository of an exported draft: its model card with curves, and its `custom_generate`.

The card states only what the run recorded.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from longdraft.models.draft_folder import HUB_NAME, read_info
from longdraft.models.files import write_atomically, write_text
from longdraft.train.config import Config, to_yaml
from longdraft.train.tracking import read_metrics

CARD, CURVES, GENERATE = "README.md", "curves.png", "custom_generate/generate.py"
# Prefix of the tokens/step metrics, which is followed by the prompts' length and the temperature (evaluate.py).
TOKENS_PER_STEP = "decode_tokens_per_step/"
# transformers' `custom_generate` reads this file from a repository and calls its function `generate`.
GENERATE_TEXT = '''"""Decoding with this draft, for `model.generate(custom_generate=..., trust_remote_code=True)`."""

from longdraft.infer.transformers_api import generate_with_draft

DRAFT = {draft!r}


def generate(model, inputs=None, **kwargs):
    return generate_with_draft(DRAFT, model, inputs, **kwargs)
'''
CARD_TEXT = """---
library_name: longdraft
pipeline_tag: text-generation
tags: [longdraft, speculative-decoding, draft-model, {method}, long-context, custom_generate]
{base}---

# {method} draft for {target}

A `{method}` draft for speculative decoding with `{target}` by longdraft: step {step}, trained on rows of {length:,}
tokens. Decoding with it gives the target's own tokens.

```bash
longdraft generate --draft {where} --target {path} --prompt TEXT
```

```python
model.generate(**inputs, custom_generate={where!r}, trust_remote_code=True)  # transformers
```

![training and held-out loss, and decoding with the draft]({curves})

{decoding}`longdraft train config.yaml`, with {versions}

```yaml
{config}```
"""


def write_card(run_dir: str | Path, folder: Path, config: Config, step: int, name: str) -> None:
    """Write README.md, its figure and custom_generate/generate.py beside the draft.

    Args:
        folder: the draft's, exported from this step of a run with this config.
        name: the hub repository that these files refer to; "": they refer to the folder.
    """
    info, where, path = read_info(folder), name or str(folder.resolve()), config.target.path
    is_on_hub = HUB_NAME.fullmatch(path) and info.target["name"] == path
    records = [record for record in read_metrics(run_dir) if record["step"] <= step]
    draw_curves(folder, records)
    text = CARD_TEXT.format(
        base=f"base_model: {path}\n" if is_on_hub else "",
        method=config.draft.method,
        target=info.target["name"],
        step=step,
        length=info.train_length,
        where=where,
        path=path,
        curves=CURVES,
        decoding=_decoding_table(records),
        versions=", ".join(f"{key} {value}" for key, value in info.versions.items()),
        config=to_yaml(config),
    )
    (folder / GENERATE).parent.mkdir(exist_ok=True)
    for path, content in {CARD: text, GENERATE: GENERATE_TEXT.format(draft=where)}.items():
        write_text(folder / path, content)


def _decoding_table(records: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table with the last decoding's tokens/step; empty if there was none."""
    decoded = [(record, settings) for record in records if (settings := _settings(record))]
    if not decoded:
        return ""
    last, settings = decoded[-1]
    lines = [f"| context and temperature | tokens a step, after step {last['step']} |\n| --- | --- |\n"]
    lines += [f"| {name} | {last[TOKENS_PER_STEP + name]:.2f} |\n" for name in settings]
    return "".join(lines) + "\n"


def _settings(record: Mapping[str, Any]) -> list[str]:
    """The names of a decoding's lengths and temperatures, such as ctx512.T0."""
    return [key.removeprefix(TOKENS_PER_STEP) for key in record if key.startswith(TOKENS_PER_STEP)]


def draw_curves(folder: str | Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Draw folder/curves.png from the records of metrics.jsonl: the losses and, if the run decoded, tokens/step by
    context length and temperature, over training steps. The file is replaced atomically."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # takes a second to import
    from matplotlib.figure import Figure

    curves = {"loss": {"loss": "training, as minimised", "heldout_loss": "held out, cross-entropy"}}
    if settings := dict.fromkeys(name for record in records for name in _settings(record)):
        curves["tokens per step of the target"] = {TOKENS_PER_STEP + name: name for name in settings}
    figure = Figure(figsize=(6 * len(curves), 4.2), layout="constrained")
    panels: list[Any] = list(figure.subplots(1, len(curves), squeeze=False)[0])
    for panel, (title, labels) in zip(panels, curves.items(), strict=True):
        for key, label in labels.items():
            points = [(record["step"], record[key]) for record in records if record.get(key) is not None]
            if points:
                panel.plot(*zip(*points, strict=True), marker=".", label=label)
        panel.set(title=title, xlabel="training step")
        panel.grid(alpha=0.3)
        if panel.lines:
            panel.legend(fontsize=8)
    write_atomically(Path(folder) / CURVES, FigureCanvasAgg(figure).print_png)
