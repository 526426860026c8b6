"""Configs from YAML files and options, under this project's names or other libraries'; and back.

Later files override earlier ones, and options override files.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from course_lib.config import trainer_names
from course_lib.config.run import Config, build, option, options
from course_lib.errors import ConfigError, near, nearest

ALIASES = trainer_names.ALIASES

# Fields of earlier versions, and the values that configs which they saved have where nobody asked for another.
GONE: Mapping[str, Any] = {
    "track_system": True,
    "diloco_fragments": 1,
    "diloco_overlap": 0,
    "diloco_keep": 0.5,
    "quantization_block": 256,
}

# Options of the Hugging Face Trainer whose values mean something else here.
TRANSLATED = ("bf16", "fp16", "eval_strategy", "evaluation_strategy", "save_strategy", *trainer_names.NAMES)


class _UsualSteps:
    """Meaning of `eval_strategy steps` and `save_strategy steps` where no number of steps is given beside them."""

    def __init__(self, field: str):
        self.field = field

    def among(self, leaves: Mapping[str, Any]) -> Any:
        """The number of steps, as the Hugging Face Trainer has it (TrainingArguments.eval_steps and save_steps)."""
        usual = option("logging_steps").default
        return leaves.get("logging_steps", usual) or usual if self.field == "eval_steps" else 500


def canonical(name: str) -> str:
    """This project's name of an option: `-` is read as `_`, and aliases are followed.

    Raises:
        ConfigError: no option has that name; the nearest are given.
    """
    plain = name.replace("-", "_")
    plain = ALIASES.get(plain, plain)
    if all(o.name != plain for o in options()):
        raise ConfigError(f"unknown option `{name}`", nearest(plain, known_names()))
    return plain


def known_names() -> list[str]:
    """Every name that an option answers to."""
    return [*(o.name for o in options()), *ALIASES, *TRANSLATED]


def translate(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves by canonical name from a flat mapping that may use other libraries' names.

    Raises:
        ConfigError: an unknown name, a value that its name does not have, or two that contradict each other.
    """
    leaves: dict[str, Any] = {}
    named = {name.replace("-", "_"): value for name, value in raw.items()}
    trainer_names.check_warmup(named)
    _check_precisions(raw, named)
    for key, value in raw.items():
        name = key.replace("-", "_")
        if name in ("bf16", "fp16"):
            leaves |= {"mixed_precision": name} if _is_true(value) else {}
        elif name in trainer_names.NAMES:
            leaves |= _of_the_trainer(name, value, named)
        elif name in TRANSLATED:
            _set_interval(leaves, raw, key)
        elif name == "resume_from_checkpoint" and str(value).lower() in ("true", "false"):
            leaves[name] = "latest" if _is_true(value) else None
        elif name == "warmup_steps" and _is_share(value):
            leaves["warmup_ratio"] = value
        else:
            field = canonical(key)
            leaves[field] = trainer_names.own_value(field, value, named)
    return leaves


def _check_precisions(raw: Mapping[str, Any], named: Mapping[str, Any]) -> None:
    """Refuse ``bf16``, ``fp16`` and ``mixed_precision`` that contradict each other."""
    precisions = [f"{name} {value}" for name, value in raw.items() if name in ("bf16", "fp16") and _is_true(value)]
    given = str(named.get("mixed_precision", "auto"))
    if precisions and given not in ("auto", precisions[0].partition(" ")[0]):
        precisions.append(f"mixed_precision {given}")
    if precisions[1:]:
        raise ConfigError(f"{' and '.join(precisions)} contradict each other", "keep one of them")


