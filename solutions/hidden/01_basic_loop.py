"""Hidden cases of lesson 01: more rows, other shapes, drawn anew at each grading."""

from course_lib.grading.tasks import loop

DRAW = {
    "loop.warmup": lambda rng: loop.WARMUP.draw(rng, 6),
    "loop.length_groups": lambda rng: loop.LENGTH_GROUPS.draw(rng, 6),
    "loop.token_weighted": lambda rng: loop.TOKEN_WEIGHTED.draw(rng, 4),
    "loop.adamw": lambda rng: loop.ADAMW.draw(rng, 3),
}
