"""Hidden cases of lesson 10: other runs, other hangs, other ranks, drawn anew at each grading."""

from course_lib.grading.tasks import faults, resuming, surviving

DRAW = {
    "faults.resume": lambda rng: resuming.RESUME.draw(rng, 1),
    "faults.hang": lambda rng: faults.HANG.draw(rng, 24),
    "faults.agreement": lambda rng: faults.AGREEMENT.draw(rng, (2, 4, 3)),
    "faults.checkpoint": lambda rng: surviving.SAVING.draw(rng, 3),
}
