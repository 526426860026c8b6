"""The combinations of axes that are refused, each with the reason and what to do instead; what no row names runs."""

from course_lib.config.axes import ENGINES, Refusal

NAMES = ("torch", "scratch", "deepspeed", "accelerate")
"""Of all engines."""
ZERO, SHARDED = "zero1|zero2|zero3", "zero1|zero2|zero3|fsdp"
ACCELERATED = {"training_type": "accelerated"}

REFUSALS: tuple[Refusal, ...] = (
    # --- engines ---
    *(
        Refusal(
            ("ddp|basic" if strategy == "ddp" else strategy, "|".join(name for name in NAMES if name not in known)),
            "engine {engine} has no {strategy}",
            f"for {strategy} use {', '.join(known)}",
        )
        for strategy, known in ENGINES.items()
    ),
    # --- one process ---
    Refusal(
        ("basic", "tensor|context|experts"),
        "training_type basic runs one process, and {1} is for several that share a model",
        "use --training_type accelerated",
        ACCELERATED,
    ),
    Refusal(
        ("basic", SHARDED),
        "training_type basic runs one process, and {strategy} shares state among several",
        "use --training_type accelerated",
        ACCELERATED,
    ),
    Refusal(
        ("basic", "offload|groups|async_save"),
        "training_type basic runs one process, and {1} is for ranks that share state",
        "leave it out, or use --training_type accelerated --strategy fsdp",
    ),
    # --- less communication ---
    Refusal(
        ("communication", f"basic|pipeline|{SHARDED}|torch|deepspeed|accelerate"),
        "communication {communication} is between whole copies of a model, as strategy ddp with engine scratch has",
        "use --training_type accelerated --strategy ddp --engine scratch, or leave it out",
        ACCELERATED | {"strategy": "ddp", "engine": "scratch"},
    ),
    Refusal(
        ("communication", "tensor|context|experts"),
        "communication {communication} is between whole copies of a model with rows of their own, and {1} leaves a "
        "rank a part of one",
    ),
    # --- pipelines ---
    Refusal(
        ("pipeline", "deepspeed|accelerate"),
        "engine {engine} has no pipelines here",
        "use --engine torch",
        {"engine": "torch"},
    ),
    Refusal(
        ("pipeline", "zero2|zero3"),
        "{strategy} moves gradients or parameters with every micro-batch, of which a pipeline has many in flight",
        "use --strategy ddp, zero1 or fsdp, which moves them once a batch",
    ),
    Refusal(
        ("pipeline", "fsdp", "scratch"),
        "engine scratch moves gradients and parameters of fsdp with every micro-batch, of which a pipeline has many in "
        "flight",
        "use --engine torch, or --strategy zero1",
        {"engine": "torch"},
    ),
    Refusal(
        ("pipeline", "experts"),
        "expert_parallel_size sends tokens in each layer on all its ranks at once, and the stages of a pipeline take "
        "turns",
    ),
    Refusal(
        ("pipeline", "context"),
        "pipelines send whole rows from stage to stage, and context_parallel_size cuts them",
        "use --training_type accelerated",
        ACCELERATED,
    ),
    Refusal(
        ("pipeline", "lora"),
        "lora_r goes beside layers of a whole model, and a pipeline's ranks have stages of it",
        "use --training_type accelerated",
        ACCELERATED,
    ),
    Refusal(
        ("pipeline", "adafactor"),
        "pipelines cannot store adafactor's state, which is not of its parameters' shape",
        "use --optimizer adamw or sgd",
    ),
    Refusal(
        ("pipeline", "muon"),
        "muon looks for the blocks of a whole model, and a pipeline's stage has some of them",
        "use --optimizer adamw or sgd",
    ),
    Refusal(
        ("split_backward", "compile"),
        "torch_compile makes one backward of a block, which schedule {schedule} takes apart",
        "use gpipe, 1f1b, interleaved or looped_bfs",
    ),
    Refusal(
        ("split_backward", "checkpointing"),
        "schedule {schedule} splits the backward, and with activation_checkpointing each half would compute the "
        "forward again",
        "use gpipe, 1f1b, interleaved or looped_bfs",
    ),
    Refusal(
        ("pipeline", "split_batches"), "split_batches is not for pipelines", "give batch_size as rows per pipeline"
    ),
    # --- layers that ranks share ---
    Refusal(
        ("tensor", "deepspeed|accelerate"),
        "engine {engine} does not sum gradients over the copies of a shard alone, which tensor_parallel_size needs",
        "use --engine scratch",
        {"engine": "scratch"},
    ),
    Refusal(
        ("tensor", "ddp", "torch"),
        "Accelerate's DDP sums gradients over all ranks, and those of tensor_parallel_size have shards of their own",
        "use --engine scratch",
        {"engine": "scratch"},
    ),
    Refusal(
        ("sequence", "accelerated", SHARDED, "torch"),
        "engine torch has parameters of its own, and sequence_parallel sums gradients at the model's",
        "use --engine scratch",
        {"engine": "scratch"},
    ),
    Refusal(
        ("tensor", "adafactor|muon"),
        "{optimizer} needs whole rows and columns, which tensor_parallel_size divides",
        "use --optimizer adamw or sgd",
    ),
    # --- experts and tokens that ranks share ---
    Refusal(
        ("experts", "tensor|context"),
        "expert_parallel_size is for ranks with different rows, and those of {1} have the same",
    ),
    Refusal(
        ("experts", "zero1|zero2", "deepspeed"),
        "DeepSpeed is not told here which ranks have other experts",
        "use --engine scratch",
        {"engine": "scratch"},
    ),
    Refusal(
        ("experts", "deepspeed|accelerate"),
        "engine {engine} is not told here which ranks have other experts",
        "use --engine torch",
        {"engine": "torch"},
    ),
    Refusal(
        ("experts", "ddp|zero1", "torch"),
        "torch's DDP sums gradients over all ranks, and those of expert_parallel_size have experts of their own",
        "use --engine scratch, or --strategy fsdp",
        {"engine": "scratch"},
    ),
    Refusal(
        ("experts", "zero3|fsdp", "scratch"),
        "engine scratch gathers whole layers on every rank, and expert_parallel_size keeps experts apart",
        "use --engine torch, or --strategy ddp, zero1 or zero2",
        {"engine": "torch"},
    ),
    Refusal(
        ("experts", "adafactor|muon"),
        "{optimizer} is for whole copies of a model, and expert_parallel_size leaves a rank some experts",
        "use --optimizer adamw or sgd",
    ),
    Refusal(
        ("context", "classification"),
        "context_parallel_size is for losses of every token, and classification reads one of a row",
        "leave it out, or use --task causal_lm or masked_lm",
    ),
    # --- adapters ---
    Refusal(
        ("lora", "tensor|experts"),
        "lora_r goes beside whole matrices, and {1} leaves a rank shards of them",
        "leave one of the two out, or shard by --strategy fsdp, without {1}",
    ),
    Refusal(
        ("lora", "communication"),
        "communication {communication} is for gradients and weights of a whole model, and lora_r leaves a hundredth of "
        "them",
    ),
    Refusal(
        ("lora", "adafactor|muon"),
        "{optimizer} looks at an update's whole matrix, and lora_r trains two factors of it",
        "use --optimizer adamw or sgd",
        {"optimizer": "adamw"},
    ),
    Refusal(
        ("lora", "offload"),
        "offload moves the optimizer's state off the GPU, and lora_r leaves next to none",
        "leave it out; --load_in_4bit and --strategy fsdp make the frozen weights small",
    ),
    Refusal(
        ("4bit", "deepspeed"),
        "load_in_4bit keeps weights as bytes, and DeepSpeed casts all parameters to the run's precision",
        "use --engine torch or scratch",
        {"engine": "torch"},
    ),
    Refusal(("4bit", "compile"), "torch_compile cannot see into the unpacking of load_in_4bit"),
    # --- optimizers ---
    Refusal(
        (SHARDED, "adafactor"),
        "{strategy} cannot shard adafactor: its update of an element needs whole rows and columns",
        "use --optimizer adamw or sgd, or --strategy ddp",
    ),
    Refusal(
        (SHARDED, "muon"),
        "{strategy} cannot shard muon: its update of an element needs whole matrices",
        "use --optimizer adamw or sgd, or --strategy ddp",
    ),
    # --- where state lies ---
    Refusal(
        ("offload", "cpu"),
        "offload moves state off a GPU, and this run is on the CPU",
        "use --offload none",
        {"offload": None},
    ),
    Refusal(("offload|groups", "pipeline|tensor|experts"), "no engine has {0} beside {1}"),
    Refusal(
        ("offload", f"ddp|{ZERO}|scratch", "torch|scratch"),
        "offload {offload} is not in engine {engine} with {strategy}",
        "use --strategy zero3 --engine deepspeed, or --strategy fsdp --engine torch",
    ),
    Refusal(
        # Accelerate would put DeepSpeed's Adam in its place (accelerate.utils.map_pytorch_optim_to_deepspeed).
        ("offload", "deepspeed", "sgd"),
        "DeepSpeed steps on the host by AdamW alone, and the optimizer is {optimizer}",
        "use --optimizer adamw, or --strategy fsdp --engine torch",
    ),
    Refusal(
        ("offload_parameters", "zero1|zero2"),
        "{strategy} keeps whole parameters, so they cannot be offloaded",
        "use --offload optimizer, or --strategy zero3",
    ),
    Refusal(
        ("groups", f"ddp|{ZERO}|scratch|accelerate"),
        "shard_group_size is for --strategy fsdp --engine torch",
        "leave it out",
    ),
    Refusal(
        ("async_save", "ddp"),
        "async_save is for strategies that shard state",
        "leave it out, or use zero1 … fsdp",
    ),
    # --- compilers, kernels, precision ---
    Refusal(
        ("compile", "fast_kernels"),
        "cpu_kernels fast is not for torch_compile, which makes kernels of its own",
    ),
    Refusal(
        ("compile", "profile"),
        "profile counts PyTorch's operators, which torch_compile replaces by kernels of its own",
        "leave one of the two out, or record with --profile_steps alone",
        {"profile": None, "profile_steps": "3"},
    ),
    Refusal(("fp16", "cpu"), "mixed_precision fp16 has no use on a CPU", "use bf16 or no, or --device cuda"),
    Refusal(
        ("fp16", "pipeline|tensor|experts"),
        "fp16 needs a loss scaler that knows all ranks of {1}",
        "use --mixed_precision bf16 or no",
    ),
    Refusal(
        ("fp16", "scratch"),
        "engine scratch does not scale losses, which fp16 needs",
        "use --mixed_precision bf16, or --engine torch",
    ),
    Refusal(
        ("fp16", SHARDED, "torch|accelerate"),
        "fp16 needs a loss scaler that knows the shards of {strategy}",
        "use --mixed_precision bf16, or --engine deepspeed",
    ),
    # --- what is watched ---
    Refusal(
        ("watch", "tensor|experts"), "watch {watch}: {1} leaves a rank shards of gradients", "use --watch parameters"
    ),
    Refusal(
        ("watch", SHARDED, "deepspeed|scratch|pipeline"),
        "watch {watch}: the gradients of {strategy} are in flat buffers of the engine {engine}",
        "use --watch parameters",
    ),
    # --- engines on devices ---
    Refusal(
        ("accelerate", "cpu"),
        "Accelerate's FSDP plugin does not know CPU processes and would run DDP in silence",
        "use --engine torch, which runs the same fully_shard on CPU and GPU",
        {"engine": "torch"},
    ),
    Refusal(("deepspeed", "mps"), "DeepSpeed does not run on this GPU", "use --engine torch or --device cpu"),
)
"""In order: of several that hold, the first is told."""
