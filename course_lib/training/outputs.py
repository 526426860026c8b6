"""A run's folder: whose it is, what goes in, and how the trained model is written."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import EvalResult, ModelCardData
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from course_lib.config import Config
from course_lib.config_files import to_yaml, write_text
from course_lib.errors import ConfigError
from course_lib.training import checkpoint

CONFIG, SUMMARY, METRICS, MODEL, BEST = "config.yaml", "summary.json", "metrics.jsonl", "model", "best.safetensors"
MONITOR = "monitor"  # what the monitors of a run keep


def check(config: Config) -> None:
    """Refuse a folder that cannot be written, or that holds something the run would overwrite.

    Raises:
        ConfigError: with what to give instead.
    """
    folder = config.output_dir
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not existing.is_dir():
        raise ConfigError(f"output_dir {folder}: {existing} is not a folder", "choose another --output_dir")
    if not _writable(existing):
        raise ConfigError(f"output_dir {folder} cannot be written (no permission in {existing})",
                          "choose another --output_dir")
    if not folder.exists() or not any(folder.iterdir()) or config.output.resume_from_checkpoint:
        return
    if not (folder / CONFIG).exists():
        raise ConfigError(f"output_dir {folder} holds files that are no run of this course",
                          "choose another --output_dir")
    if not config.output.overwrite_output_dir:
        raise ConfigError(f"output_dir {folder} already holds a run",
                          "give --overwrite_output_dir, --resume_from_checkpoint latest, or another --output_dir")


def _writable(folder: Path) -> bool:
    """Whether a file can be made there; the permission bits alone do not tell of a read-only disk."""
    probe = folder / ".writable"
    try:
        probe.touch()
        probe.unlink()
    except OSError:
        return False
    return True


def claim(config: Config) -> None:
    """Make the folder this run's: an earlier run's files go, the resolved config comes."""
    folder = config.output_dir
    with checkpoint.saving(f"the config of the run in {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        if config.output.overwrite_output_dir:
            for path in [*checkpoint.in_order(folder), folder / MODEL, folder / MONITOR]:
                shutil.rmtree(path, ignore_errors=True)
            for name in (CONFIG, SUMMARY, METRICS, BEST):
                (folder / name).unlink(missing_ok=True)
        write_text(folder / CONFIG, to_yaml(config))


def write_model(folder: Path, model: PreTrainedModel, weights: dict[str, torch.Tensor],
                tokenizer: PreTrainedTokenizerBase, card: str) -> None:
    """Write model, tokenizer and card in Hugging Face form, beside their place, and rename.

    The weights are given whole, since a sharded model's own are in pieces.

    ``transformers.pipeline`` and ``from_pretrained`` load the folder.
    """
    beside = folder.with_name(f".{folder.name}.writing")
    with checkpoint.saving(f"the model in {folder}"):
        try:
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir(parents=True)
            logging.disable_progress_bar()  # one file, one line of noise
            model.save_pretrained(beside, state_dict=weights)
            tokenizer.save_pretrained(beside)
            write_text(beside / "README.md", card)
            shutil.rmtree(folder, ignore_errors=True)
            beside.rename(folder)
        finally:
            logging.enable_progress_bar()
            shutil.rmtree(beside, ignore_errors=True)


PIPELINES = {"classification": "text-classification", "causal_lm": "text-generation", "masked_lm": "fill-mask"}


def model_card(config: Config, summary: dict[str, Any], source: str) -> str:
    """A model card with the data, the settings and the results, in the Hub's format."""
    task = PIPELINES[config.data.task]
    results = [
        EvalResult(task_type=task, dataset_type=config.data.dataset, dataset_name=config.data.dataset,
                   dataset_split=summary["eval"]["split"], metric_type=name, metric_value=round(value, 6))
        for name, value in summary["eval"].items() if isinstance(value, float)
    ]
    data = ModelCardData(library_name="transformers", pipeline_tag=task, model_name=config.output_dir.name,
                         eval_results=results, tags=["distributed-transformers-course"])
    rows = "\n".join(f"| {r.metric_type} | {r.metric_value:.4f} |" for r in results)
    run, optim = config.run, config.optim
    return f"""---
{data.to_yaml()}
---

# {config.output_dir.name}

`{config.model.model}` fine-tuned on `{config.data.dataset}` ({config.data.task}).
The model came from: {source}. The data: {summary["data"]["source"]}.

| {summary["eval"]["split"]} split | |
|---|---|
{rows}

Trained for {summary["train"]["steps"]} steps on {summary["world_size"]} processes, global batch
{summary["train"]["global_batch_size"]}, {optim.optimizer} at a peak learning rate of {optim.learning_rate:g}
({optim.lr_scheduler}), mixed precision {summary["mixed_precision"]}, seed {run.seed}.

```python
{load_line(config)}
```
"""


def load_line(config: Config) -> str:
    """The one line that loads the trained model."""
    task, folder = PIPELINES[config.data.task], config.output_dir / MODEL
    return f'from transformers import pipeline; model = pipeline("{task}", "{folder}")'


def write_summary(config: Config, summary: dict[str, Any]) -> None:
    """Write ``summary.json``."""
    with checkpoint.saving(f"the summary in {config.output_dir}"):
        write_text(config.output_dir / SUMMARY, json.dumps(summary, indent=1) + "\n")


def git_revision() -> str | None:
    """Commit of the checkout that this code runs from; None where there is none."""
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True,
                           check=False) if shutil.which("git") else None
    return found.stdout.strip() or None if found else None
