"""Hidden cases of lesson 08: other shapes and ranks, drawn anew at each grading."""

from course_lib.grading.tasks import block, tensor

DRAW = {
    "tensor.mlp": lambda rng: tensor.MLP.draw(rng, (2, 4)),
    "tensor.embedding": lambda rng: tensor.EMBEDDING.draw(rng, (2, 4)),
    "tensor.cross_entropy": lambda rng: tensor.CROSS_ENTROPY.draw(rng, (2, 4)),
    "tensor.grid": lambda rng: tensor.GRID.draw(rng, 8),
    "tensor.block": lambda rng: block.BLOCK.draw(rng, (2, 4)),
}
