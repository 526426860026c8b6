"""What a step launches, computes in and holds on GPUs, counted on the simulated device."""

import os
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from accelerate.state import AcceleratorState, GradientState

from course_lib.config import build
from course_lib.parallel.blocks import blocks
from course_lib.training import loss as losses
from course_lib.training.run import build_trainer
from tests.gpu import training as t

CAST = [("zero3", "torch"), ("zero3", "scratch"), ("fsdp", "scratch"), ("fsdp", "accelerate")]
UNCAST = [("ddp", "torch"), ("zero1", "torch"), ("zero1", "scratch"), ("zero2", "scratch")]
PAIRS = UNCAST + CAST
BASE = t.STEPS_ALONE | {
    "max_steps": 3,
    "max_train_samples": 64,
    "max_eval_samples": 8,
    "gradient_accumulation_steps": 2,
    "logging_steps": 3,
    "desync_check": "off",
    "mixed_precision": "bf16",
}


def dtypes_of(trainer):
    """Fills a mapping from kind of module to the dtypes of what such modules return in training."""
    found = {}

    def seen(kind):
        def hook(module, args, output):
            output = output[0] if isinstance(output, tuple) else getattr(output, "logits", output)
            if torch.is_grad_enabled():
                found.setdefault(kind, set()).add(output.dtype)

        return hook

    model = trainer.model
    for name, modules in {
        "linear": [m for m in model.modules() if isinstance(m, torch.nn.Linear)],
        "norm": [m for m in model.modules() if isinstance(m, torch.nn.LayerNorm)],
        "block": list(blocks(model).values()),
        "logits": [trainer.wrapped],
    }.items():
        for module in modules:
            module.register_forward_hook(seen(name))
    return found


def trained(strategy, engine, **options):
    """One run on the ranks that are here; what was counted in its last step, and seen in all."""
    import gpu_sim

    torch.set_num_threads(1)
    AcceleratorState._reset_state()  # the process group stays
    GradientState._reset_state()
    config = build(BASE | {"strategy": strategy, "engine": engine, "output_dir": f"run-{strategy}-{engine}"} | options)
    config.output_dir.mkdir(parents=True, exist_ok=True)
    trainer, _ = build_trainer(config)
    found = {"dtypes": dtypes_of(trainer)}
    clip, zero_grad, train_step = trainer.engine.clip, trainer.engine.zero_grad, trainer.train_step

    def clipped(max_norm):
        grads = [p.grad for p in trainer.model.parameters() if type(p.grad) is torch.Tensor]
        found["gradients"] = len(grads), len({grad.untyped_storage().data_ptr() for grad in grads})
        found["before"] = gpu_sim.kernels()
        return clip(max_norm)

    def cleared():
        zero_grad()
        found["step"] = gpu_sim.kernels() - found["before"]

    def watched(micro_batches):
        found.setdefault("lengths", set()).update(batch["input_ids"].shape[1] for batch in micro_batches)
        return train_step(micro_batches)

    trainer.engine.clip, trainer.engine.zero_grad, trainer.train_step = clipped, cleared, watched
    trainer.train()
    found |= {
        "loss": trainer.state.last_loss,
        "races": gpu_sim.findings(),
        "tf32": trainer.tf32,
        "products": torch.get_float32_matmul_precision(),
        "workers": trainer.train_loader.num_workers,
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF"),
        "ddp": {name: getattr(trainer.wrapped, name, None) for name in ("gradient_as_bucket_view", "bucket_bytes_cap")},
    }
    return found


def all_pairs():
    return {pair: trained(*pair) for pair in PAIRS}


@pytest.fixture(scope="module")
def runs(gpus):
    """What each strategy and engine counted on the first of two GPUs."""
    return gpus.ranks(2, all_pairs)[0]


