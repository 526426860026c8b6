"""Hidden cases of lesson 18: other links, shapes and ranks, drawn anew at each grading."""

from course_lib.grading.tasks import less, less_bytes, less_module

DRAW = {
    "less.link": lambda rng: less.LINK.draw(rng, 12),
    "less.average": lambda rng: less.AVERAGE.draw(rng, (2, 4)),
    "less.int8": lambda rng: less_bytes.INT8.draw(rng, (2, 4)),
    "less.powersgd": lambda rng: less_bytes.POWERSGD.draw(rng, (2, 4)),
    "less.topk": lambda rng: less_module.TOPK.draw(rng, (2, 4)),
}
