"""The trainers on one process: the gradient, the schedule, the switches, and what is kept."""

import contextlib
import itertools
import json
import shutil

import datasets
import psutil
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from transformers import CONFIG_MAPPING
from transformers import Trainer as HuggingFaceTrainer

from course_lib.config import build
from course_lib.errors import ConfigError
from course_lib.modeling.mixtures import routers_of
from course_lib.training import run
from course_lib.training.callbacks import Callback, FunctionCallback
from course_lib.training.checkpoints import checkpoint, manifest, safetensors_tree
from course_lib.training.optimization import learning_rate_factor, parameter_groups
from testing import tiny_architectures
from tests.training import quick

QUICK = quick.QUICK | {
    "model": "tiny-bert",
    "training_type": "basic",
    "max_train_samples": 48,
    "max_eval_samples": 33,
    "max_steps": 6,
    "logging_steps": 1,
    "learning_rate": 1e-3,
    "keep_best": True,
}


@pytest.fixture
def trainer_of(tmp_path):
    def make(callbacks=(), folder="run", **options):
        return quick.trainer_of(build(QUICK | {"output_dir": str(tmp_path / folder)} | options), callbacks)

    return make


def test_without_a_progress_bar_data_are_prepared_without_one_too(tmp_path, monkeypatch):
    hidden = []

    def seen(config, callbacks):
        hidden.append(datasets.are_progress_bars_disabled())
        raise ConfigError("that was all")

    monkeypatch.setattr(run, "build_trainer", seen)
    for wanted in (True, False):
        with pytest.raises(ConfigError, match="that was all"):
            run.train(build(QUICK | {"output_dir": str(tmp_path / "run"), "progress_bar": wanted}))
    assert hidden == [False, True] and not datasets.are_progress_bars_disabled()


def losses_of(trainer):
    return quick.losses(trainer.output_dir)


def gradient_of(trainer):
    """The gradient of the first global batch, dropout off."""
    trainer.model.eval()
    batches = list(itertools.islice(trainer.train_loader, trainer.config.run.gradient_accumulation_steps))
    taken = []

    def take(*_):
        taken.append(torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None]))

    trainer.optimizer.register_step_pre_hook(take)
    trainer.train_step(batches)
    return taken[0]


@pytest.mark.parametrize(("rows", "steps"), [(1, 8), (2, 4), (4, 2)])
def test_accumulation_gives_the_large_batch_and_the_naive_way_does_not(trainer_of, rows, steps):
    """Rows of unlike lengths, a target a token; each row in its own epoch order, so all layouts see the same rows."""
    task = {"task": "masked_lm", "max_grad_norm": 0, "group_by_length": False}
    parts = task | {"batch_size": rows, "gradient_accumulation_steps": steps}
    whole = gradient_of(trainer_of(**task, batch_size=8))
    same = gradient_of(trainer_of(**parts))
    naive = gradient_of(trainer_of(**parts, loss_weighting="micro_batch"))
    assert 1e-3 * whole.norm() < (naive - whole).norm() < whole.norm(), "another, of its size"
    assert (same - whole).norm() < 1e-5 * whole.norm()


def test_copies_of_a_micro_batch_have_the_gradient_of_one_in_the_routers_loss_too(trainer_of):
    gradients = []
    for copies in (1, 3):
        trainer = trainer_of(model="tiny-olmoe", task="causal_lm", router_aux_loss_coef=1.0, max_grad_norm=0)
        router = next(iter(routers_of(trainer.model).values()))
        trainer.optimizer.register_step_pre_hook(lambda *_, of=router.weight: gradients.append(of.grad.clone()))
        trainer.model.train()
        trainer.train_step([next(iter(trainer.train_loader))] * copies)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("stop_at", [7, 12])
