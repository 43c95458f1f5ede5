"""An exported draft as a repository of the hub: the model card, transformers' `custom_generate`, and the upload.

The card says only what the run recorded. Not here: the draft's own files (export.py), the decoding behind
`custom_generate` (infer/transformers_api.py).
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
from longdraft.train.plots import DECODING, acceptance, draw_decoding, tokens_per_step
from longdraft.train.tracking import read_metrics

CARD, GENERATE = "README.md", "custom_generate/generate.py"
CURVE_ROWS = 20
# OSError, and the error of the HTTP library that this version of the client uses.
HUB_ERRORS: tuple[type[Exception], ...] = HfHubHTTPError.__bases__  # type: ignore[assignment]
# transformers' `custom_generate` reads this file from a repository and calls its function `generate`.
GENERATE_TEXT = '''"""Decoding with this draft, for `model.generate(custom_generate=..., trust_remote_code=True)`."""

from longdraft.infer.transformers_api import generate_with_draft

DRAFT = {draft!r}


def generate(model, inputs=None, **kwargs):
    return generate_with_draft(DRAFT, model, inputs, **kwargs)
'''


def check_name(name: str) -> None:
    """Raises ValueError for an invalid name of a repository, before anything is written."""
    if HUB_NAME.fullmatch(name) is None:
        raise ValueError(f"push: {name!r} is not the name of a repository; give OWNER/NAME")
    validate_repo_id(name)


def write_card(run_dir: str | Path, folder: Path, config: Config, step: int, name: str | None = None) -> None:
    """Write README.md, custom_generate/generate.py and, where decoding was measured, its figure beside the draft.

    Args:
        folder: the draft's, exported from this step of a run with this config.
        name: the repository that it will become. None: generate.py names the folder where it lies.
    """
    info = read_info(folder)
    records = [record for record in read_metrics(run_dir) if record["step"] <= step]
    decoded = [record for record in records if "decode_tokens_per_step" in record]
    if decoded:
        draw_decoding(folder, records)
    else:
        (folder / DECODING).unlink(missing_ok=True)
    text = f"---\n{card_data(info, config).to_yaml()}\n---\n\n{_body(info, config, step, records, name)}"
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
            allow_patterns=[CONFIG, WEIGHTS, CARD, DECODING, GENERATE],
            commit_message="Draft exported by longdraft",
        )
    except HUB_ERRORS as error:
        raise ValueError(
            f"push: {folder} could not be uploaded to {name}: {error}. The folder is whole: log in with `hf auth "
            "login` as a user who may write there, and push again"
        ) from error
    return str(address)


def card_data(info: DraftInfo, config: Config) -> ModelCardData:
    """The card's metadata: base_model where the target has a hub name, and the licence where that model's card, or one
    in the target's folder, states it."""
    target, path = info.target["name"], config.target.path
    base = target if HUB_NAME.fullmatch(target) and target == path else None
    tags = ["longdraft", "speculative-decoding", "draft-model", config.draft.method, "long-context", "custom_generate"]
    return ModelCardData(
        base_model=base, library_name="longdraft", pipeline_tag="text-generation", tags=tags, **_licence(base, path)
    )


def _licence(base: str | None, path: str) -> dict[str, Any]:
    local_card = Path(path) / CARD
    if base is None and not local_card.is_file():
        return {}
    try:
        data = ModelCard.load(base or local_card).data.to_dict()
    except (OSError, ValueError, YAMLError):  # no network, no card, or a card without readable metadata
        return {}
    return {key: data[key] for key in ("license", "license_name", "license_link") if data.get(key)}


def _body(info: DraftInfo, config: Config, step: int, records: Sequence[Mapping[str, Any]], name: str | None) -> str:
    target, method, where = info.target, config.draft.method, name or "FOLDER"
    title = name.split("/")[1] if name else f"{method} draft for {target['name']}"
    parts = [
        f"# {title}",
        f"A `{method}` draft for speculative decoding with `{target['name']}` by longdraft: step {step}, trained on "
        f"rows of {info.train_length:,} tokens. Decoding with it gives the target's own tokens.",
        f"```bash\nlongdraft generate --draft {where} --target {config.target.path} --prompt TEXT\n```",
        f"```python\nmodel.generate(**inputs, custom_generate={where!r}, trust_remote_code=True)  # transformers\n```",
        "## Target",
        _table(("", ""), [(key, f"`{value}`") for key, value in target.items()]),
        *_curves(records),
        *_decoding(records),
        *_rates(info),
        "## How it was trained",
        "`longdraft train config.yaml`, with " + ", ".join(f"{key} {value}" for key, value in info.versions.items()),
        f"```yaml\n{to_yaml(config)}```",
    ]
    return "\n\n".join(parts) + "\n"


def _curves(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Tables of the training and the held-out loss by step, at most CURVE_ROWS rows each."""
    parts = []
    for key, title in (("loss", "Training loss, as minimised"), ("heldout_loss", "Held-out cross-entropy of the text")):
        points = [(record["step"], f"{record[key]:.4f}") for record in records if isinstance(record.get(key), float)]
        if points:
            stride = -(-len(points) // CURVE_ROWS)
            shown = points[::-1][::stride][::-1]  # always includes the last one
            parts += [f"## {title}", _table(("step", "loss"), shown)]
    return parts


def _decoding(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Tokens a step and acceptance by context and depth, in the last evaluation."""
    decoded = [record for record in records if "decode_tokens_per_step" in record]
    if not decoded:
        return []
    last = decoded[-1]
    depths = acceptance(last)
    rows = [
        (f"{context:,}", f"{temperature:g}", f"{points[-1][1]:.2f}", _shares(depths.get((context, temperature), [])))
        for (context, temperature), points in tokens_per_step([last]).items()
    ]
    header = ("context", "temperature", "tokens a step", "share of steps that accepted depth 1, 2, ...")
    title = f"## Acceptance by context, step {last['step']}"
    return [title, _table(header, rows), f"![tokens a step, and acceptance by depth]({DECODING})"]


def _shares(points: Sequence[tuple[int, float]]) -> str:
    return ", ".join(f"{share:.2f}" for _, share in sorted(points))


def _rates(info: DraftInfo) -> list[str]:
    """How often the draft's candidates were right at held-out positions, by head or level."""
    parts = []
    for key, what in (("choice_rates", "the target's own choice"), ("rank_rates", "the text's token")):
        if rates := info.tree.get(key):
            rows = [(i, ", ".join(f"{rate:.3f}" for rate in level)) for i, level in enumerate(rates, start=1)]
            parts += [f"## Held-out rates of {what}", _table(("head or level", "by rank, first to last"), rows)]
    return parts


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
