"""``course dashboard``: tracked runs in the browser, served to this machine alone."""

import argparse
from pathlib import Path

from course_lib.errors import ConfigError

NAME = "dashboard"
HELP = "show tracked runs in the browser, while they train and after"


def register(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "folders", nargs="*", default=["runs"], metavar="FOLDER", help="output_dir of a run, or a folder of such [runs]"
    )
    parser.add_argument(
        "--view",
        choices=("auto", "trackio", "page"),
        default="auto",
        help="trackio's dashboard, or one page with the runs of every tracker; auto: trackio's where "
        "it has kept a run [auto]",
    )
    parser.add_argument("--port", type=int, default=7860, help="port on 127.0.0.1; 0 takes any that is free [7860]")
    parser.add_argument("--refresh", type=int, default=10, help="seconds between two looks; 0: none [10]")
    parser.add_argument("--no_browser", action="store_true", help="print the address and open no browser")


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    for folder in map(Path, args.folders):
        if not folder.is_dir():
            raise ConfigError(f"no folder {folder} of runs", "give the output_dir of a run, or a folder of such")
    from course_lib.commands import dashboard_server as servers

    kept = servers.databases(args.folders)
    if args.view == "trackio" and not kept:
        raise ConfigError(f"trackio has kept no run in {', '.join(args.folders)}", "use --view page")
    try:
        if kept and args.view != "page":
            with servers.serve_trackio(args.folders, args.port, args.refresh) as port:
                say(port, "trackio; --view page shows the runs of every tracker", args.no_browser)
                wait()
        else:
            with servers.serve(args.folders, args.port, args.refresh) as server:
                say(server.server_port, "the runs of every tracker", args.no_browser)
                server.serve_forever()
    except KeyboardInterrupt:
        return 0
    return 0


def say(port: int, what: str, no_browser: bool) -> None:
    """Print the address, and open it."""
    import webbrowser

    address = f"http://127.0.0.1:{port}/"
    print(f"dashboard: {address} ({what}; Ctrl-C ends it)", flush=True)
    if not no_browser:
        webbrowser.open(address)


def wait() -> None:
    """Until Ctrl-C."""
    import threading

    threading.Event().wait()