def test_a_checkpoint_that_knows_no_tokens_has_them_counted_again(trainer_of, tmp_path, stop_at):
    """As those of the versions that counted rows alone; 12 steps are an epoch."""
    options = {"max_steps": 15, "save_steps": stop_at, "save_total_limit": None}
    through = trainer_of(**options)
    through.train()
    progress = through.output_dir / checkpoint.name(stop_at) / "state.json"
    content = json.loads(progress.read_text())
    assert 0 < content["state"].pop("tokens") < through.state.tokens and content["state"].pop("flops") > 0
    older = shutil.copytree(progress.parent, tmp_path / "older")
    (older / "state.json").write_text(json.dumps(content, indent=1))
    manifest.seal(older)
    again = trainer_of(**options, resume_from_checkpoint=str(older), folder="again")
    again.train()
    assert (again.state.tokens, again.state.flops) == (through.state.tokens, pytest.approx(through.state.flops))


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "adafactor", "learning_rate": 5e-2},
        {"mixed_precision": "bf16"},
        {"dynamic_padding": False},
        {"group_by_length": False},
        {"num_workers": 1},
        {"attention": "eager"},
        {"pad_to_multiple_of": 8},
    ],
    ids=str,
)
def test_every_switch_trains(trainer_of, options):
    trainer = trainer_of(**{"max_steps": 20, "max_train_samples": 8, "batch_size": 8} | options)
    trainer.train()
    losses = losses_of(trainer)
    assert len(losses) == 20 and sum(losses[-3:]) / 3 < 0.9 * losses[0], losses  # the same 8 rows, learnt by heart


def data_workers():
    return [each for each in psutil.Process().children() if each.name() == "pt_data_worker"]


def test_trainings_of_one_process_have_each_its_own_precision(trainer_of, own_accelerator):
    """As in a notebook, whose kernel stays."""
    for precision in ("bf16", "no", "bf16"):
        trainer = trainer_of(training_type="accelerated", mixed_precision=precision)
        trainer.train()
        assert trainer.ranks.accelerator.mixed_precision == precision
    AcceleratorState._reset_state()
    Accelerator(cpu=True)
    with pytest.raises(ConfigError, match="has an Accelerator with mixed_precision no, and this training has bf16"):
        trainer_of(training_type="accelerated", mixed_precision="bf16")


@pytest.mark.parametrize("training_type", ["basic", "accelerated"])
@pytest.mark.parametrize("fails", [False, True], ids=["ends", "fails"])
def test_no_data_worker_outlives_its_training(trainer_of, training_type, fails):
    """Though the trainer stays, as it does in a notebook, and with it the error and its frames."""
    seen = []

    def look(trainer):
        seen.extend(data_workers())
        if fails and trainer.state.step == 3:
            raise RuntimeError("planted")

    trainer = trainer_of([FunctionCallback(look)], num_workers=2, training_type=training_type, max_steps=14)
    with pytest.raises(RuntimeError, match="planted") if fails else contextlib.nullcontext():
        trainer.train()
    assert len({each.pid for each in seen}) == 2  # the same over both epochs
    assert data_workers() == []


@pytest.mark.parametrize(
    "options",
    [
        {"activation_checkpointing": True},
        {"training_type": "accelerated", "cpu_kernels": "torch"},  # which draw the same dropout masks
    ],
)
def test_activation_checkpointing_and_accelerate_change_no_loss(trainer_of, options):
    plain = trainer_of()
    plain.train()
    other = trainer_of(**options, folder="other")
    other.train()
    assert losses_of(other) == pytest.approx(losses_of(plain), abs=1e-5)


def test_the_best_weights_are_kept_and_early_stopping_ends_the_run(trainer_of):
    """A learning rate that ruins the model: the first evaluation stays the best."""
    ruin = {"learning_rate": 0.5, "max_grad_norm": 0, "lr_scheduler": "constant", "eval_steps": 1, "max_steps": 30}
    trainer = trainer_of(**ruin, early_stopping_patience=3, best_metric="loss")
    state = trainer.train()
    assert state.step == state.best_step + 3 < 30
    best = safetensors_tree.load(trainer.best_file)
    torch.testing.assert_close(dict(trainer.model.state_dict()), best, rtol=0, atol=0)
    assert trainer.evaluate("validation")["loss"] == pytest.approx(state.best_value, abs=1e-6)


