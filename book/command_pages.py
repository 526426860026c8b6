"""The reference of the command line, from its parser: a page for each command."""

import argparse
import re

from course_lib.cli import command_line

HIDDEN = argparse.SUPPRESS
TITLES = {"positional arguments": "Arguments"}


def pages() -> dict[str, str]:
    """The pages by their path: an overview, and one for each command."""
    parser, commands = command_line()
    listed = {choice.dest: choice.help or "" for choice in commands._choices_actions}
    overview = [
        "# The command line\n",
        f"{escaped(parser.description or '')} `-` and `_` are alike in option names.\n",
        "Two that need no command:\n",
        *_options(parser, parser._optionals),
        "| command | what it does |\n|---|---|",
        *(f"| [`course {name}`]({name}.md) | {escaped(text)} |" for name, text in listed.items()),
        "\n```{toctree}\n:hidden:\n",
        *listed,
        "```\n",
    ]
    made = {f"command-line/{name}.md": _page(commands.choices[name], text) for name, text in listed.items()}
    return {"command-line/index.md": "\n".join(overview), **made}


def _page(parser: argparse.ArgumentParser, said: str) -> str:
    usage = re.sub(r"\n +", "\n    ", re.sub(r"^usage: ", "", parser.format_usage()).rstrip())
    lines = [
        f"# course {parser.prog.rpartition(' ')[2]}\n",
        f"{escaped(sentence(said)).rstrip('.')}.\n",
        f"```text\n{usage}\n```\n",
    ]
    for group in parser._action_groups:
        shown = _options(parser, group)
        if shown:
            title = group.title or ""
            lines.append(f"## {sentence(TITLES.get(title, title))}\n")
            if group.description:
                lines.append(f"{escaped(sentence(group.description))}.\n")
            lines += shown
    if parser.epilog:
        lines.append(escaped(parser.epilog))
    return "\n".join(lines) + "\n"


def _options(parser: argparse.ArgumentParser, group: argparse._ArgumentGroup) -> list[str]:
    """A definition for each option of a group."""
    formatter = parser.formatter_class(prog=parser.prog)
    lines = []
    for action in group._group_actions:
        if action.help is HIDDEN or isinstance(action, argparse._SubParsersAction):
            continue
        value = (
            ""
            if action.nargs == 0
            else formatter._format_args(
                action,
                formatter._get_default_metavar_for_optional(action)
                if action.option_strings
                else formatter._get_default_metavar_for_positional(action),
            )
        )
        names = ", ".join(action.option_strings) or value
        head = f"`{names} {value}`" if action.option_strings and value else f"`{names}`"
        said = formatter._expand_help(action) if action.help else "as the Hugging Face Trainer has it"
        lines.append(f"{head}\n: {escaped(' '.join(said.split()))}\n")
    return lines


def sentence(text: str) -> str:
    """A phrase with a capital."""
    return text[:1].upper() + text[1:]


def escaped(text: str) -> str:
    """Plain text as Markdown that reads the same; what stands between backticks stays code."""
    parts = text.split("`")
    if len(parts) % 2 == 0:
        return re.sub(r"([\\`*_<\[\]$|{}])", r"\\\1", text)
    return "`".join(part if at % 2 else re.sub(r"([\\*_<\[\]$|{}])", r"\\\1", part) for at, part in enumerate(parts))
