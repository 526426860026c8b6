"""Config sections of the training itself: data, model, adapters, optimizer, length and output of the run."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt

from course_lib.config.fields import Fraction, NotNegative, Positive, Strict
from course_lib.errors import ConfigError

OFFLINE_NAMES = ("tweets", "pydocs")
"""Data sets that every machine has; their texts are cleaned for any task."""


@dataclass(frozen=True, kw_only=True)
class DataConfig(Strict):
    """Examples, and their way into batches of token ids."""

    dataset: str = "tweets"
    """`tweets` (bundled), `pydocs` (this machine's Python documentation), a Hub name, or a local file or folder."""
    dataset_config: str | None = None
    """Configuration name of a Hub data set that has several."""
    text_column: str | None = None
    """Column that holds the text; found by itself for known data sets and usual names."""
    label_column: str | None = None
    """Column that holds the class; found by itself for known data sets and usual names."""
    separator: Literal[",", ";", "|", "tab"] | None = None
    """What separates the columns of a CSV file; default: the one by which all its first rows have as many."""
    quoting: Literal["none", "minimal", "escaped"] | None = None
    """What quotes mean in CSV and TSV files: `minimal`, the default, they enclose a field, and doubled stand in it; \
`escaped`, a backslash stands before them in it; `none`, characters of the texts."""
    encoding: str | None = None
    """Encoding of local files of text, as in cp1252; default: what a byte-order mark says, else UTF-8."""
    train_split: str = "train"
    """Split to train on."""
    validation_split: str = "validation"
    """Split to evaluate on during training; cut from the training split where there is none."""
    test_split: str = "test"
    """Split held out to the end; cut from the training split where there is none."""
    validation_fraction: Annotated[float, Gt(0), Lt(1)] = 0.1
    """Share of the training split to cut off for validation, and as much for a test split, where they are missing."""
    task: Literal["classification", "causal_lm", "masked_lm"] = "classification"
    """What the model learns to predict."""
    max_length: Annotated[int, Ge(4)] = 128
    """Tokens at which an example is truncated, or the length of a block in language modelling."""
    packing: Literal["wrapped", "best_fit"] = "wrapped"
    """How texts fill the rows of a causal language model: `wrapped`, all as one stream, cut into blocks; `best_fit`, \
whole texts share a row and see each other not, and only one longer than max_length is cut."""
    chat_template: str | None = None
    """Jinja template that makes a text of a conversation (`messages`): `chatml` or a file; default: the tokenizer's."""
    streaming: bool = False
    """Read the training files as they are needed, and write nothing of them; for a \
causal language model, with max_steps, and with a validation file beside them."""
    stream_window: Positive = 10_000
    """Consecutive texts of a stream that are shuffled, and wrapped or packed, together; as many are held."""
    mlm_probability: Annotated[float, Gt(0), Lt(1)] = 0.15
    """Share of tokens to predict in masked language modelling."""
    clean_text: bool | None = None
    """Normalise Unicode (NFC), unescape HTML entities, fold white space; default: for classification, and for \
`tweets` and `pydocs`; any other text a language model learns as it is in the file."""
    lowercase: bool = False
    """Lower-case the text before tokenizing."""
    max_train_samples: Positive | None = None
    """Use only the first so many training rows, or as many drawn in each class where the first lack some."""
    max_eval_samples: Positive | None = None
    """Use only the first so many rows of each evaluation split, or as many drawn in each class likewise."""
    group_by_length: bool = True
    """Build global batches of examples of similar length: less padding, the same number of steps."""
    pad_to_multiple_of: Positive | None = None
    """Round the padded length up to a multiple; default: 8 on GPUs, whose tensor cores multiply in eights, where \
lengths vary; else 1."""
    dynamic_padding: bool = True
    """Pad to the longest row of a micro-batch; otherwise always to max_length."""
    num_workers: NotNegative | None = None
    """Worker processes that collate batches, a rank; default: on GPUs up to 4, as far as the machine has cores and \
shared memory for them; on CPUs 0, as the ranks fill the cores."""
    pin_memory: bool = True
    """Collate into page-locked memory where there is a GPU."""

    @property
    def has_one_length(self) -> bool:
        """Whether all batches are as long: blocks of a language model, or rows that are padded to max_length."""
        return (self.task == "causal_lm" and self.packing == "wrapped") or not self.dynamic_padding


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Strict):
    """Model, and settings of its forward pass."""

    model: str = "minilm"
    """Preset (`minilm`, `tiny-bert`, `tiny-gpt2`, `tiny-llama`, `tiny-olmoe`, `tiny-mixtral`), Hub name, or local \
folder."""
    revision: str | None = None
    """Branch, tag or commit of a Hub model."""
    activation_checkpointing: bool = False
    """Recompute activations in backward rather than keep them."""
    torch_compile: bool = False
    """Compile each block of the model with torch.compile before it is sharded; for fixed shapes where all rows are of \
one length (causal_lm, or dynamic_padding false), else for any."""
    attention: Literal["auto", "sdpa", "eager"] = "auto"
    """Attention implementation; auto is sdpa where the model has it."""
    attention_dropout: Annotated[float, Ge(0), Lt(1)] | None = None
    """Share of the weights of attention to drop in training; default: what the model's config says, 0.1 in BERT and \
GPT-2."""


