"""Hidden cases of lesson 16: other shapes and ranks, drawn anew at each grading."""

from course_lib.grading.tasks import museum_layers, museum_losses, museum_means

DRAW = {
    "museum.mixture": lambda rng: museum_means.MIXTURE.draw(rng, (2, 4)),
    "museum.experts": lambda rng: museum_means.EXPERTS.draw(rng, (2, 4)),
    "museum.buckets": lambda rng: museum_means.BUCKETS.draw(rng, (2, 3, 2, 4)),
    "museum.outer": lambda rng: museum_means.OUTER.draw(rng, (2, 4)),
    "museum.entry": lambda rng: museum_layers.ENTRY.draw(rng, (2, 4)),
    "museum.exit": lambda rng: museum_layers.EXIT.draw(rng, (2, 4)),
    "museum.norm": lambda rng: museum_layers.NORM.draw(rng, (2, 4)),
    "museum.tied": lambda rng: museum_layers.TIED.draw(rng, (2, 4)),
    "museum.context": lambda rng: museum_losses.CONTEXT.draw(rng, (2, 4)),
    "museum.tokens": lambda rng: museum_losses.TOKENS.draw(rng, (2, 4)),
    "museum.micro": lambda rng: museum_losses.MICRO.draw(rng, (2, 4)),
    "museum.twice": lambda rng: museum_losses.TWICE.draw(rng, (2, 4)),
}
