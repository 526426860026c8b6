"""Hidden cases of lesson 05: other sizes and ranks, drawn anew at each grading."""

from course_lib.grading.tasks import zero, zero_optimizer

DRAW = {
    "zero.bytes": lambda rng: zero.BYTES.draw(rng, 6),
    "zero.partition": lambda rng: zero.PARTITION.draw(rng, 20),
    "zero.stage1": lambda rng: zero.STAGE1.draw(rng, (2, 4)),
    "zero.stage2": lambda rng: zero.STAGE2.draw(rng, (2, 4)),
    "zero.optimizer": lambda rng: zero_optimizer.OPTIMIZER.draw(rng, (2, 4)),
}
