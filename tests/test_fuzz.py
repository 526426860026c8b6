"""Whatever comes in, by file or by option, ends well or with one line: never a traceback, never a half-written output.

``FUZZ_EXAMPLES=1000`` looks further; the examples are the same in each run.
"""

import contextlib
import dataclasses
import io
import json
import os
import shlex
import shutil
import string
from collections import Counter
from pathlib import Path
from unittest import mock

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from course_lib import cli
from course_lib.commands.options import config_from
from course_lib.config import Config, options
from course_lib.config import files as config_files
from course_lib.data import DataConnector
from course_lib.errors import CheckpointError, CourseError
from course_lib.training.checkpoints import checkpoint, manifest, resuming
from course_lib.training.run import build_trainer
from course_lib.writing import write_text

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))


def fuzz(examples):
    """So many examples, the same ones each time."""
    return settings(
        max_examples=EXAMPLES or examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def one_line(error):
    assert "\n" not in str(error) and len(str(error)) < 2000 and error.exit_code in (1, 2), error


WORDS = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=12)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-2, 40),
    st.floats(),
    WORDS,
    st.dates(),
    st.sampled_from(["1e400", "nan", "-0", "auto", "none", "{model}", "{", "{0}", "{a.x}", "~", "٣"]),
)
TREES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(SCALARS, inner, max_size=3), max_leaves=5
)


# --- config files ---

NAMES = [o.name for o in options()]
SECTIONS = [f.name for f in dataclasses.fields(Config)]
FIT = {o.name: [o.default, *o.choices] for o in options()}


@st.composite
def configs(draw):
    """YAML that is nearly right: known names, in their sections or at the top, with values of all kinds."""

    def value(name):
        return draw(st.sampled_from(FIT[name])) if name in FIT and draw(st.integers(0, 7)) else draw(TREES)

    others = SECTIONS + sorted(config_files.ALIASES) + list(config_files.TRANSLATED)
    keys = st.sampled_from(NAMES) | st.sampled_from(NAMES) | st.sampled_from(others) | WORDS
    tree = {}
    for name in draw(st.lists(keys, max_size=3)):
        own = next((o.section for o in options() if o.name == name), None)
        if own and draw(st.booleans()):
            tree.setdefault(own, {})
            if isinstance(tree[own], dict):
                tree[own][name] = value(name)
        else:
            tree[name] = value(name)
    return yaml.safe_dump(tree, allow_unicode=True).encode()


def test_config_files(tmp_path):
    path, ends = tmp_path / "fuzzed.yaml", Counter()

    @fuzz(100)
    @given(st.one_of(configs(), st.binary(max_size=40), WORDS.map(str.encode)))
    @example(b"? [1]\n: 2\n")
    @example(b"1: 2\nnull: 3\n")
    @example(b"run: {1: 2}\n")
    @example(b"a: !!python/object:os.system {}\n")
    @example(b"seed: 1e400\n")
    @example(b"a: &a [*a]\n")
    def check(content):
        path.write_bytes(content)
        try:
            config = config_files.load([path])
            assert isinstance(config.output_dir, Path)
        except CourseError as error:
            one_line(error)
            ends["refused"] += 1
            return
        write_text(path, config_files.to_yaml(config))
        assert config_files.load([path]) == config, "what it writes, it reads"
        ends["read"] += 1

    check()
    assert ends["refused"] > 20 and ends["read"] > 5 and [each.name for each in tmp_path.iterdir()] == [path.name]


# --- the command line ---

VALUES = WORDS | st.sampled_from(
    [*shlex.split("0 1 2 3 -1 2.5 nan inf 1e400 1/0 true None a=b = -- - [ {} auto 1:4 ٣"), "", "\0", "9" * 400]
)


