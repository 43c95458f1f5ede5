"""Reads YAML files with overrides, of which a file for training may list stages, as LongSpec's short, long and
instruction data (Appendix E): `stages: {short: {data: {...}, train: {...}}, long: {...}}`.

A stage's config is the file's own sections with the stage's laid over them. Each stage trains in a folder of its own
(run_dir/1-short), ends in an exported draft, and begins with the weights of the stage before it. A file without stages
is a single run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import Field
from yaml import YAMLError

from longdraft.models.schema import Str, validate
from longdraft.train.config import EITHER, Config, config_from_dict

UNREADABLE = (OmegaConfBaseException, YAMLError, RecursionError, UnicodeDecodeError, OSError)
StageName = Annotated[Str, Field(pattern=r"^[\w-]{1,64}$")]  # also a folder's
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

    @property
    def is_exported(self) -> bool:
        return (self.draft / "config.json").is_file()  # written last


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The config of a YAML file of one run. Raises ValueError of one line, which names the field, for a file or an
    override that cannot be read and for a value that is not valid."""
    return _config([read_yaml(path), *map(read_override, overrides)])


def load_stages(
    path: str | Path, overrides: Sequence[str] = (), first: str | None = None, from_draft: str | None = None
) -> list[Stage]:
    """The stages of a YAML file, from `first` on.

    Args:
        overrides: `section.field=value` holds for every stage, `stages.NAME.section.field=value` for one. Of two that
            set the same field, or two fields of a pair in EITHER, the later holds.
        first: name of the stage to begin with. The stages before it must be trained, unless `from_draft` is given.
        from_draft: draft folder whose weights the first of these stages begins with.

    Raises ValueError as load_config does, for an unknown stage, and for `first` in a file without stages.
    """
    raw = read_yaml(path)
    listed = raw.pop("stages", None)
    sections = {} if listed is None else validate(StageSections, listed, "stages")
    layers: list[tuple[str | None, dict[str, Any]]] = []  # each with the stage that it is for, None for all
    for layer in map(read_override, overrides):
        own = validate(StageSections, layer["stages"], "stages") if "stages" in layer else {None: layer}
        layers += own.items()
    for name in (*(stage for stage, _ in layers), first):
        if name not in (None, *sections):
            near = get_close_matches(name, sections, n=1, cutoff=0.0)
            hint = f"did you mean {near[0]}? (known: {', '.join(sections)})" if near else f"{path} lists no stages"
            raise ValueError(f"stages.{name}: unknown stage; {hint}")
    first, start, stages = first or next(iter(sections), None), None, []
    for number, (name, section) in enumerate(sections.items() or [(None, {})], start=1):
        try:
            config = _config([raw, section, *(layer for stage, layer in layers if stage in (None, name))])
        except ValueError as error:
            raise ValueError(str(error) if name is None else f"stages.{name}: {error}") from error
        if name == first and from_draft is not None:
            start = from_draft
        changes: dict[str, Any] = {"draft": {"start_from": start or config.draft.start_from}}
        if name is not None:
            changes["train"] = {"run_dir": f"{config.train.run_dir}/{number}-{name}"}
        stages.append(Stage(name, config.changed(**changes)))
        start = str(stages[-1].draft)
        if (device := config.train.device) != (settled := stages[0].config.train.device):
            raise ValueError(
                f"stages.{name}: train.device: {device}, but stages run on one, {settled}; set it beside them"
            )
    return stages[[stage.name for stage in stages].index(first) :]


def read_yaml(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The file's mapping with the overrides laid over it in order, unchecked and with `${...}` as written.

    Raises ValueError where the file or an override cannot be read.
    """
    path, root = Path(path), Path(__file__).resolve().parents[1]
    if not path.is_file() and path.parts[:1] == ("configs",):  # the recipes that come along, from any folder
        path = root / path
    if not path.is_file():
        raise ValueError(f"config: no file {path}; give one of the YAML files in {root / 'configs'}")
    try:
        loaded = OmegaConf.load(path)
    except UNREADABLE as error:
        raise ValueError(f"config: {path} cannot be read: {_one_line(error)}") from error
    if not isinstance(loaded, DictConfig):
        raise ValueError(f"config: {path} holds a list, expected sections of fields, as `train: {{steps: 100}}`")
    raw = _plain(loaded)
    for override in overrides:
        raw = _merged(raw, read_override(override))
    return raw


def read_override(override: str) -> dict[str, Any]:
    """`section.field=value` as a nested mapping; raises ValueError for any other form."""
    name = override.partition("=")[0]
    if "=" not in override or override.startswith("-") or not all(name.split(".")):
        raise ValueError(f"override: {override!r} has not the form section.field=value, as train.steps=100")
    try:
        return _plain(OmegaConf.from_dotlist([override]))
    except UNREADABLE as error:
        raise ValueError(f"override: {override!r} cannot be read: {_one_line(error)}") from error


def resolve(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The values with every `${...}` resolved by OmegaConf: `${target.path}` stands for another field,
    `${oc.env:HOME}` for an environment variable.

    Raises ValueError where a reference is unknown or circular, or a value is `???`, still to be given.
    """
    try:
        return OmegaConf.to_container(OmegaConf.create(raw), resolve=True, throw_on_missing=True)  # pyright: ignore
    except (OmegaConfBaseException, RecursionError) as error:
        raise ValueError(
            f"{getattr(error, 'full_key', None) or 'config'}: {_one_line(error)}; give a value, a field as "
            "${section.field}, a variable of the environment as ${oc.env:NAME}, or \\${ for the characters themselves"
        ) from error


def _plain(raw: DictConfig) -> dict[str, Any]:
    return OmegaConf.to_container(raw, resolve=False)  # pyright: ignore[reportReturnType]


def _merged(below: Any, above: Any) -> Any:
    """Mappings are merged; anything else is replaced."""
    if not (isinstance(below, Mapping) and isinstance(above, Mapping)):
        return above
    return {**below, **{name: _merged(below.get(name), value) for name, value in above.items()}}


def _config(layers: Sequence[Mapping[str, Any]]) -> Config:
    """Lay each layer over those before it. One that sets a field of a pair in EITHER unsets the other field."""
    raw: dict[str, Any] = {}
    for layer in layers:
        for section, pair in EITHER.items():
            fields = layer.get(section)
            if isinstance(fields, Mapping) and sum(fields.get(name) is not None for name in pair) == 1:
                raw = _merged(raw, {section: dict.fromkeys(pair)})
        raw = _merged(raw, layer)
    return config_from_dict(resolve(raw))


def _one_line(error: BaseException) -> str:
    """The error's message in one line, without the lines that OmegaConf appends about the key."""
    return " ".join(str(error).split("\n    full_key:")[0].split()) or type(error).__name__
