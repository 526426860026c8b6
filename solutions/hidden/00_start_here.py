"""Hidden cases of lesson 00: other machines, tensors and numbers of ranks, drawn anew at each grading."""

from course_lib.grading.tasks import start

DRAW = {
    "start.environment": lambda rng: start.ENVIRONMENT.draw(rng, 8),
    "start.broadcast": lambda rng: start.BROADCAST.draw(rng, (2, 4)),
    "start.one_model": lambda rng: start.ONE_MODEL.draw(rng, (2, 4)),
}
