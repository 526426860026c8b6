"""Hidden cases of lesson 15: other shapes and ranks, drawn anew at each grading."""

from course_lib.grading.tasks import experts

DRAW = {
    "experts.route": lambda rng: experts.ROUTE.draw(rng, 9),
    "experts.dispatch": lambda rng: experts.DISPATCH.draw(rng, (2, 4)),
    "experts.gradients": lambda rng: experts.GRADIENTS.draw(rng, (3, 4)),
    "experts.layer": lambda rng: experts.LAYER.draw(rng, (2, 4)),
}
