"""Counts the files of course_lib that a reader opens to follow one training step, and prints them as the step does.

    python tools/walk.py [--strategy zero3] [--engine scratch] [--write]

Two ranks train tiny-bert in fp32. Of rank 0's second step each call of a Python function is noted, from the call
of ``Trainer.train_step`` to its return. The rule: a reader opens a file where a function of it ran that has more to it
than one statement, its docstring aside; what only hands a value on is read where it is called. ``--write`` renews the
row of docs/architecture.md.
"""

import argparse
import ast
import functools
import re
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

import course_lib
from course_lib.config import build
from course_lib.launching.launch import launch

LIBRARY = Path(course_lib.__file__).parent
PAGE = LIBRARY.parent / "docs" / "architecture.md"


def main() -> None:
    """Print the files of a step, in the order in which it comes by them, with their functions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="zero3")
    parser.add_argument("--engine", default="scratch")
    parser.add_argument("--write", action="store_true", help="renew the row of docs/architecture.md")
    chosen = parser.parse_args()
    calls = walk(chosen.strategy, chosen.engine)
    files = opened(calls)
    print(
        f"one step of {chosen.strategy} by {chosen.engine}: {len(files)} files to open, "
        f"{len({file for file, _ in calls})} passed through, {switches(calls)} switches between files, "
        f"{len(calls)} calls"
    )
    for file, names in files.items():
        print(f"  {file}: {', '.join(names)}")
    if chosen.write:
        text = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(re.sub(r"(?m)^\| now \|.*$", row(calls), text), encoding="utf-8")


def row(calls: list[tuple[str, str]]) -> str:
    """The row of docs/architecture.md: files to open, files passed through, switches, calls."""
    numbers = len(opened(calls)), len({file for file, _ in calls}), switches(calls), len(calls)
    return f"| now | {' | '.join(f'{number:,}' for number in numbers)} |"


def walk(strategy: str, engine: str) -> list[tuple[str, str]]:
    """The calls of one step on rank 0, as file in course_lib and line-free name of the function, in order."""
    with tempfile.TemporaryDirectory() as folder:
        config = {
            "dataset": "tweets",
            "model": "tiny-bert",
            "max_train_samples": 32,
            "max_eval_samples": 8,
            "batch_size": 2,
            "max_steps": 2,
            "eval_steps": 0,
            "save_steps": 0,
            "strategy": strategy,
            "engine": engine,
            "cpu_kernels": "torch",
            "mixed_precision": "no",  # auto is bf16 on some CPUs, and its casts are more calls
            "progress_bar": False,
            "device": "cpu",
            "output_dir": folder,
        }
        return launch(_second_step, config, num_processes=2, timeout=240, device="cpu")[0]


def _second_step(values: dict[str, Any]) -> list[tuple[str, str]]:
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    from course_lib.training.run import build_trainer

    # This process may have trained by fast kernels before: transformers' attention is its own again.
    AttentionInterface.register("sdpa", sdpa_attention_forward)
    trainer, _ = build_trainer(build(values))
    step, calls = trainer.train_step, []

    def note(frame: FrameType, event: str, argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(LIBRARY) and not frame.f_code.co_name.startswith("<"):
            calls.append((str(path.relative_to(LIBRARY)), frame.f_code.co_qualname))

    def watched(micro_batches: Any) -> Any:
        if trainer.state.step == 0:
            return step(micro_batches)
        sys.setprofile(note)
        try:
            return step(micro_batches)
        finally:
            sys.setprofile(None)

    trainer.train_step = watched  # type: ignore[method-assign]
    trainer.train()
    trainer.engine.close()
    return calls


def opened(calls: list[tuple[str, str]]) -> dict[str, list[str]]:
    """The files that a reader opens, with the functions in them that have something to read."""
    files: dict[str, list[str]] = {}
    for file, name in dict.fromkeys(calls):
        if statements(file).get(name, 0) > 1:
            files.setdefault(file, []).append(name)
    return files


def switches(calls: list[tuple[str, str]]) -> int:
    """How often a call is of another file than the one before."""
    return sum(before[0] != after[0] for before, after in zip(calls, calls[1:], strict=False))


@functools.cache
def statements(file: str) -> dict[str, int]:
    """Statements of each function of a file, nested ones included, docstrings not, by qualified name."""
    counts: dict[str, int] = {}

    def look(node: ast.AST, inside: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef):
                name = inside + child.name
                body = child.body[ast.get_docstring(child) is not None :]
                counts[name] = sum(isinstance(each, ast.stmt) for stmt in body for each in ast.walk(stmt))
                look(child, f"{name}.<locals>.")
            else:
                look(child, f"{inside}{child.name}." if isinstance(child, ast.ClassDef) else inside)

    look(ast.parse((LIBRARY / file).read_text(encoding="utf-8")), "")
    return counts


if __name__ == "__main__":
    main()
