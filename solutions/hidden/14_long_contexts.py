"""Hidden cases of lesson 14: other shapes and ranks, drawn anew at each grading."""

from course_lib.grading.tasks import context

DRAW = {
    "context.merge": lambda rng: context.MERGE.draw(rng, 9),
    "context.zigzag": lambda rng: context.ZIGZAG.draw(rng, 8),
    "context.loss": lambda rng: context.LOSS.draw(rng, (2, 4)),
    "context.ring": lambda rng: context.RING.draw(rng, (2, 4)),
}
