"""Packages of npm that the book and its test use: one version each, held to its hash, fetched once.

They lie in .venv/npm, with all else that the set-up fetched, so that a second `make book` needs no network.
"""

import base64
import hashlib
import io
import shutil
import subprocess
import sys
import tarfile
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INSTALLED = ROOT / ".venv" / "npm"
PACKAGES = {
    "mathjax": ("4.1.3", "BN/8Pkgn7G1pIDYJqd9md+JHsE/jydSYbyOZnSdSA0WziuVO8mRxdYiWFumkVVly/8U+hm9DpIIoWuvySverzw=="),
    "@mathjax/mathjax-newcm-font": (
        "4.1.3",
        "gzAB3dFHilHX1l5x2xUqRL+1jDQt3Fyza1DkEMVXWC4E8SvsGdlgEza47HYi2WhVcgfkvf4zgUGzuhbq3Pjlew==",
    ),
    "pyodide": ("314.0.7", "0YvXxEhfEdpLfb/XkM2BFAeMROq0iMUX2bzzH9pOttyMcWkwq+HbE5uyuGD82LN7y2q+SNvi/6V5JEsOlD2R1A=="),
    "axe-core": ("4.14.1", "FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ=="),
    "@fontsource-variable/source-serif-4": (
        "5.3.1",
        "4Rtay22SC4lMvw11r/+9kxANB6P3M0X8s1NudBC2v0J1KU2y3DcMoNcT3lBoZ/CqLirzf+StlO6UlJilyrvaUg==",
    ),
    "@fontsource-variable/inter": (
        "5.3.0",
        "OupL48va4JNofb97w6NYeF9S7W/kHNKM0Er8Dem5nqi4jeOLrVJDoE8tZEpnMJmtkvNbB1EIPPwHcdkF6b1oUA==",
    ),
    "@fontsource-variable/jetbrains-mono": (
        "5.3.0",
        "F32xpS2NsGYoQi2ADSkKTgpJj7ozajsGgDJ8woTnqjmIB+dxDIqImjl4pXZVEExu8UFZ2ndhmX18EBS/hdz3Lw==",
    ),
}
"""Version, and the SHA-512 that npm publishes of its archive, by name."""


class NotFetched(Exception):
    """A package is not there and cannot be fetched: what, and what to do instead."""


def folder(name: str) -> Path:
    """Where a package's files are; it is fetched if they are not there yet.

    Args:
        name: a key of ``PACKAGES``.
    Raises:
        NotFetched: no registry answers, or the archive is not the one that is pinned.
    """
    version, integrity = PACKAGES[name]
    there = INSTALLED / f"{name.rpartition('/')[2]}-{version}"
    if not there.is_dir():
        archive = fetched(name, version)
        said = base64.b64encode(hashlib.sha512(archive).digest()).decode()
        if said != integrity:
            raise NotFetched(f"{name} {version} is not the archive that is pinned: do not use it; try another registry")
        there.parent.mkdir(parents=True, exist_ok=True)
        beside = there.with_name(f".{there.name}.writing")
        shutil.rmtree(beside, ignore_errors=True)
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(beside, filter="data")
        (beside / "package").rename(there)
        beside.rmdir()
    return there


def fetched(name: str, version: str) -> bytes:
    """A package's archive, from the registry that npm is configured to use, or from npm's own."""
    registry = "https://registry.npmjs.org/"
    if npm := shutil.which("npm"):
        asked = subprocess.run([npm, "config", "get", "registry"], capture_output=True, text=True, timeout=60)
        registry = asked.stdout.strip() or registry
    try:
        address = f"{registry.rstrip('/')}/{name}/-/{name.rpartition('/')[2]}-{version}.tgz"
        with urllib.request.urlopen(address, timeout=60) as answer:
            return answer.read()
    except OSError as error:
        raise NotFetched(
            f"{name} {version} cannot be fetched from {registry} ({error}): check the network, or name a "
            "mirror with `npm config set registry`"
        ) from error


if __name__ == "__main__":
    try:
        for each in sys.argv[1:] or PACKAGES:
            print(folder(each).relative_to(ROOT))
    except NotFetched as problem:
        sys.exit(f"book: {problem}")