def test_checkpoints_beyond_the_limit_go(trainer_of):
    trainer = trainer_of(save_steps=1, save_total_limit=2)
    trainer.train()
    kept = [folder.name for folder in checkpoint.in_order(trainer.output_dir)]
    assert kept == [checkpoint.name(5), checkpoint.name(6)]


def test_users_callbacks_see_the_run_and_can_stop_it(trainer_of):
    calls = []

    class Mine(Callback):
        def on_train_begin(self, trainer):
            calls.append("begin")

        def on_evaluate(self, trainer, metrics):
            calls.append("evaluate")

        def on_save(self, trainer, checkpoint):
            calls.append(checkpoint.name)

        def on_train_end(self, trainer):
            calls.append("end")

    def stop_at_three(trainer):
        trainer.state.stop = trainer.state.step == 3

    trainer = trainer_of([Mine(), FunctionCallback(stop_at_three)], eval_steps=2, save_steps=3)
    assert trainer.train().step == 3
    assert calls == ["begin", "evaluate", "checkpoint-000003", "evaluate", "end"]


def test_callbacks_that_began_end_also_when_the_next_cannot_begin(trainer_of):
    calls = []

    class First(Callback):
        def on_train_end(self, trainer):
            calls.append("first ends")

    class Second(First):
        def on_train_begin(self, trainer):
            raise OSError("no such device")

        def on_train_end(self, trainer):
            calls.append("second ends")

    with pytest.raises(OSError, match="no such device"):
        trainer_of([First(), Second()]).train()
    assert calls == ["first ends"]


def test_split_batches_means_rows_over_all_processes(trainer_of):
    assert trainer_of(split_batches=True, batch_size=8, training_type="accelerated").sampler.batch_size == 8


def test_fp16_is_refused_on_a_cpu(trainer_of):
    with pytest.raises(ConfigError, match="fp16 needs a GPU"):
        trainer_of(mixed_precision="fp16", device="auto")


def test_schedules_at_their_corners():
    linear = [learning_rate_factor(s, shape="linear", warmup=2, total=6) for s in range(7)]
    assert linear == [0, 0.5, 1, 0.75, 0.5, 0.25, 0]
    cosine = [learning_rate_factor(s, shape="cosine", warmup=0, total=4) for s in range(5)]
    assert cosine == pytest.approx([1, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5, 0])
    assert {learning_rate_factor(s, shape="constant", warmup=1, total=9) for s in range(1, 9)} == {1.0}


@pytest.mark.parametrize("architecture", ["bert", "gpt2", "llama", "t5", "xlnet", "mamba", "deberta-v2", "distilbert"])
def test_what_decays_is_what_decays_in_the_hugging_face_trainer(architecture):
    """By name and layer: T5's relative_attention_bias and XLNet's r_w_bias are matrices, and biases."""
    task = "causal_lm" if architecture == "mamba" else "classification"
    model = tiny_architectures.build(CONFIG_MAPPING[architecture], task)
    theirs = set(HuggingFaceTrainer.get_decay_parameter_names(None, model))
    groups = {p: group["weight_decay"] for group in parameter_groups(model, 0.1) for p in group["params"]}
    wanted = {p: 0.1 if name in theirs else 0.0 for name, p in model.named_parameters() if p.requires_grad}
    assert groups == wanted and set(wanted.values()) == {0.0, 0.1}
    by_shape = {p: 0.1 if p.ndim >= 2 else 0.0 for p in wanted}
    assert (groups != by_shape) == (architecture in ("t5", "xlnet", "mamba")), "matrices and vectors would not do"
