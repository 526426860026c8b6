"""``course merge``: make a whole model of an adapter and the model that it was trained beside."""

import argparse
from pathlib import Path

from course_lib.commands.options import importing

NAME = "merge"
HELP = "merge an adapter (LoRA) into the weights of its base model, and write the whole"


def register(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("folder", type=Path, help="the adapter's folder, such as runs/NAME/model")
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder for the merged model, which from_pretrained loads",
    )


def run(args: argparse.Namespace) -> int:
    """Merge, and say how far the logits are from those of the two."""
    with importing():
        from course_lib.training.checkpoints import merging

    merged = merging.merge_folder(args.folder, args.output)
    print(
        f"{args.output}: {merged.base} with {merged.layers} adapters merged; logits of a few tokens differ by "
        f"{merged.difference:.1e} at most from those of base and adapters"
    )
    return 0
