"""``course select``: hardware and settings for one fine-tuning task, as a training script reads them."""

import argparse
import json

NAME = "select"
HELP = "choose GPUs for a task, or with --distributed the settings of a run on some GPUs, as JSON"


def register(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--model_family",
        default="text_generation",
        metavar="NAME",
        help="text_generation, text_classification, text_embedding or text_to_text [text_generation]",
    )
    parser.add_argument("--model_name", required=True, metavar="NAME", help="a name or folder, as for `course plan`")
    parser.add_argument("--mode", default="training", metavar="TASK", help="what it is for [training]")
    parser.add_argument("--batch_size", type=int, default=8, metavar="N", help="sequences per GPU and step [8]")
    parser.add_argument("--distributed", action="store_true", help="print the settings of a run on --gpu-count GPUs")
    parser.add_argument("--gpu_count", type=int, default=1, metavar="N", help="GPUs [1]")
    parser.add_argument(
        "--gpu",
        default="A100-80",
        metavar="NAME",
        help="which, for --distributed: an accelerator or a SageMaker instance [A100-80]",
    )
    parser.add_argument("--max_memory_gb", type=float, metavar="GIB", help="plan with no more memory per GPU than this")
    parser.add_argument("--sequence_length", type=int, metavar="N", help="tokens [512, or the model's limit]")


def run(args: argparse.Namespace) -> int:
    """Ask the selector, and print its answer."""
    from course_lib.errors import ConfigError
    from course_lib.planning.selector import HardwareSelector

    selector = HardwareSelector(args.gpu, args.sequence_length)
    if not args.distributed:
        if args.max_memory_gb is not None:
            raise ConfigError(
                "--max-memory-gb limits one kind of GPU, and without --distributed all are compared",
                "add --distributed, or leave it out",
            )
        answer = selector.select_hardware_for_task(
            args.model_family, args.model_name, args.mode, args.batch_size, gpu_count=args.gpu_count
        )
    else:
        selector.require_training(args.mode)
        answer = selector.get_distributed_training_config(
            args.model_family, args.model_name, args.gpu_count, args.batch_size, args.max_memory_gb
        )
    print(json.dumps(answer, indent=2))
    return 0
