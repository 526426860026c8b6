"""Hidden cases of lesson 12: other jobs, prices and signals, drawn anew at each grading."""

from course_lib.grading.tasks import cloud, interruption

DRAW = {
    "cloud.request": lambda rng: cloud.REQUEST.draw(rng, 8),
    "cloud.cost": lambda rng: cloud.COST.draw(rng, 12),
    "cloud.interruption": lambda rng: interruption.INTERRUPTION.draw(rng, (3, 2)),
}