def _of_the_trainer(name: str, value: Any, named: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves for one of the Hugging Face Trainer's names, beside which our own may only say the same."""
    leaves = trainer_names.translate(name, value, named)
    for field, own in leaves.items():
        given = str(named.get(field, own))
        if name != "hub_model_id" and field != name and given.lower() != str(own).lower():
            raise ConfigError(f"{name} {value} and {field} {given} contradict each other", "keep one of them")
    return leaves


def _set_interval(leaves: dict[str, Any], raw: Mapping[str, Any], key: str) -> None:
    """Set ``save_steps`` or ``eval_steps`` by the Trainer's ``save_strategy`` or its like."""
    name, value = key.replace("-", "_"), raw[key]
    steps = f"{'save' if name == 'save_strategy' else 'eval'}_steps"
    if str(value) not in ("no", "epoch", "steps"):
        raise ConfigError(f"`{key}` cannot be {value!r}", "choose from `no`, `epoch`, `steps`")
    if str(value) == "steps":
        leaves.setdefault(steps, _UsualSteps(steps))
    elif str(raw.get(steps, "none")).lower() not in ("none", "null"):
        raise ConfigError(f"{name} {value} and {steps} {raw[steps]} contradict each other", "keep one of them")
    else:
        leaves[steps] = 0 if str(value) == "no" else None


def _is_true(value: Any) -> bool:
    return str(value).lower() == "true"


def _is_share(value: Any) -> bool:
    """Whether a number of warm-up steps is a share of all steps, as the Hugging Face Trainer takes it."""
    try:
        return 0 < float(value) < 1
    except (TypeError, ValueError):
        return False


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Leaf fields in a YAML file, sectioned or flat.

    Raises:
        ConfigError: no such file, not UTF-8, not YAML, not a mapping, or an unknown key.
    """
    import yaml

    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        tree = yaml.safe_load(text) or {}
        keys = list(_keys(yaml.compose(text, yaml.SafeLoader))) if isinstance(tree, dict) else []
    except FileNotFoundError:
        there = [str(file) for folder in (path.parent, Path("configs")) for file in sorted(folder.glob("[!.]*.y*ml"))]
        named = near(path.name, (Path(file).name for file in there))
        hint = nearest(named[0], [file for file in there if Path(file).name == named[0]], 1) if named else ""
        raise ConfigError(f"no config file {path}", hint or "name a YAML file that is there, or leave it out") from None
    except OSError as error:
        raise ConfigError(f"cannot read config {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 (byte {error.start})", "save it as UTF-8") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds a {type(tree).__name__}", "write `field: value` lines")
    if twice := next((key for key in keys if keys.count(key) > 1), None):
        raise ConfigError(f"{path}: `{twice}` stands there twice", "keep one of them")
    sections: dict[str, Any] = {s.name: s.type for s in dataclasses.fields(Config)}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            value = {leaf: inner for leaf, inner in value.items() if leaf not in GONE or inner != GONE[leaf]}
        # `model:` is a section and a leaf; a mapping makes it the section.
        if isinstance(value, Mapping) and key in sections:
            for leaf, inner in value.items():
                _known_key(f"{key}.{leaf}", str(leaf), [f.name for f in dataclasses.fields(sections[key])], path)
                flat[str(leaf)] = inner
        elif value is None and key in sections and key != "model":
            continue  # an empty section
        else:
            _known_key(str(key), str(key), [*sections, *(o.name for o in options())], path)
            flat[str(key)] = value
    return translate(flat)


def _keys(node: Any) -> Iterator[str]:
    """The keys of a YAML file that set something; `model` may be a section with a leaf of that name."""
    for key, value in node.value if node is not None and isinstance(node.value, list) else ():
        if isinstance(value.value, list) and value.tag.endswith(":map"):
            yield from (inner.value for inner, _ in value.value)
        else:
            yield str(key.value)


def read_saved(path: Path) -> dict[str, Any]:
    """Leaf fields of a config that :func:`to_yaml` wrote, in this version or another: those that are known here."""
    import yaml

    known = {field.name for field in options()}
    sections = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {name: value for leaves in sections.values() for name, value in leaves.items() if name in known}


def _known_key(shown: str, key: str, known: Iterable[str], path: Path) -> None:
    """Refuse a YAML key that is no field, alias or translated option."""
    name = key.replace("-", "_")
    names = list(known)
    if ALIASES.get(name, name) not in {o.name for o in options()} and name not in TRANSLATED:
        raise ConfigError(f"{path}: unknown key `{shown}`", nearest(key, [*names, *ALIASES]))
    if "." in shown and ALIASES.get(name, name) not in names and name not in TRANSLATED:
        raise ConfigError(
            f"{path}: `{key}` is not in section `{shown.split('.')[0]}`",
            f"put it under `{option(canonical(key)).section}` or at the top",
        )


def load(paths: Iterable[str | Path] = (), overrides: Mapping[str, Any] | None = None) -> Config:
    """A config from layered YAML files, then overrides by leaf name (or alias).

    Raises:
        ConfigError: see :func:`read_yaml` and :func:`build`.
    """
    return build(*given(paths, overrides))


def given(
    paths: Iterable[str | Path] = (),
    overrides: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], dict[str, str]]:
    """The leaves that files and overrides give, as they are written, and which file or option gives each.

    Raises:
        ConfigError: see :func:`read_yaml`.
    """
    leaves: dict[str, Any] = {}
    where: dict[str, str] = {}
    for path in paths:
        read = read_yaml(path)
        _lay_over(leaves, read)
        where |= dict.fromkeys(read, str(path))
    last = translate(overrides or {})
    _lay_over(leaves, last)
    where |= {name: f"option --{name}" for name in last}
    return {
        name: value.among(leaves) if isinstance(value, _UsualSteps) else value for name, value in leaves.items()
    }, where


def _lay_over(leaves: dict[str, Any], later: Mapping[str, Any]) -> None:
    """Let later leaves override earlier ones; a number of steps that stands there is kept where none is given."""
    for name, value in later.items():
        if not (isinstance(value, _UsualSteps) and leaves.get(name)):
            leaves[name] = value


def to_yaml(config: Config) -> str:
    """The whole config as sectioned YAML that :func:`load` reads back to an equal one."""
    import yaml

    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False, allow_unicode=True)