def called(arguments):
    """Exit code and stderr of a command in this process; an exception is a traceback, and fails."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main(arguments)
        except SystemExit as ended:  # --help, --version
            code = ended.code or 0
    assert code in (0, 1, 2), (code, err.getvalue())
    assert "Traceback" not in err.getvalue()
    if code:
        said = [line for line in err.getvalue().splitlines() if line.startswith("course: ")]
        assert len(said) == 1 or (not err.getvalue() and code == 2), err.getvalue()
    return code


def options_of(command):
    """The option names that a command takes."""
    seen = []
    with (
        mock.patch.object(cli.Parser, "parse_known_args", lambda parser, _: seen.append(parser) or ({}, [])),
        contextlib.suppress(SystemExit, AttributeError),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        cli.parse([command])
    own = seen[0]._subparsers._group_actions[0].choices[command]
    return [name for action in own._actions for name in action.option_strings]


KNOWN = {command.NAME: options_of(command.NAME) for command in cli.COMMANDS}


@st.composite
def lines(draw):
    command = draw(st.sampled_from(sorted(KNOWN)))
    names = st.sampled_from(KNOWN[command]) | st.text(string.ascii_letters + "-_=", max_size=8).map("--".__add__)
    tokens = []
    for _ in range(draw(st.integers(0, 4))):
        name, value = draw(names), draw(VALUES)
        tokens += draw(st.sampled_from([[name, value], [name], [f"{name}={value}"], [value]]))
    return [draw(st.sampled_from([command] * 20 + ["", command[:-1]])), *tokens]


def test_command_lines():
    """Every command's options are read and its config is built; what the command then does is left out."""
    ends = Counter()

    def stop_there(args):
        if hasattr(args, "config"):
            config_from(args)
        return 0

    @fuzz(100)
    @given(lines())
    def check(arguments):
        ends[called(arguments)] += 1

    with contextlib.ExitStack() as patched:
        for command in cli.COMMANDS:
            patched.enter_context(mock.patch.object(command, "run", stop_there))
        check()
    assert ends[0] > 10 and ends[2] > 20 and not ends[1]


NUMBERS = st.sampled_from([*shlex.split("0 1 2 3 4 7 8 16 -1 2.5 1/3 1/0 nan inf 1e9 x"), ""])


def given_options(**values):
    """Some of the options, each with a value that may or may not do."""
    pairs = st.lists(st.sampled_from(sorted(values)), unique=True, max_size=5).flatmap(
        lambda names: st.tuples(*(st.tuples(st.just(f"--{name}"), values[name]) for name in names))
    )
    return pairs.map(lambda chosen: [text for pair in chosen for text in pair])


def test_schedules(tmp_path):
    ends = Counter()

    @fuzz(40)
    @given(
        given_options(
            **dict.fromkeys(shlex.split("ranks microbatches virtual memory_limit bytes bytes_w"), NUMBERS),
            **dict.fromkeys(shlex.split("cost_f cost_b cost_w cost_comm cost_overlap"), NUMBERS),
            schedule=st.sampled_from(["gpipe", "1f1b", "zbv", "zb_h1", "interleaved", "dualpipev", "x"]),
        ),
        st.sampled_from([[], ["--ranks", "2", "--microbatches", "4"]]),
    )
    @example([], ["--ranks", "2", "--microbatches", "4"])
    def check(chosen, more):
        folder = fresh(tmp_path)
        code = called(["schedule", "--schedule", "1f1b", *more, *chosen, "--csv", str(folder / "table.csv")])
        assert [path.name for path in folder.iterdir()] == ([] if code else ["table.csv"])
        ends[code] += 1

    check()
    assert ends[0] and ends[2]


def test_plans(tmp_path):
    ends = Counter()

    @fuzz(25)
    @given(
        given_options(
            **dict.fromkeys(shlex.split("gpus max_memory_gb global_batch sequence_length"), NUMBERS),
            tokens=NUMBERS | st.just("100B"),
            what_if=st.sampled_from(["gpus=1,2", "gpus=", "gpu=T4,x", "x=1"]),
            gpu=st.sampled_from(["H100", "T4", "ml.p4d.24xlarge", "x", ""]),
            model=st.sampled_from(["llama-8b", "gpt2", "x", "", "."]),
            families=st.sampled_from(["DDP", "x"]),
        )
    )
    @example([])
    def check(chosen):
        folder = fresh(tmp_path) / "plan"
        code = called(["plan", "--model", "gpt2", "--gpu", "A100-80", "--json", *chosen, "--emit", str(folder)])
        assert folder.exists() == (code == 0), "a refused plan writes nothing"
        assert not list(folder.glob(".*"))
        ends[code] += 1

    check()
    assert ends[0] and ends[2]


