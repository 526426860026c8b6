"""The trained model in Hugging Face form: its files, its card, and the line that loads it."""

import shutil
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import EvalResult, ModelCardData
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from course_lib.config import Config
from course_lib.training.checkpoints import checkpoint, second_start
from course_lib.training.checkpoints.run_folder import MODEL
from course_lib.training.unwrapping import deepspeed_left_alone
from course_lib.writing import write_text


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
            with deepspeed_left_alone():
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
    ends = {name: f"{low:.4f} to {high:.4f}" for name, (low, high) in summary["eval"]["interval95"].items()}
    rows = "\n".join(f"| {r.metric_type} | {r.metric_value:.4f} | {ends.get(r.metric_type, '')} |" for r in results)
    run, optim = config.run, config.optim
    changes = "".join(f"- {line}.\n" for line in second_start.history(summary["train"]["changes"]))
    if changes:
        changes = f"\nIt was resumed with other settings, of which those above are the last:\n\n{changes}"
    return f"""---
{data.to_yaml()}
---

# {config.output_dir.name}

`{config.model.model}` fine-tuned on `{config.data.dataset}` ({config.data.task}).
The model came from: {source}. The data: {summary["data"]["source"]}.

| {summary["eval"]["split"]} split, {summary["eval"]["rows"]} rows | | 95 % interval |
|---|---|---|
{rows}

Trained for {summary["train"]["steps"]} steps on {summary["world_size"]} processes, global batch
{summary["train"]["global_batch_size"]}, {optim.optimizer} at a peak learning rate of {optim.learning_rate:g}
({optim.lr_scheduler}), mixed precision {summary["mixed_precision"]}, seed {run.seed}.
{changes}
```python
{load_line(config)}
```
"""


def load_line(config: Config) -> str:
    """The one line that loads the trained model."""
    task, folder = PIPELINES[config.data.task], config.output_dir / MODEL
    return f'from transformers import pipeline; model = pipeline("{task}", "{folder}")'
