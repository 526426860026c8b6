"""The watchdog in Hugging Face's Trainer, Accelerate and Lightning: who hangs is named, and an error ends the watch."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from course_lib.hangs import callbacks
from course_lib.hangs.callbacks import WatchCallback, watched
from course_lib.hangs.watchdog import read_reports
from course_lib.launching.launch import launch
from tests.waiting import until

SECONDS, STUCK = 2.0, 4
ROOT = Path(__file__).parents[2]


class Rows(Dataset):
    """Rows of which one does not come on rank 1 before there are reports; or raises."""

    def __init__(self, folder, raises=False):
        self.folder, self.raises = folder, raises

    def __len__(self):
        return 12

    def __getitem__(self, index):
        if index >= STUCK and self.raises:
            raise ValueError("a bad row")
        if index >= STUCK and os.environ.get("RANK") == "1":
            while not (self.folder / "hang-rank0.json").exists():
                time.sleep(0.05)
        return {"x": torch.ones(3)}


class Model(torch.nn.Linear):
    def __init__(self):
        super().__init__(3, 1)

    def forward(self, x):
        return {"loss": super().forward(x).square().mean()}


def trainer(folder, **more):
    arguments = TrainingArguments(
        str(folder / "out"),
        per_device_train_batch_size=1,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        logging_strategy="no",
        num_train_epochs=1,
    )
    return Trainer(Model(), arguments, train_dataset=Rows(folder, **more))


def with_trainer(folder):
    made = trainer(folder)
    made.add_callback(WatchCallback(SECONDS, folder))
    made.train()


def with_accelerate(folder):
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(Model(), torch.optim.SGD(Model().parameters(), lr=0.1))
    with watched(SECONDS, folder) as dog:
        for index in range(2 * STUCK):
            accelerator.backward(model(Rows(folder)[index]["x"])["loss"])
            optimizer.step()
        assert dog._recorder.step == 2 * STUCK - 1


@pytest.mark.parametrize("train", [with_trainer, with_accelerate])
def test_who_hangs_is_named(train, tmp_path):
    def run():
        begin = callbacks.JobWatch
        callbacks.JobWatch = lambda *args, ends, **more: begin(*args, ends=False, **more)
        train(tmp_path)

    launch(run, num_processes=2, device="cpu", timeout=300, stream=False)
    culprits = {verdict.rank for report in read_reports(tmp_path) for verdict in report.verdicts}
    assert culprits == {1}
    sentence = read_reports(tmp_path)[0].verdicts[0].sentence
    assert "rank 1 is not in a collective; it is at " in sentence and "rank 0 waits for it in all_reduce" in sentence


def test_an_error_in_a_notebooks_training_ends_the_watch(tmp_path, monkeypatch):
    """The Trainer tells its callbacks nothing of it, and the process stays."""
    monkeypatch.setattr(callbacks, "LOOK_SECONDS", 0.01)
    made, watch = trainer(tmp_path, raises=True), WatchCallback(3600.0, tmp_path)
    made.add_callback(watch)
    with pytest.raises(ValueError, match="a bad row"):
        made.train()
    until(lambda: watch.training.watch is None)
    assert not read_reports(tmp_path) and not dist.is_initialized()


LIGHTNING = """
import sys, torch
from lightning.pytorch import LightningModule, Trainer
from course_lib.hangs.callbacks import WatchCallback

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
    def training_step(self, batch, index):
        assert watch.training.watch is not None
        if sys.argv[1] == "raise" and index == 2:
            raise ValueError("a bad row")
        return self.layer(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

watch = WatchCallback(3600.0, "hang")
trainer = Trainer(max_epochs=1, accelerator="cpu", callbacks=[watch], logger=False, enable_checkpointing=True)
try:
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.ones(4, 3)))
except ValueError as error:
    print("raised", error)
print("steps", trainer.global_step, "watching", watch.training.watch is not None)
"""


@pytest.mark.long
@pytest.mark.parametrize(("how", "said"), [("ends", "steps 4 watching False"), ("raise", "steps 2 watching False")])
def test_lightning_begins_and_ends_the_watch(tmp_path, how, said):
    """The release of the package index, in a folder of its own."""
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--target",
            tmp_path / "lightning",
            "lightning",
            "lightning-utilities",
            "torchmetrics",
            "pytorch-lightning",
        ],
        check=True,
    )
    (tmp_path / "train.py").write_text(LIGHTNING)
    done = subprocess.run(
        [sys.executable, "train.py", how],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": f"{tmp_path / 'lightning'}:{ROOT}"},
    )
    assert said in done.stdout and ("raised a bad row" in done.stdout) == (how == "raise"), done.stderr