def test_all_train_alike_and_without_a_race(runs):
    assert [found["races"] for found in runs.values()] == [[]] * len(PAIRS)
    reached = [found["loss"] for found in runs.values()]
    assert reached == pytest.approx([runs["ddp", "torch"]["loss"]] * len(PAIRS), abs=0.02)


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair[1] == "scratch"], ids="-".join)
def test_clipping_and_stepping_take_no_more_launches_than_torch_takes(runs, pair):
    """Before: eight per parameter for clipping alone."""
    assert 0 < runs[pair]["step"] <= runs["zero3", "torch"]["step"]


@pytest.mark.parametrize("pair", CAST, ids="-".join)
def test_an_engine_that_casts_computes_in_bf16_throughout(runs, pair):
    """Under autocast besides, norms and blocks return float32, and every product casts it again."""
    assert runs[pair]["dtypes"] == {kind: {torch.bfloat16} for kind in ("linear", "norm", "block", "logits")}


@pytest.mark.parametrize("pair", UNCAST, ids="-".join)
def test_autocast_alone_keeps_norms_in_float32_and_copies_no_logits(runs, pair):
    dtypes = runs[pair]["dtypes"]
    assert dtypes["norm"] == {torch.float32} and dtypes["linear"] == dtypes["logits"] == {torch.bfloat16}


@pytest.mark.parametrize("pair", [("ddp", "torch"), ("zero1", "torch")], ids="-".join)
def test_ddps_gradients_are_views_of_its_buckets(runs, pair):
    gradients, storages = runs[pair]["gradients"]
    assert runs[pair]["ddp"] == {"gradient_as_bucket_view": True, "bucket_bytes_cap": 25 * 2**20}
    assert gradients > 30 and storages <= 2


def test_bucket_mb_reaches_ddp_and_no_precision_means_float32(gpus):
    found, _ = gpus.ranks(2, trained, "ddp", "torch", bucket_mb=0.25, mixed_precision="no")
    assert found["ddp"]["bucket_bytes_cap"] == 2**18 and found["gradients"][1] > 2
    assert (found["tf32"], found["products"]) == (False, "highest")


def test_settings_of_a_rank_on_a_gpu(runs):
    for found in runs.values():
        assert found["allocator"] == "expandable_segments:True"
        assert (found["tf32"], found["products"]) == (True, "high")
        assert found["lengths"] and not [length for length in found["lengths"] if length % 8]


def with_three_cores(**options):
    with mock.patch("course_lib.data.batching.usable_cores", lambda: 3):
        return trained("ddp", "torch", **options)


def test_a_rank_on_a_gpu_has_workers_and_they_change_nothing(gpus):
    (alone,), (helped,) = (gpus.ranks(1, with_three_cores, num_workers=number) for number in (0, None))
    assert (alone["workers"], helped["workers"]) == (0, 2) and alone["loss"] == helped["loss"]


def peak(chunked, rows, length, words):
    """Bytes beside the logits at the fullest moment of a language model's loss, forward and backward."""
    logits = torch.randn(rows, length, words, device="cuda", dtype=torch.bfloat16).requires_grad_()
    labels = torch.randint(0, words, (rows, length), device="cuda")
    losses.CHUNK_BYTES = 4 * words * 8  # of 8 tokens
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    if chunked:
        loss = losses.summed_loss(logits, labels, "causal_lm")
    else:
        loss = F.cross_entropy(
            logits.float().flatten(0, -2), losses.shifted(labels, "causal_lm").flatten(), reduction="sum"
        )
    loss.backward()
    return torch.cuda.max_memory_allocated() - before


def test_the_loss_of_a_language_model_holds_no_float32_copy_of_the_logits(gpus):
    rows, length, words = 4, 64, 4096
    size = rows * length * words
    plain, chunked = (gpus.run(peak, way, rows, length, words, gpus=1) for way in (False, True))
    chunk = 8 * words
    assert plain >= 12 * size, "log-probabilities, their gradient and the logits' in float32"
    assert 2 * size <= chunked <= 2 * size + 5 * 4 * chunk + 2**16, "the gradient in bf16, and a chunk in float32"
