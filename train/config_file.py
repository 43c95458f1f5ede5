"""Reads YAML files with overrides. A file for training may list stages, such as LongSpec's short, long and instruction
data (Appendix E): `stages: {short: {data: {...}, train: {...}}, long: {...}}`.

A stage's config is the file's own sections, overridden by the stage's. Each stage trains in a folder of its own
(run_dir/1-short), ends with an exported draft, and starts from the weights of the previous stage. A file without stages
is a single run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Annotated, Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import Field
from yaml import YAMLError

from longdraft.models.schema import Str, validate
from longdraft.train.config import Config, config_from_dict

# Pairs of alternative fields in a section: setting one unsets the other.
INSTEAD = {"steps": "epochs", "epochs": "steps", "warmup_steps": "warmup_share", "warmup_share": "warmup_steps"}
StageName = Annotated[Str, Field(pattern=r"^[\w-]{1,64}$")]  # also a folder name
StageSections: Any = Annotated[dict[StageName, dict[str, Any]], Field(min_length=1)]


@dataclass(frozen=True)
class Stage:
    """A run with its config. `name`: None for a file without stages."""

    name: str | None
    config: Config

    @property
    def draft(self) -> Path:
        """The folder of the stage's exported draft."""
        return Path(self.config.train.run_dir) / "draft"


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The config of a YAML file of one run. Raises a ValueError of one line that names the field if the file or an
    override cannot be read or a value is not valid."""
    return _config([read_yaml(path), *map(read_override, overrides)])


def load_stages(
    path: str | Path, overrides: Sequence[str] = (), first: str | None = None, from_draft: str | None = None
) -> list[Stage]:
    """The stages of a YAML file, from `first` on.

    Args:
        overrides: `section.field=value` applies to every stage; `stages.NAME.section.field=value` applies to one stage
            and takes precedence. Of two overrides for the same field or for alternative fields, the later applies.
        first: name of the stage to start with. The stages before it must be trained, unless `from_draft` is given.
        from_draft: draft folder whose weights the first of these stages starts from.

    Raises ValueError as load_config does, and for an unknown stage.
    """
    raw, layers = read_yaml(path), [read_override(override) for override in overrides]
    shared = [layer for layer in layers if "stages" not in layer]
    of_stages = reduce(_merged, (layer for layer in layers if "stages" in layer), {})
    sections, own = (
        validate(StageSections, one.pop("stages"), "stages") if "stages" in one else {} for one in (raw, of_stages)
    )
    for name in (*own, first):
        if name not in (None, *sections):
            raise ValueError(f"stages.{name}: {path} has no such stage; it has {', '.join(sections) or 'none'}")
    first, stages = first or next(iter(sections), None), []
    for number, (name, section) in enumerate(sections.items() or [(None, {})], start=1):
        try:
            config = _config([raw, section, *shared, own.get(name, {})])
        except ValueError as error:
            raise ValueError(str(error) if name is None else f"stages.{name}: {error}") from error
        start = str(stages[-1].draft) if stages else config.draft.start_from
        if name == first and from_draft is not None:
            start = from_draft
        run_dir = config.train.run_dir if name is None else f"{config.train.run_dir}/{number}-{name}"
        stages.append(Stage(name, config.changed(draft={"start_from": start}, train={"run_dir": run_dir})))
        if (device := config.train.device) != stages[0].config.train.device:
            raise ValueError(f"stages.{name}: train.device: {device}, but all stages run on one; set it outside them")
    return stages[[stage.name for stage in stages].index(first) :]


def read_yaml(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The file's mapping with the overrides laid over it in order, unchecked and with `${...}` as written.

    Raises ValueError if the file or an override cannot be read.
    """
    path, root = Path(path), Path(__file__).resolve().parents[1]
    if not path.is_file() and path.parts[:1] == ("configs",):  # the included recipes, from any working directory
        path = root / path
    raw = _plain(lambda: OmegaConf.load(path), f"config: {path}")
    for override in overrides:
        raw = _merged(raw, read_override(override))
    return raw


def read_override(override: str) -> dict[str, Any]:
    """`section.field=value` as a nested mapping; raises ValueError for any other form."""
    if "=" not in override:
        raise ValueError(f"override: {override!r} is not of the form section.field=value, such as train.steps=100")
    return _plain(lambda: OmegaConf.from_dotlist([override]), f"override: {override!r}")


def resolve(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The values with every `${...}` resolved by OmegaConf: `${target.path}` stands for another field,
    `${oc.env:HOME}` for an environment variable, and `\\${` for a literal `${`.

    Raises ValueError if a reference is unknown or circular, or a value is `???` (still to be set).
    """
    try:
        return OmegaConf.to_container(OmegaConf.create(raw), resolve=True, throw_on_missing=True)  # pyright: ignore
    except (OmegaConfBaseException, RecursionError) as error:
        raise ValueError(f"{getattr(error, 'full_key', None) or 'config'}: {_one_line(error)}") from error


def _plain(read: Callable[[], DictConfig | ListConfig], what: str) -> dict[str, Any]:
    """What OmegaConf reads, as plain values."""
    try:
        raw = OmegaConf.to_container(read(), resolve=False)
    except (OmegaConfBaseException, YAMLError, RecursionError, UnicodeError, OSError) as error:
        raise ValueError(f"{what} cannot be read: {_one_line(error)}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{what} is a list; expected sections of fields, such as `train: {{steps: 100}}`")
    return raw  # pyright: ignore[reportReturnType]


def _merged(below: Any, above: Any) -> Any:
    """Merge mappings, where setting a field unsets its alternative (INSTEAD); replace anything else by `above`."""
    if not (isinstance(below, Mapping) and isinstance(above, Mapping)):
        return above
    below = {name: value for name, value in below.items() if above.get(INSTEAD.get(name)) is None}
    return below | {name: _merged(below.get(name), value) for name, value in above.items()}


def _config(layers: Sequence[Mapping[str, Any]]) -> Config:
    """The config of these layers, merged in order: later ones take precedence."""
    return config_from_dict(resolve(reduce(_merged, layers)))


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
