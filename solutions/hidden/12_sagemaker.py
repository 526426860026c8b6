"""Hidden cases of lesson 12: other jobs, prices and signals, drawn anew at each grading."""

from course_lib.grading.tasks import cloud, interruption, spot_job

DRAW = {
    "cloud.request": lambda rng: cloud.REQUEST.draw(rng, 8),
    "cloud.cost": lambda rng: cloud.COST.draw(rng, 12),
    "cloud.interruption": lambda rng: interruption.INTERRUPTION.draw(rng, (3, 2)),
    "cloud.job": lambda rng: spot_job.SPOT_JOB.draw(rng, 6),
}
