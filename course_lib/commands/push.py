"""``course push``: bring a trained model to the Hugging Face Hub."""

import argparse
from pathlib import Path

NAME = "push"
HELP = "bring a trained model to the Hugging Face Hub"


def register(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("folder", type=Path, help="the model's folder, such as runs/quickstart/model")
    parser.add_argument(
        "--push_to_hub",
        metavar="NAME",
        help="repository, NAME or OWNER/NAME [the folder's name, of runs/tweets/model `tweets`]",
    )
    parser.add_argument("--hub_private", action="store_true", help="make the repository private, where it is made now")


def run(args: argparse.Namespace) -> int:
    """Send the folder as one commit."""
    from course_lib.cloud import hub

    print(hub.push(args.folder, args.push_to_hub or repository(args.folder), private=args.hub_private), flush=True)
    return 0


def repository(folder: Path) -> str:
    """Repository's name for a model's folder: the run's, where it is the `model` in it."""
    named = folder.resolve()
    return named.parent.name if named.name == "model" else named.name
