"""``course dashboard``: tracked runs in the browser, served to this machine alone."""

import argparse
from pathlib import Path

from course_lib.errors import ConfigError

NAME = "dashboard"
HELP = "show tracked runs in the browser, while they train and after"


def register(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("folders", nargs="*", default=["runs"], metavar="FOLDER",
                        help="output_dir of a run, or a folder of such [runs]")
    parser.add_argument("--port", type=int, default=7860, help="port on 127.0.0.1; 0 takes any that is free [7860]")
    parser.add_argument("--refresh", type=int, default=10, help="seconds between two looks; 0: none [10]")
    parser.add_argument("--no_browser", action="store_true", help="print the address and open no browser")


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    for folder in map(Path, args.folders):
        if not folder.is_dir():
            raise ConfigError(f"no folder {folder} of runs", "give the output_dir of a run, or a folder of such")
    import webbrowser

    from course_lib.commands.dashboard_server import ADDRESS, serve

    with serve(args.folders, args.port, args.refresh) as server:
        address = f"http://{ADDRESS}:{server.server_port}/"
        print(f"dashboard: {address} (Ctrl-C ends it)", flush=True)
        if not args.no_browser:
            webbrowser.open(address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0
