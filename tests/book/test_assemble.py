"""The book's sources: nothing is left out, nothing twice, no solution is given away, every link has a page."""

import argparse
import json
import re
import tomllib
from pathlib import Path

import nbformat
import pytest

from book import assemble, command_pages, front_page, open_elsewhere
from book.links import Links
from course_lib.cli import COMMANDS
from course_lib.lessons.notebook import MIME

ROOT = Path(__file__).resolve().parents[2]
TOCTREE = re.compile(r"```\{toctree\}\n(.*?)```", re.DOTALL)


@pytest.fixture(scope="module")
def sources():
    return assemble.sources()


def entries(texts):
    """What the toctrees of all pages name, as paths without their suffix."""
    found = []
    for name, text in texts.items():
        for tree in TOCTREE.findall(text) if name.endswith(".md") else ():
            listed = [line.strip() for line in tree.splitlines() if line.strip() and not line.startswith(":")]
            found += [str((ROOT / name).parent.joinpath(entry).resolve().relative_to(ROOT)) for entry in listed]
    return found


def test_each_page_is_in_the_table_of_contents_once(sources):
    texts, _, _ = sources
    pages = {name.rpartition(".")[0] for name in texts} - {"index"}
    named = entries(texts)
    assert sorted(named) == sorted(pages), "name each page once in a toctree of book/pages (benchmarks/index.md)"
    lessons = {f"{path.parent.name}/{path.stem}" for path in ROOT.glob("notebooks/*.ipynb")}
    exercises = {f"{path.parent.name}/{path.stem}" for path in ROOT.glob("exercises/*.ipynb")}
    tables = {f"benchmarks/{path.stem}" for path in ROOT.glob("benchmarks/*.md")}
    assert lessons | exercises | tables <= set(named)


def test_no_solution_is_given_away(sources):
    texts, _, files = sources
    assert {name for name in [*texts, *files] if name.startswith("solutions/")} <= {"solutions/README.md"}
    for path in sorted(ROOT.glob("solutions/[0-9]*.ipynb")):
        page = "\n".join(cell.source for cell in nbformat.reads(texts[f"exercises/{path.name}"], as_version=4).cells)
        for cell in nbformat.read(path, as_version=4).cells:
            for answer in re.findall(r"### BEGIN SOLUTION\n(.*?)### END SOLUTION", cell.source, re.DOTALL):
                assert answer.strip() not in page


def test_the_map_says_of_each_lesson_its_question_its_time_and_what_one_measures(sources):
    lessons = front_page.lessons()
    written = sorted(int(path.stem[:2]) for path in ROOT.glob("notebooks/*.ipynb"))
    assert [lesson.number for lesson in lessons] == written
    front = sources[0]["index.md"]
    for lesson in lessons:
        assert front.count(f"[{lesson.number:02} · {lesson.question}]({lesson.path})") == 1
        assert lesson.measures[1:] in front
        assert re.fullmatch(r"\d+ minutes", lesson.time)
    assert "<!--" not in front


def test_each_command_and_each_of_its_options_has_its_line(sources):
    texts, _, _ = sources
    assert {f"command-line/{command.NAME}.md" for command in COMMANDS} < set(texts)
    assert "`--learning_rate X`\n: " in texts["command-line/train.md"]
    assert "--use_liger_kernel" not in texts["command-line/train.md"]  # hidden in the help too


def test_what_a_help_says_reads_the_same_as_markdown():
    parser = argparse.ArgumentParser(prog="course try")
    parser.add_argument("--some_name", metavar="N", type=int, default=3, help="a*b_c <x> [%(default)s], as `a_b` is")
    page = command_pages._page(parser, "try it")
    assert "`--some_name N`\n: a\\*b\\_c \\<x> \\[3\\], as `a_b` is\n" in page
    assert command_pages.escaped("one ` alone") == "one \\` alone"


# --- links


def links(tmp_path, *pages):
    for name in ("a.md", "code/b.py", "notebooks/c.ipynb"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return Links(tmp_path, {Path(page) for page in pages})


@pytest.mark.parametrize(
    ("said", "becomes"),
    [
        ("[x](../a.md)", "[x](../a.md)"),
        ("[x](../code/b.py)", "[x](source:code/b.py)"),
        ("[x](../code/b.py#L7-L9)", "[x](source:code/b.py#L-7)"),
        ("[x](https://example.org) and [y](#here)", "[x](https://example.org) and [y](#here)"),
        (
            "`[x](../gone.py)`\n```\n[x](../gone.py)\n```\n[y](../code/b.py)",
            "`[x](../gone.py)`\n```\n[x](../gone.py)\n```\n[y](source:code/b.py)",
        ),
    ],
)
def test_a_link_to_a_file_becomes_one_to_the_page_that_shows_it(tmp_path, said, becomes):
    known = links(tmp_path, "a.md")
    assert known.in_markdown(said, Path("notebooks/c.ipynb")) == becomes
    assert known.files == ({"code/b.py"} if "source:" in becomes else set())


def test_a_link_in_an_output_leads_to_its_line(tmp_path):
    known = links(tmp_path, "a.md")
    said = known.in_html("<a href='../code/b.py#L7-L9'>b.py</a> <a href='../a.md'>a</a>", Path("notebooks/c.ipynb"))
    assert said == "<a href='../code/b.py.html#L-7'>b.py</a> <a href='../a.md'>a</a>"


def test_each_file_that_a_page_leads_to_is_shown(sources):
    texts, _, files = sources
    named = {path for text in texts.values() for path in re.findall(r"\]\(source:([^)#\s]+)", text)}
    assert "course_lib/planning/strategy.py" in named and named <= files


def test_a_link_to_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"c.ipynb links to gone.py, which is not there"):
        links(tmp_path).in_markdown("[x](../gone.py)", Path("notebooks/c.ipynb"))


# --- notebooks


def test_a_page_has_neither_records_nor_widgets(sources, tmp_path):
    texts, _, _ = sources
    for name in (name for name in texts if name.endswith(".ipynb")):
        outputs = [output for cell in json.loads(texts[name])["cells"] for output in cell.get("outputs", [])]
        kinds = {kind for output in outputs for kind in output.get("data", {})}
        assert [kind for kind in kinds if not kind.startswith(("text/", "image/"))] == [], name
    stored = json.loads((ROOT / "notebooks/02_data_parallel.ipynb").read_text(encoding="utf-8"))
    assert any(MIME in output.get("data", {}) for cell in stored["cells"] for output in cell.get("outputs", []))


def test_each_figure_says_what_it_shows(sources):
    _, alternatives, _ = sources
    assert len(alternatives) >= 70 and all(alternatives.values())
    assert any(re.match(r"\d+ of \d+ buckets leave while backward still runs", text) for text in alternatives.values())


# --- places to run it


def test_the_notebook_for_elsewhere_begins_with_the_cell_that_fetches_the_course():
    stored = nbformat.read(ROOT / "notebooks/02_data_parallel.ipynb", as_version=4).cells
    first, *rest = nbformat.reads(open_elsewhere.notebook(ROOT / "notebooks/02_data_parallel.ipynb", "a/b"), 4).cells
    assert "git clone --quiet --depth 1 https://github.com/a/b course" in first.source
    assert [cell.source for cell in rest] == [cell.source for cell in stored]
    assert not any(cell.get("outputs") for cell in rest)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(open_elsewhere.EXTRAS.split(",")) == extras.keys() - {"all", "dev", "book"}
