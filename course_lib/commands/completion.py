"""``course --print-completion``: by its script the shell completes commands, options and their values."""

import argparse

SHELLS = ("bash", "zsh", "fish")
FILES, FOLDERS = ("FILE", "PATH"), ("FOLDER", "DIR")
"""Metavars of arguments that are files or folders."""


def run(parser: argparse.ArgumentParser, shell: str) -> int:
    """Print the completion script of the whole command line; it starts no Python when it is used."""
    import shtab

    from course_lib.config import options

    choices = {option.name: option.choices or (("true", "false") if option.is_flag else None) for option in options()}
    for command in (parser, *_commands(parser)):
        for action in command._actions:
            if action.metavar in (*FILES, *FOLDERS):
                action.complete = shtab.FILE if action.metavar in FILES else shtab.DIRECTORY  # type: ignore[attr-defined]
            elif action.choices is None and choices.get(action.dest):
                action.choices = choices[action.dest]  # nothing is parsed with this parser, so nothing is refused
    print(shtab.complete(parser, shell))
    return 0


def _commands(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    return [
        command
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for command in action.choices.values()
    ]
