"""``course train``: fine-tune or train a model, on the ranks that are there or on those it starts."""

import argparse
from pathlib import Path

from course_lib.cloud import container
from course_lib.commands.options import add_config_options, config_from, importing

NAME = "train"
HELP = "train a model on one process or many, and score it beside honest baselines"


def register(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_config_options(parser)
    parser.add_argument(
        "--explain",
        metavar="OPTION",
        help="tell an option's meaning, type and default, who reads it and its place in YAML, and stop",
    )


def run(args: argparse.Namespace) -> int:
    """Train; start the ranks first where they were asked for and are not there."""
    if args.explain:
        import shutil

        from course_lib.commands.explain import explained

        print(explained(args.explain, shutil.get_terminal_size().columns))
        return 0
    from course_lib.commands import accelerate_launcher

    accelerate_launcher.take(args)
    config = config_from(args)
    from course_lib.launching import cores, interrupts, launch_environment

    here = accelerate_launcher.discover()
    if config.output.push_to_hub and here.rank == 0:
        from course_lib.cloud import hub

        hub.prepare(config.output.push_to_hub, private=config.output.hub_private)  # before hours are spent
    if missing := launch_environment.to_start(here, config.run.num_processes):
        from course_lib.commands.relaunch import relaunch
        from course_lib.training.checkpoints import run_folder

        run_folder.check(config)  # before paying for the start
        if here.asked:
            print(
                f"accelerate launch was asked for {missing} processes and started one: starting the {missing} here",
                flush=True,
            )
        return relaunch(missing, args, config, output_dir=config.output_dir)
    cores.keep_to_slurm_cores()
    if here.launched:
        interrupts.end_with_launcher()
    with importing():
        from course_lib.commands.report import print_summary
        from course_lib.training import run as runs
        from course_lib.training.callbacks.progress import terminal_lines

    # a container's log has lines of its own, which the job's metric definitions read
    summary = runs.train(config, container.metric_lines() or terminal_lines(config))
    if here.rank == 0:
        print_summary(config, summary)
        if job := container.discover():
            job.collect(config.output_dir, Path(summary["model_dir"]))
        if config.output.push_to_hub:
            print(
                "pushed:",
                hub.push(Path(summary["model_dir"]), config.output.push_to_hub, private=config.output.hub_private),
                flush=True,
            )
    return 0
