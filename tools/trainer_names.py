"""Write docs/trainer-names.md: every argument of the Hugging Face Trainer, and what it is here.

python tools/trainer_names.py
"""

import dataclasses
from pathlib import Path

from transformers import TrainingArguments

from course_lib.config import options
from course_lib.config import trainer_names as names
from course_lib.config.files import ALIASES
from course_lib.writing import write_text

PAGE = Path(__file__).parents[1] / "docs" / "trainer-names.md"
OWN_VALUES = {
    "eval_strategy": "`eval_steps`: no is 0, epoch is none",
    "save_strategy": "`save_steps`, likewise; not best",
    "bf16": "`mixed_precision bf16`",
    "fp16": "`mixed_precision fp16`",
    "max_steps": "the same; -1 is none",
    "tf32": "the same; true is on, false off",
    "warmup_steps": "the same; below 1 it is `warmup_ratio`",
    "metric_for_best_model": "`best_metric`: loss, accuracy, macro_f1, perplexity, with or without eval_",
    "push_to_hub": "the repository's name; true takes that of `hub_model_id`",
    "hub_model_id": "`push_to_hub NAME`, beside `push_to_hub true`",
    "greater_is_better": "taken where it is so for the metric",
    "lr_scheduler_type": "`lr_scheduler`; not reduce_lr_on_plateau and greedy",
    "logging_steps": "the same; whole numbers",
    "eval_steps": "the same; whole numbers",
    "save_steps": "the same; whole numbers",
}


def row(field: str) -> tuple[str, str]:
    """How far an argument works (`works`, `as`, `always`, `not`), and in words what it is here."""
    if field in names.ABSENT:
        return "not", names.ABSENT[field]
    if field in names.ALWAYS:
        value, why = names.ALWAYS[field]
        return "always", f"{value} alone: {why}"
    if field in names.TRANSLATED:
        return "as", names.TRANSLATED[field]["words"]
    if field in OWN_VALUES:
        return ("works" if OWN_VALUES[field].startswith("the same") else "as"), OWN_VALUES[field]
    if field in {o.name for o in options()}:
        return "works", "the same"
    return ("as", f"`{ALIASES[field]}`") if field in ALIASES else ("unknown", "")


def rows() -> dict[str, tuple[str, str]]:
    """Every field of TrainingArguments."""
    return {field.name: row(field.name) for field in dataclasses.fields(TrainingArguments)}


def page() -> str:
    """The page as Markdown."""
    table = rows()
    counts = {kind: sum(found == kind for found, _ in table.values()) for kind in ("works", "as", "always", "not")}
    lines = [f"| `{field}` | {kind} | {text} |" for field, (kind, text) in table.items()]
    return "\n".join(
        [
            "# The Hugging Face Trainer's arguments here",
            "",
            "Made by `python tools/trainer_names.py` from `course_lib/config/trainer_names.json`; a test holds it to "
            "the code.",
            "",
            f"Of the {len(table)} fields of `transformers.TrainingArguments` (version 5.23) {counts['works']} have the "
            f"same name and meaning, {counts['as']} are taken as another field or value, {counts['always']} are taken "
            f"with the one value that always holds here, and {counts['not']} are refused in a line that says "
            "what to use. They work on the command line and in YAML files. Defaults are this project's own.",
            "",
            "| argument | | here |",
            "|---|---|---|",
            *lines,
            "",
        ]
    )


if __name__ == "__main__":
    write_text(PAGE, page())
    print(
        PAGE.name,
        {
            kind: sum(found == kind for found, _ in rows().values())
            for kind in ("works", "as", "always", "not", "unknown")
        },
    )
