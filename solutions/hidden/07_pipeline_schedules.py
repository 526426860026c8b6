"""Hidden cases of lesson 07: more ranks, more micro-batches, drawn anew at each grading."""

from course_lib.grading.tasks import executor, pipeline

DRAW = {
    "pipeline.bubble": lambda rng: pipeline.BUBBLE.draw(rng, 6),
    "pipeline.1f1b": lambda rng: pipeline.ONE_F_ONE_B.draw(rng, 8),
    "pipeline.interleaved": lambda rng: pipeline.INTERLEAVED.draw(rng, 8),
    "pipeline.zero_bubble": lambda rng: pipeline.ZERO_BUBBLE.draw(rng, 8),
    "pipeline.balance": lambda rng: pipeline.BALANCE.draw(rng, 12),
    "pipeline.run": lambda rng: executor.RUN.draw(rng, ((2, "1f1b", 1), (2, "interleaved", 3))),
}