@dataclass(frozen=True, kw_only=True)
class AdapterConfig(Strict):
    """Fine-tuning of few parameters: LoRA, and QLoRA."""

    lora_r: Positive | None = None
    """Train two thin matrices of this rank beside each chosen linear layer, and a classifier's head, rather than all \
weights (LoRA, arXiv 2106.09685); 8 and 16 are usual."""
    lora_alpha: Annotated[float, Gt(0)] | None = None
    """The two matrices count lora_alpha / lora_r times; default: twice lora_r."""
    lora_dropout: Fraction = 0.0
    """Share of what goes into the two matrices to drop in training."""
    lora_targets: str | None = None
    """Names of the layers to train beside, or their ends, between commas, as in q_proj,v_proj; default: all linear \
layers of the blocks (QLoRA, arXiv 2305.14314)."""
    load_in_4bit: bool = False
    """Keep the blocks' frozen weights in 4 bits (NF4, QLoRA), and unpack a layer's while it computes."""

    @property
    def targets(self) -> list[str] | None:
        """The names in ``lora_targets``; None: by default."""
        return None if self.lora_targets is None else [name.strip() for name in self.lora_targets.split(",")]


def check_adapters(adapter: AdapterConfig) -> None:
    """Refuse names of layers that are none.

    Raises:
        ConfigError: an empty name.
    """
    if adapter.targets is not None and not all(adapter.targets):
        raise ConfigError(f"lora_targets `{adapter.lora_targets}` has an empty name", "give names between commas")


@dataclass(frozen=True, kw_only=True)
class OptimConfig(Strict):
    """Optimizer: from a gradient to a step."""

    optimizer: Literal["adamw", "sgd", "adafactor", "muon"] = "adamw"
    """Rule that turns gradients into updates; muon is for the matrices of the blocks, and adamw for all else there."""
    learning_rate: Annotated[float, Gt(0)] = 5e-5
    """Peak learning rate."""
    weight_decay: Annotated[float, Ge(0)] = 0.01
    """Decoupled weight decay; not applied to biases and norms, by name and layer as in the Hugging Face Trainer."""
    adam_beta1: Fraction = 0.9
    """Decay of the first moment."""
    adam_beta2: Fraction = 0.999
    """Decay of the second moment."""
    adam_epsilon: Annotated[float, Gt(0)] = 1e-8
    """Added to the denominator of the update."""
    momentum: Fraction = 0.9
    """Momentum of SGD and Muon."""
    max_grad_norm: Annotated[float, Ge(0)] = 1.0
    """Clip the gradient to this global L2 norm; 0 turns clipping off."""
    label_smoothing_factor: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Share of each target that the training loss spreads over all classes or tokens; evaluations score without."""
    router_aux_loss_coef: Annotated[float, Ge(0)] = 0.0
    """Adds to the loss of a mixture of experts its routers' auxiliary loss times this, which evens the experts' load: \
