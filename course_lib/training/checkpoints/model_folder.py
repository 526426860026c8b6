"""The trained model in Hugging Face form: its files, its card, and the line that loads it."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import EvalResult, ModelCardData
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from course_lib.config import Config
from course_lib.modeling.loading import LoadedModel
from course_lib.modeling.lora_files import save_adapter
from course_lib.training.checkpoints import checkpoint, second_start
from course_lib.training.checkpoints.run_folder import BASE, MODEL
from course_lib.training.unwrapping import deepspeed_left_alone
from course_lib.writing import write_text


def write_model(
    folder: Path,
    model: PreTrainedModel,
    weights: dict[str, torch.Tensor],
    tokenizer: PreTrainedTokenizerBase,
    card: str,
    base: str | None = None,
    revision: str | None = None,
) -> None:
    """Write model, tokenizer and card in Hugging Face form, beside their place, and rename.

    ``transformers.pipeline`` and ``from_pretrained`` load the folder; one with adapters ``peft.PeftModel``.

    Args:
        folder: to write.
        model: its weights may be elsewhere.
        weights: whole, since a sharded model's own are in shards; of a model with adapters what is trained.
        tokenizer: the model's.
        card: text of README.md.
        base: where a model with adapters has its frozen weights; None: the model has none.
        revision: of a base on the Hub.
    """
    beside = folder.with_name(f".{folder.name}.writing")
    with checkpoint.saving(f"the model in {folder}"):
        try:
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir(parents=True)
            logging.disable_progress_bar()  # one file, one line of noise
            with deepspeed_left_alone():
                if base is None:
                    model.save_pretrained(beside, state_dict=weights)
                else:
                    save_adapter(model, beside, base, weights, revision=revision)
                    model.config.architectures = [type(model).__name__]
                    model.config.save_pretrained(beside)  # names of classes, which an adapter's own files do not have
            tokenizer.save_pretrained(beside)
            write_text(beside / "README.md", card)
            shutil.rmtree(folder, ignore_errors=True)
            beside.rename(folder)
        finally:
            logging.enable_progress_bar()
            shutil.rmtree(beside, ignore_errors=True)


def base_folder(config: Config, origin: str | None, load: Callable[[], LoadedModel]) -> str | None:
    """Folder of the frozen weights beside a run's adapters; None for a run without.

    A preset's new weights, and embeddings that were grown, are nowhere else: they are written beside the adapters.

    Args:
        config: the run's.
        origin: folder or Hub name of the weights that training began with, where there is one.
        load: makes these weights anew.
    """
    if config.adapter.lora_r is None:
        return None
    if origin is not None:
        return str(Path(origin).resolve()) if Path(origin).is_dir() else origin
    loaded, folder = load(), (config.output_dir / BASE).resolve()
    write_model(
        folder,
        loaded.model,
        loaded.model.state_dict(),
        loaded.tokenizer,
        f"The base model of the adapters in ../{MODEL}: {loaded.source}.\n",
    )
    return str(folder)


PIPELINES = {"classification": "text-classification", "causal_lm": "text-generation", "masked_lm": "fill-mask"}


def model_card(config: Config, summary: dict[str, Any], source: str, base: str | None = None) -> str:
    """A model card with the data, the settings and the results, in the Hub's format.

    Args:
        config: the run's.
        summary: of it.
        source: where the model came from.
        base: where an adapter's frozen weights are; None for a whole model.
    """
    task = PIPELINES[config.data.task]
    results = [
        EvalResult(
            task_type=task,
            dataset_type=config.data.dataset,
            dataset_name=config.data.dataset,
            dataset_split=summary["eval"]["split"],
            metric_type=name,
            metric_value=round(value, 6),
        )
        for name, value in summary["eval"].items()
        if isinstance(value, float)
    ]
    data = ModelCardData(
        library_name="peft" if base else "transformers",
        pipeline_tag=task,
        model_name=config.output_dir.name,
        eval_results=results,
        tags=["distributed-transformers-course"],
    )
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
{_of_adapters(config)}"""


def _of_adapters(config: Config) -> str:
    """What a card says of adapters, and how they come into the base model's weights."""
    adapter = config.adapter
    if adapter.lora_r is None:
        return ""
    beside = "weights in 4 bits (NF4)" if adapter.load_in_4bit else "frozen weights"
    return (
        f"\nAdapters (LoRA) of rank {adapter.lora_r} beside {beside}; "
        f"`course merge {config.output_dir / MODEL} --output DIR` makes a whole model of them.\n"
    )


def load_line(config: Config) -> str:
    """The one line that loads the trained model."""
    task, folder = PIPELINES[config.data.task], config.output_dir / MODEL
    if config.adapter.lora_r is not None:
        return (
            f"from course_lib.modeling import load_trained; "
            f'model = load_trained("{folder}", "{config.data.task}").model'
        )
    return f'from transformers import pipeline; model = pipeline("{task}", "{folder}")'
