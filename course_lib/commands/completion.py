"""``course --install-completion``: the shell completes commands, options and their values."""

import argparse
import os
from pathlib import Path

from course_lib.errors import ConfigError, CourseError
from course_lib.writing import write_text

PLACES = {
    "bash": (
        ".local/share/bash-completion/completions/course",
        "new shells read it where the package bash-completion is installed, others by `source {}` in ~/.bashrc",
    ),
    "zsh": (
        ".local/share/zsh/site-functions/_course",
        "put `fpath+=({folder}); autoload -Uz compinit; compinit` into ~/.zshrc",
    ),
    "fish": (".config/fish/completions/course.fish", "new shells read it"),
}
"""By shell: the file, from the home folder, and what else is to be done."""
FILES, FOLDERS = ("FILE", "PATH"), ("FOLDER", "DIR")
"""Metavars of arguments that are files or folders."""


def install(parser: argparse.ArgumentParser, shell: str | None) -> int:
    """Write the completion script of a shell, by default the user's, into the user's home.

    Raises:
        ConfigError: another shell.
        CourseError: the file cannot be written.
    """
    shell = shell or Path(os.environ.get("SHELL", "bash")).name
    if shell not in PLACES:
        raise ConfigError(f"no completion for the shell `{shell}`", f"name one of {', '.join(PLACES)}")
    place, then = PLACES[shell]
    path = Path.home() / place
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, script(parser, shell))
    except OSError as error:
        raise CourseError(f"cannot write {path} ({error.strerror})", "give HOME a folder that can be written") from None
    print(f"written: {path}; {then.format(path, folder=path.parent)}")
    return 0


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The completion script of the whole command line; it starts no Python when it is used."""
    import shtab

    from course_lib.config import options

    choices = {option.name: option.choices or (("true", "false") if option.is_flag else None) for option in options()}
    for command in (parser, *_commands(parser)):
        for action in command._actions:
            if action.metavar in (*FILES, *FOLDERS):
                action.complete = shtab.FILE if action.metavar in FILES else shtab.DIRECTORY  # type: ignore[attr-defined]
            elif action.choices is None and choices.get(action.dest):
                action.choices = choices[action.dest]  # nothing is parsed with this parser, so nothing is refused
    return shtab.complete(parser, shell)


def _commands(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    return [
        command
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for command in action.choices.values()
    ]
