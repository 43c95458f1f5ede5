"""The exported form of a draft, written by training and read by the runtime: config.json and model.safetensors.

Nothing in it is pickled. Not here: what a method's config means (models/drafts/), where the weights come from
(train/export.py).
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from longdraft.models.drafts.tokenswift import TokenSwift, TokenSwiftConfig
from longdraft.models.hf import Target

FORMAT_VERSION = 1
CONFIG, WEIGHTS = "config.json", "model.safetensors"
DRAFTS = {"tokenswift": (TokenSwiftConfig, TokenSwift)}


@dataclass(frozen=True)
class DraftInfo:
    """What config.json says beside the network's shape.

    `target`: name, config_sha256, tokenizer_sha256. `train_length`: tokens of a training row. `tree`, the drafter's
    default: {"levels": ranks a level, "rank_rates": [level][rank], share of held-out positions whose text had that
    rank, "choice_rates": the same of the target's own choices, which is what acceptance depends on}. `noise`: largest
    noise shift in training, None where the method has none. `versions` and `train_config`: how it was made.
    """

    target: dict[str, str]
    train_length: int
    tree: dict[str, Any]
    versions: dict[str, str]
    train_config: dict[str, Any]
    noise: int | None = None


def target_entry(target: Target) -> dict[str, str]:
    """How a draft folder names the target that it belongs to."""
    return {
        "name": target.name,
        "config_sha256": target.fingerprint["config"],
        "tokenizer_sha256": target.fingerprint["tokenizer"],
    }


def save_draft(folder: str | Path, draft: TokenSwift, info: DraftInfo) -> None:
    """Writes both files, each whole or not at all; config.json last, so that a folder that has one is complete."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).unlink(missing_ok=True)
    method = next(name for name, (_, network) in DRAFTS.items() if isinstance(draft, network))
    content = {"format_version": FORMAT_VERSION, "method": method, "draft": asdict(draft.config)} | asdict(info)
    weights = {name: p.detach().cpu().contiguous() for name, p in draft.state_dict().items()}
    save_file(weights, folder / f"{WEIGHTS}.tmp", metadata={"format": "pt"})
    (folder / f"{CONFIG}.tmp").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    for name in (WEIGHTS, CONFIG):
        temporary = folder / f"{name}.tmp"
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        temporary.rename(folder / name)


def read_info(folder: str | Path) -> DraftInfo:
    """config.json without the weights; raises ValueError as load_draft."""
    content = _read(Path(folder))
    return DraftInfo(**{name: content[name] for name in DraftInfo.__dataclass_fields__})


def load_draft(folder: str | Path, target: Target | None = None) -> TokenSwift:
    """The frozen network of a draft folder.

    Args:
        target: what it will draft for; the draft comes in its dtype and on its device. None: as stored, on the CPU.

    Raises:
        ValueError: no draft folder, another format, an unknown method, another target, or weights that do not fit.
    """
    folder = Path(folder)
    content = _read(folder)
    if target is not None:
        _check_target(folder, content["target"], target_entry(target))
    config_type, network = DRAFTS[content["method"]]
    draft = network(config_type(**content["draft"]))
    weights = load_file(folder / WEIGHTS)
    expected = {name: p.shape for name, p in draft.state_dict().items()}
    if expected != {name: p.shape for name, p in weights.items()}:
        wrong = sorted(n for n in expected.keys() | weights if n not in weights or expected.get(n) != weights[n].shape)
        raise ValueError(f"{folder / WEIGHTS}: missing, unknown or of another shape: {', '.join(wrong)}; export again")
    draft.load_state_dict(weights, assign=True)
    if target is not None:
        place = target.model.lm_head.weight
        draft = draft.to(place.device, place.dtype)
    return draft.requires_grad_(False).eval()


def _read(folder: Path) -> dict[str, Any]:
    if not (folder / CONFIG).is_file():
        raise ValueError(f"draft: {folder} holds no {CONFIG}; give a folder that `longdraft export` wrote")
    content = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    version, method = content.get("format_version"), content.get("method")
    if version != FORMAT_VERSION:
        raise ValueError(
            f"draft: {folder} has format_version {version}, this version reads {FORMAT_VERSION}; export again"
        )
    if method not in DRAFTS:
        raise ValueError(f"draft: {folder} holds the method {method!r}; known: {', '.join(DRAFTS)}")
    return content


def _check_target(folder: Path, own: dict[str, str], given: dict[str, str]) -> None:
    """Names may differ (a local copy of a hub model), fingerprints may not."""
    different = [key for key in ("config_sha256", "tokenizer_sha256") if own[key] != given[key]]
    if different:

        def show(entry: dict[str, str], keys: Sequence[str] = different) -> str:
            return f"{entry['name']} ({', '.join(f'{key} {entry[key]}' for key in keys)})"

        raise ValueError(
            f"draft: {folder} was trained for {show(own)} and cannot draft for {show(given)}; load its own target"
        )
