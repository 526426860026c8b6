"""Figures for dark pages, drawn from the stored ones: lightness is turned round, a colour's hue stays.

What has no colour (paper, text, axes) changes places between white and black. What is coloured keeps its lightness,
held within what is seen on a dark ground, so that a legend's words ("blue", "orange") stay true.
"""

import io
import re

import numpy as np
from PIL import Image

LIGHT = np.array([0xFF, 0xFF, 0xFF])
DARK = np.array([0x14, 0x18, 0x1E])
"""The grounds of light and dark pages: white paper becomes exactly the second."""
INK = 0.93
"""OKLab lightness of what was black."""
COLOURED = 0.11
"""OKLab chroma from which on a colour counts as one. Below it the two rules are mixed, towards the first: pale pixels
are mostly smooth edges, which would else be lighter than what they are the edge of."""
SEEN = (0.55, 0.85)
"""OKLab lightness of colours on dark pages."""
RGB_LMS = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
LMS_LAB = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)
"""From linear sRGB to OKLab, https://bottosson.github.io/posts/oklab."""
HEX = re.compile(r"#(?:[0-9a-fA-F]{6}|[0-9a-fA-F]{3})(?![0-9a-zA-Z_-])")


def _oklab(colours: np.ndarray) -> np.ndarray:
    """sRGB colours of 0 to 255, (N, 3), in OKLab, (N, 3)."""
    share = colours / 255
    linear = np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
    return np.cbrt(linear @ RGB_LMS.T) @ LMS_LAB.T


def on_dark(colours: np.ndarray) -> np.ndarray:
    """Colours as a dark page has them.

    Args:
        colours: sRGB, (N, 3), 0 to 255.

    Returns:
        The same shape, uint8.
    """
    lab, ground = _oklab(np.asarray(colours, float)), _oklab(DARK[None].astype(float))[0]
    lightness, chroma = lab[:, 0], np.hypot(lab[:, 1], lab[:, 2])
    turned = ground[0] + (1 - lightness) * (INK - ground[0])
    mixed = np.clip(chroma / COLOURED, 0, 1) ** 1.5
    paper = (1 - mixed) * lightness  # the ground's own tint, where there was paper
    new = np.column_stack(
        [
            turned + mixed * (np.clip(lightness, *SEEN) - turned),
            lab[:, 1] + paper * ground[1],
            lab[:, 2] + paper * ground[2],
        ]
    )
    linear = (new @ np.linalg.inv(LMS_LAB).T) ** 3 @ np.linalg.inv(RGB_LMS).T
    share = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * np.clip(linear, 0, None) ** (1 / 2.4) - 0.055)
    return np.rint(np.clip(share, 0, 1) * 255).astype(np.uint8)


def png(data: bytes) -> bytes:
    """A PNG for dark pages, in as many colours as the stored one; what lies over the page is its ground."""
    picture = Image.open(io.BytesIO(data)).convert("RGBA")
    paper = Image.new("RGBA", picture.size, (*map(int, LIGHT), 255))
    pixels = np.asarray(Image.alpha_composite(paper, picture).convert("RGB"))
    colours, places = np.unique(pixels.reshape(-1, 3), axis=0, return_inverse=True)
    drawn = Image.fromarray(on_dark(colours)[places.reshape(-1)].reshape(pixels.shape))
    written = io.BytesIO()
    (drawn if len(colours) > 256 else drawn.quantize(len(colours), dither=Image.Dither.NONE)).save(
        written, "PNG", optimize=True
    )
    return written.getvalue()


def svg(text: str) -> str:
    """An SVG for dark pages: its colours changed one by one; what names none is drawn in the page's ink."""

    def changed(match: re.Match[str]) -> str:
        digits = match[0][1:] if len(match[0]) == 7 else "".join(2 * digit for digit in match[0][1:])
        return "#" + bytes(on_dark(np.array([[int(digits[at : at + 2], 16) for at in (0, 2, 4)]]))[0]).hex()

    text = re.sub(r"(?<=[:\"'])\s*(white|black)(?=[;\"'])", lambda m: {"white": "#fff", "black": "#000"}[m[1]], text)
    ink = bytes(on_dark(np.zeros((1, 3)))[0]).hex()
    return re.sub(
        r"<svg\b",
        f"<svg fill='#{ink}'" if not re.search(r"<svg\b[^>]*\bfill=", text) else "<svg",
        HEX.sub(changed, text),
        count=1,
    )