@st.composite
def sweep_files(draw):
    """A sweep that is nearly right."""
    parts = st.fixed_dictionaries(
        {},
        optional={
            "values": st.just([1, 2]) | TREES,
            "value": TREES,
            "min": st.integers(0, 4) | SCALARS,
            "max": st.integers(3, 9) | SCALARS,
            "distribution": st.sampled_from(["int_uniform", "uniform"]) | SCALARS,
        },
    )
    right = st.sampled_from([{"values": [1, 2]}, {"value": 3}, {"min": 1, "max": 4}])
    names = st.sampled_from(["batch_size", "seed"])
    parameters = st.dictionaries(names, right, min_size=1) | st.dictionaries(names | SCALARS, right | parts) | TREES
    tree = draw(
        st.fixed_dictionaries(
            {"method": st.sampled_from(["grid", "random"]), "parameters": parameters},
            optional={"metric": TREES, "run_cap": st.integers(-2, 40) | WORDS, "seed": SCALARS, "name": TREES},
        )
    )
    return yaml.safe_dump(tree, allow_unicode=True)


def test_sweeps(tmp_path):
    ends, path = Counter(), tmp_path / "sweep.yaml"

    @fuzz(50)
    @given(sweep_files())
    @example("method: grid\nparameters: {seed: {values: [1, 2]}}\n")
    @example("method: random\nparameters: {learning_rate: {min: 1e-5, max: 1e-3}}\n")
    @example("metric: loss\nparameters: {seed: {values: [1]}}\n")
    @example("1: 2\nparameters: {1: {values: [1]}}\n")
    @example("parameters: {seed: {values: 12}}\n")
    def check(content):
        path.write_text(content, encoding="utf-8")
        ends[called(["sweep", str(path), "--dry_run"])] += 1

    check()
    assert ends[0] > 3 and ends[2] > 5 and [each.name for each in tmp_path.iterdir()] == [path.name]


def fresh(tmp_path):
    folder = tmp_path / "fuzzed-output"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


# --- data files ---

CELLS = st.one_of(WORDS, st.sampled_from(["", " ", "a", "b", '"', "a,b", "\0", "\r", "\n", "-1", "1.5", "\ufeff"]))
TABLES = st.lists(st.tuples(CELLS, CELLS, CELLS), min_size=0, max_size=6)
HEADERS = st.sampled_from(
    [("text", "label", "x"), ("text", "text", "label"), ("label", "x", ""), ("", "", ""), ("a", "b", "c")]
)


def as_csv(header, rows):
    return "\n".join(",".join(row) for row in [header, *rows]).encode()


def as_json_lines(header, rows):
    return "\n".join(json.dumps(dict(zip(header, row, strict=True))) for row in rows).encode()


def as_parquet(header, rows):
    names = [f"{name}{i}" if name in header[:i] else name for i, name in enumerate(header)]
    out = io.BytesIO()
    columns = [pa.array(column, pa.string()) for column in (zip(*rows, strict=True) if rows else ([], [], []))]
    pq.write_table(pa.table(dict(zip(names, columns, strict=True))), out)
    return out.getvalue()


