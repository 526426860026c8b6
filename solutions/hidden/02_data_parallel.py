"""Hidden cases of lesson 02: other numbers of ranks, other sizes, drawn anew at each grading."""

from course_lib.grading.tasks import ddp, ddp_module

DRAW = {
    "ddp.average": lambda rng: ddp.AVERAGE.draw(rng, (2, 4)),
    "ddp.ring": lambda rng: ddp.RING.draw(rng, (2, 3, 4)),
    "ddp.bucketing": lambda rng: ddp.BUCKETING.draw(rng, (2, 4)),
    "ddp.overlap": lambda rng: ddp.OVERLAP.draw(rng, (2, 3)),
    "ddp.no_sync": lambda rng: ddp.NO_SYNC.draw(rng, (2, 3)),
    "ddp.module": lambda rng: ddp_module.MODULE.draw(rng, (2, 4)),
}
