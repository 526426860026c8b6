"""``course evaluate``: score a trained model on a split of a data set, on one rank or many."""

import argparse
import json

from course_lib.commands.options import add_config_options, config_from, importing

NAME = "evaluate"
HELP = "score a trained model on one split of a data set"

OF_TRAINING = (
    "num_epochs",
    "max_steps",
    "batch_size",
    "gradient_accumulation_steps",
    "global_batch_size",
    "split_batches",
    "loss_weighting",
    "logging_steps",
    "eval_steps",
    "early_stopping_patience",
    "best_metric",
    "keep_best",
    "baselines",
    "progress_bar",
)
"""Fields that a trained model's scores have no use for."""


def register(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_config_options(parser, ("data", "model", "run"), without=OF_TRAINING)
    parser.add_argument("--split", default="test", help="split to score [test]")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Evaluate; start the ranks first where they were asked for and are not there."""
    from course_lib.commands import accelerate_launcher

    accelerate_launcher.take(args)
    config = config_from(args)
    from course_lib.launching import cores, launch_environment

    here = accelerate_launcher.discover()
    if missing := launch_environment.to_start(here, config.run.num_processes):
        from course_lib.commands.relaunch import relaunch

        return relaunch(missing, args, config, trained=True)
    cores.keep_to_slurm_cores()
    with importing():
        from course_lib.commands.report import print_scores
        from course_lib.training import run as runs

    scores = runs.evaluate(config, args.split)
    if here.rank == 0:
        print(json.dumps(scores)) if args.json else print_scores(scores)
    return 0
