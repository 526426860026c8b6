"""Fast CPU kernels beside torch's, over every model class of transformers that `course train` accepts.

    python benchmarks/cpu_kernels.py            # some minutes on one core; writes benchmarks/cpu-kernels.md

A tiny model of each config class, for each task that has a head for it (`AutoModelForSequenceClassification`,
`AutoModelForCausalLM`, `AutoModelForMaskedLM`): logits in evaluation, and logits and the whole gradient in training, by
`--cpu_kernels fast` and by torch's. Exit code 1 where one differs.
"""

import collections
import time

import torch
from transformers.utils import logging

from benchmarks.harness import options, publish, table
from course_lib.modeling.loading import HEADS
from tests.training import kernel_sweep


def cells(row: kernel_sweep.Row) -> tuple[str, ...]:
    """Cells of the row of a model that was built."""
    exact = "to the bit" if row.logits == row.gradient == 0 else f"{row.logits:.1e}, {row.gradient:.1e}"
    words = ("to the bit" if equal else "DIFFERS" for equal in (row.evaluation, row.training))
    return row.name, *words, exact, row.attention


def main() -> None:
    """Compare them all, and write the table."""
    options(__doc__)
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    rows = []
    for task in HEADS:
        for row in kernel_sweep.sweep(task):
            rows.append(row)
            print(f"{task} {row.name}: {row.left_out or ('equal' if row.equal else row)}", flush=True)
    there = [row for row in rows if not row.left_out]
    differ = [row for row in there if not row.equal]
    left_out = [row for row in rows if row.left_out]
    unknown = sorted({row.name for row in left_out} - set(kernel_sweep.LEFT_OUT))
    kinds = collections.Counter(row.attention.partition(":")[0].partition(",")[0] for row in there)
    parts = []
    for task in HEADS:
        of_task = sorted((row for row in there if row.task == task), key=lambda row: row.name)
        header = "config class | evaluation | training, dropout 0 | drops nothing | attention"
        parts += [f"## {task}", table(header, map(cells, of_task))]
    publish(
        "cpu-kernels",
        "Fast CPU kernels beside torch's",
        ("torch", "transformers"),
        f"{len(there) - len(differ)} of {len(there)} compute the same; {len(left_out)} could not be built small. "
        f"Attention in training: {', '.join(f'{kind} in {count}' for kind, count in sorted(kinds.items()))}. "
        f"{time.process_time():.0f} CPU-seconds on one core.",
        "Evaluation, and training with dropout 0 (logits and the gradient of every parameter): equal to the bit. Last "
        "but one: training with a dropout of 1e-6, which drops nothing and takes the way with dropout: the largest "
        "difference of a logit, and the norm of the gradient's difference by the gradient's norm; allowed: "
        f'{kernel_sweep.LOGITS:g} and {kernel_sweep.GRADIENT:g}. Last: whose attention ran there; after "torch\'s", '
        'the arguments that the fast one does not know, or that the model has no dropout in its attention. "The '
        "model's own\" is written out in the model, and nothing replaces it.",
        *parts,
        "## Not built",
        table(
            "task | config class | why | error",
            [(row.task, row.name, kernel_sweep.LEFT_OUT.get(row.name, "UNKNOWN"), row.left_out) for row in left_out],
        ),
    )
    if differ or unknown:
        raise SystemExit(f"differ: {[(row.task, row.name) for row in differ]}; not built: {unknown}")


if __name__ == "__main__":
    main()
