"""Hidden cases of lesson 03: other numbers of rows and ranks, drawn anew at each grading."""

from course_lib.grading.tasks import accelerator, prepared

DRAW = {
    "accelerate.rows": lambda rng: prepared.ROWS.draw(rng, 10),
    "accelerate.loss": lambda rng: prepared.LOSS.draw(rng, (2, 4)),
    "accelerate.main_first": lambda rng: prepared.MAIN_FIRST.draw(rng, (2, 4)),
    "accelerate.module": lambda rng: accelerator.ACCELERATOR.draw(rng, (2, 4)),
}