WRITERS = {
    "csv": as_csv,
    "tsv": as_csv,
    "jsonl": as_json_lines,
    "json": as_json_lines,
    "parquet": as_parquet,
    "txt": as_csv,
}
JSON = st.recursive(
    SCALARS.filter(lambda x: not hasattr(x, "year")),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["text", "label", "a"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@st.composite
def data_files(draw):
    """A kind of file, and bytes that are one, nearly one, or none."""
    kind = draw(st.sampled_from(sorted(WRITERS)))
    form = draw(st.sampled_from(["bytes", "table", "damaged", "structure"]))
    if form == "bytes":
        return kind, draw(st.binary(max_size=60))
    if form == "structure" and kind in ("json", "jsonl"):
        return kind, "\n".join(json.dumps(each) for each in draw(st.lists(JSON, max_size=4))).encode()
    content = bytearray(WRITERS[kind](draw(HEADERS), draw(TABLES)))
    if form == "damaged" and content:
        content[draw(st.integers(0, len(content) - 1))] ^= 1 << draw(st.integers(0, 7))
        del content[draw(st.integers(1, len(content))) :]
    return kind, bytes(content)


def test_data_files(tmp_path):
    ends = Counter()

    @fuzz(25)
    @given(data_files(), st.sampled_from(["classification", "causal_lm"]))
    @example(("jsonl", b"null"), "causal_lm")
    @example(("json", b'[null, {"text": "a"}]'), "causal_lm")
    @example(("jsonl", b'{"text": "a"}\nnull'), "causal_lm")
    @example(("jsonl", b"\xef\xbb\xbf null\n{}"), "causal_lm")
    @example(("csv", b"text,label\n" + b"one,a\ntwo,b\n" * 5), "classification")
    @example(("csv", b"text,label\n" + b"one,--1\ntwo,2\n" * 5), "classification")
    @example(("csv", b"text,label\n" + b"one,1\ntwo," * 5 + b"9" * 5000), "classification")
    @example(("json", b"[" * 20_000), "causal_lm")
    def check(file, task):
        kind, content = file
        path = fresh(tmp_path) / f"data.{kind}"
        path.write_bytes(content)
        config = config_files.load(overrides={"dataset": str(path), "task": task}).data
        try:
            data = DataConnector(config).load()
        except CourseError as error:
            one_line(error)
            ends["refused"] += 1
        else:
            rows = data.splits["train"]
            assert len(rows) and all(isinstance(text, str) and text.strip() for text in rows["text"])
            if task == "classification":
                assert data.label_names and set(rows["label"]) <= set(range(len(data.label_names)))
            ends["read"] += 1
        assert [each.name for each in path.parent.iterdir()] == [path.name]
        assert not list(Path(datasets.config.HF_DATASETS_CACHE).rglob("*.incomplete"))

    check()
    assert ends["refused"] > 5 and ends["read"]


# --- checkpoints ---

RUN = shlex.split(
    "train --training_type basic --model tiny-bert --device cpu --max_train_samples 8 --max_eval_samples 4"
    " --max_length 8 --batch_size 2 --save_steps 1 --eval_steps 0 --keep_best false --baselines false"
    " --progress_bar false --tracker none --watchdog 0"
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "run"
    assert called([*RUN, "--output_dir", str(folder), "--max_steps", "1"]) == 0
    return checkpoint.latest(folder)


@st.composite
def damages(draw):
    """What is done to which file."""
    return (
        draw(st.integers(0, 99)),
        draw(st.sampled_from(["flip", "cut", "delete", "replace", "json", "grow"])),
        draw(st.integers(0, 10**6)),
        draw(st.binary(max_size=30)),
        draw(JSON),
    )


def copied(saved, tmp_path):
    """A checkpoint whose files may be replaced, though not written into: they are links."""
    folder = tmp_path / saved.name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(saved, folder, copy_function=os.link)
    return folder


def damaged(folder, damage, but=""):
    """Damage one file of a checkpoint; gives its name."""
    index, what, place, content, tree = damage
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != but)
    path = files[index % len(files)]
    whole = path.read_bytes()
    place %= len(whole)
    path.unlink()
    path.write_bytes(
        {
            "flip": whole[:place] + bytes([whole[place] ^ (1 << place % 8)]) + whole[place + 1 :],
            "cut": whole[:place],
            "grow": whole + (content or b"\0"),
            "json": json.dumps(tree).encode(),
        }.get(what, content if content != whole else b"x")
    )
    if what == "delete":
        path.unlink()
    return path.name


def test_damaged_checkpoints(saved, tmp_path):
    """Whatever is done to one file is noticed, and the file is named."""
    manifest.verify(saved)

    @fuzz(25)
    @given(damages())
    def check(damage):
        folder = copied(saved, tmp_path)
        name = damaged(folder, damage)
        with pytest.raises(CheckpointError) as error:
            manifest.verify(folder)
        one_line(error.value)
        assert name in str(error.value)

    check()


def test_checkpoints_whose_sums_are_right_and_whose_content_is_not(saved, tmp_path):
    """As someone leaves them who edits a file and makes the manifest anew: refused in one line, or gone on from."""
    folder, ends = copied(saved, tmp_path), Counter()
    options = dict(zip((each.removeprefix("--") for each in RUN[1::2]), RUN[2::2], strict=True))
    config = config_files.load(
        overrides=options | {"output_dir": str(tmp_path / "run"), "max_steps": 2, "resume_from_checkpoint": str(folder)}
    )
    trainer = build_trainer(config)[0]

    @fuzz(25)
    @given(damages())
    def check(damage):
        copied(saved, tmp_path)
        damaged(folder, damage, but=manifest.MANIFEST)
        manifest.seal(folder)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                resuming.resume(trainer)
            ends["gone on"] += 1
        except CourseError as error:
            one_line(error)
            ends["refused"] += 1

    check()
    assert ends["refused"] > 5
