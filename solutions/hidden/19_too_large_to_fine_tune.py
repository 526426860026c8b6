"""Hidden cases of lesson 19: other sizes, dtypes and ranks, drawn anew at each grading."""

from course_lib.grading.tasks import lora_dpo, lora_layer, lora_load, lora_nf4, lora_sync

DRAW = {
    "lora.layer": lambda rng: lora_layer.LAYER.draw(rng, 9),
    "lora.nf4": lambda rng: lora_nf4.NF4.draw(rng, 8),
    "lora.dpo": lambda rng: lora_dpo.DPO.draw(rng, 8),
    "lora.sharded_load": lambda rng: lora_load.LOAD.draw(rng, (2, 4)),
    "lora.sync": lambda rng: lora_sync.SYNC.draw(rng, (2, 4)),
}