over the tokens of a micro-batch on all ranks, of the mean layer."""
    lr_scheduler: Literal[
        "linear",
        "cosine",
        "constant",
        "constant_with_warmup",
        "cosine_with_restarts",
        "polynomial",
        "inverse_sqrt",
        "cosine_with_min_lr",
        "cosine_warmup_with_min_lr",
        "warmup_stable_decay",
    ] = "linear"
    """Shape of the learning rate after warm-up; all but the first three are those of Transformers."""
    lr_scheduler_kwargs: str | None = None
    """What else the shape takes, as a JSON object: `{"num_cycles": 1}`."""
    warmup_ratio: Annotated[float, Ge(0), Le(1)] = 0.0
    """Share of all steps over which the learning rate rises from 0."""
    warmup_steps: NotNegative = 0
    """Steps of warm-up; overrides warmup_ratio where above 0."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(Strict):
    """Length of the run, its devices, and when it evaluates, logs and saves."""

    training_type: Literal["basic", "accelerated", "pipeline"] = "accelerated"
    """Trainer: the plain PyTorch loop on one device, Accelerate on all ranks, or stages of the model on the ranks."""
    num_processes: Positive | None = None
    """Ranks that must take part; default: those that are there, one where nothing launched us."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Kind of device to train on; auto takes a GPU where there is one."""
    mixed_precision: Literal["auto", "no", "fp16", "bf16"] = "auto"
    """Autocast dtype; `auto` is bf16 where the hardware multiplies it natively, else no."""
    tf32: Literal["auto", "on", "off"] = "auto"
    """Let GPUs round the operands of float32 matrix products to 10 bits (TF32), several times as fast; auto does so \
under bf16 and fp16, and not where mixed_precision is no, which asks for float32."""
    cpu_kernels: Literal["torch", "fast", "auto"] = "auto"
    """What computes dropout, and attention with dropout, in training on CPUs: torch, or fast kernels of this course, \
which draw other masks, together with a malloc that keeps freed memory for the rest of the process; auto is torch for \
training_type basic and under torch_compile, else fast."""
    num_epochs: Annotated[float, Gt(0)] = 3
    """Passes over the training split; may be a fraction."""
    max_steps: Positive | None = None
    """Stop after so many optimizer steps, whatever num_epochs says."""
    batch_size: Positive = 16
    """Rows per process in one micro-batch."""
    eval_batch_size: Positive = 64
    """Rows per process in one evaluation batch."""
    gradient_accumulation_steps: Positive = 1
    """Micro-batches per process in one optimizer step."""
    global_batch_size: Positive | None = None
    """Rows of an optimizer step over all processes, however many there are: gradient_accumulation_steps follows, and \
batch_size is the most that a micro-batch may have."""
    split_batches: bool = False
    """Read batch_size as rows over all processes rather than a process."""
    loss_weighting: Literal["token", "micro_batch"] = "token"
    """Weigh micro-batches by their targets (the large batch's gradient) or equally (the naive way)."""
    seed: NotNegative = 42
    """Seed of initialisation, data order, masking and dropout."""
    deterministic: bool = False
    """Use operators that give the same bits in every run, and refuse those that cannot."""
    data_seed: NotNegative | None = None
    """Seed of the order of the rows; default: seed."""
    drop_last: bool = False
    """Leave out the last rows of an epoch where they fill no global batch."""
    logging_steps: NotNegative | None = 10
    """Optimizer steps between two logged lines; none: each epoch; 0: only at the end."""
    logging_first_step: bool = False
    """Log the first step too."""
    eval_steps: NotNegative | None = None
    """Optimizer steps between two evaluations; default: each epoch; 0: only at the end."""
    eval_delay: Annotated[float, Ge(0)] = 0.0
    """Steps before the first evaluation during training, or epochs where each is evaluated."""
    early_stopping_patience: Positive | None = None
    """Stop after so many evaluations without a better metric."""
    best_metric: Literal["loss", "accuracy", "macro_f1", "perplexity"] | None = None
    """Evaluation metric that decides which model is best; default: macro_f1, or loss without classes."""
    keep_best: bool = True
    """End with the weights of the best evaluation rather than the last."""
    baselines: bool = True
    """Also score the majority class and TF-IDF with logistic regression (classification only)."""
    progress_bar: bool = True
    """Show a progress bar on rank 0."""


@dataclass(frozen=True, kw_only=True)
class OutputConfig(Strict):
    """Files of the run: which are kept, where, and the checkpoint to go on from."""

    output_dir: str = "runs/{dataset}-{model}-{training_type}"
    """Folder of the run; names of fields in braces are filled in."""
    overwrite_output_dir: bool = False
    """Replace a run that already stands in output_dir."""
    save_steps: NotNegative | None = None
    """Optimizer steps between two checkpoints; default: each epoch; 0: none."""
    save_total_limit: Positive | None = 2
    """Checkpoints to keep; the best one is kept besides."""
    resume_from_checkpoint: str | None = None
    """Checkpoint folder to go on from, `latest` for the newest whole one in output_dir, or `auto`: that one where \
there is one, else from the start."""
    async_save: bool = False
    """Go on training while a checkpoint is written (strategies that shard state)."""
    push_to_hub: str | None = None
    """Repository of the Hub, NAME or OWNER/NAME, to send the trained model to; needs HF_TOKEN or `hf auth login`."""
    hub_private: bool = False
    """Make that repository private, where it is not there yet."""
