"""An exported draft as a repository of the hub: its model card with curves, its `custom_generate`, and the upload.

The card says only what the run recorded.
"""

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
# A record's names of decoding's results begin with these, and end with the length and temperature (evaluate.py).
TOKENS_PER_STEP, ACCEPTANCE = "decode_tokens_per_step/", "decode_acceptance/"
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

{target_entry}

## Training

![training and held-out loss, and decoding with the draft]({curves})

{decoding}`longdraft train config.yaml`, with {versions}

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
        target_entry="\n".join(f"- {key}: `{value}`" for key, value in info.target.items()),
        curves=CURVES,
        decoding=_decoding_table(_evaluations(records)),
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


def _evaluations(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [record for record in records if "decode_tokens_per_step" in record]


def _decoding_table(evaluations: Sequence[Mapping[str, Any]]) -> str:
    """Tokens/step and acceptance in the last evaluation; empty where there was none."""
    if not evaluations:
        return ""
    last, lines = evaluations[-1], []
    for name in _settings(last):
        context, temperature = name.removeprefix("ctx").split(".T")
        shares = [f"{share:.2f}" for key, share in last.items() if key.startswith(f"{ACCEPTANCE}{name}.depth")]
        tokens = last[TOKENS_PER_STEP + name]
        lines.append(f"| {int(context):,} | {temperature} | {tokens:.2f} | {', '.join(shares)} |\n")
    return (
        f"Decoding after step {last['step']}:\n\n"
        "| context | temperature | tokens a step | share of steps that accepted depth 1, 2, ... |\n"
        f"| --- | --- | --- | --- |\n{''.join(lines)}\n"
    )


def _settings(record: Mapping[str, Any]) -> list[str]:
    """The names of an evaluation's lengths and temperatures, as ctx512.T0."""
    return [key.removeprefix(TOKENS_PER_STEP) for key in record if key.startswith(TOKENS_PER_STEP)]


def draw_curves(folder: str | Path, records: Sequence[Mapping[str, Any]]) -> Path:
    """Draw folder/curves.png from the records of metrics.jsonl: the losses and, where the run decoded, tokens/step by
    context length and temperature, over training steps. The file is replaced atomically."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # takes a second to import
    from matplotlib.figure import Figure

    evaluations = _evaluations(records)
    curves = {"loss": {"loss": "training, as minimised", "heldout_loss": "held out, cross-entropy"}}
    if evaluations:
        names = _settings(evaluations[-1])
        curves["tokens per step of the target"] = {TOKENS_PER_STEP + name: name for name in names}
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
    return Path(folder) / CURVES
