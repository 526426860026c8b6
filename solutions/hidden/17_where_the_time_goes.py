"""Hidden cases of lesson 17: other operators, shapes and ranks, drawn anew at each grading."""

from course_lib.grading.tasks import chunked_loss, eight_bits, flash, roofline

DRAW = {
    "roofline.bounds": lambda rng: roofline.BOUNDS.draw(rng, 8),
    "flash.attention": lambda rng: flash.ATTENTION.draw(rng, 12),
    "loss.chunked": lambda rng: chunked_loss.CHUNKED.draw(rng, (2, 4)),
    "fp8.linear": lambda rng: eight_bits.LINEAR.draw(rng, 12),
    "fp8.all_gather": lambda rng: eight_bits.GATHER.draw(rng, (2, 4)),
}
