"""Cleans texts before they are tokenized."""

import html
import unicodedata


def clean(text: str, lowercase: bool = False) -> str:
    """HTML entities unescaped, Unicode in its composed form (NFC, UAX 15), each run of white space one space.

    Args:
        text: as it was read.
        lowercase: also lower the case.
    """
    text = " ".join(unicodedata.normalize("NFC", html.unescape(text)).split())
    return text.lower() if lowercase else text
