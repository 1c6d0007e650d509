"""Where the package's own files lie: in a wheel, in an editable install and in a bare checkout."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


def properties_dir() -> Path:
    """The folder `properties/` of this plugin.

    A wheel carries it inside the package, a checkout (editable or not) beside it.

    Raises:
        FileNotFoundError: neither exists, so the installation is broken.
    """
    inside, beside = _PACKAGE / "properties", _PACKAGE.parent / "properties"
    for folder in (inside, beside):
        if (folder / "overall.yaml").is_file():
            return folder
    raise FileNotFoundError(
        f"properties/overall.yaml is neither in {inside} nor in {beside}: reinstall recbole_dgr2"
    )


def prompt_file(name: str) -> Path:
    """A prompt by its name in properties/prompt/, or by its path (anything with a folder or `.yaml` in it)."""
    if name.endswith(".yaml") or Path(name).name != name:
        return Path(name)
    return properties_dir() / "prompt" / f"{name}.yaml"


def host_dir() -> Path:
    """The folder of the installed RecBole, found without importing it."""
    spec = find_spec("recbole")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("recbole is not installed: pip install 'recbole>=1.2.0,<1.3'")
    return Path(spec.origin).parent
