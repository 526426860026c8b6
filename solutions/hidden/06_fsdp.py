"""Hidden cases of lesson 06: other layers and ranks, drawn anew at each grading."""

from course_lib.grading.tasks import fsdp, fsdp_module

DRAW = {
    "fsdp.gather": lambda rng: fsdp.GATHER.draw(rng, (2, 4)),
    "fsdp.prefetch": lambda rng: fsdp.PREFETCH.draw(rng, (2, 4)),
    "fsdp.clip": lambda rng: fsdp.CLIP.draw(rng, (2, 4)),
    "fsdp.module": lambda rng: fsdp_module.MODULE.draw(rng, (2, 4)),
}
