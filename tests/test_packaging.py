"""The package's files are found in a wheel, in an editable install and in a bare checkout."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHOW = "import recbole_dgr2.system.paths as p; print(p.properties_dir())"
DEEP = "from recbole_dgr2.schema import options_of; assert 'tau' in options_of('DGR2', 'toy')"


def setup_cfg() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def run(code: str, folder: Path, path: Path) -> Path:
    """Run code in `folder` with `path` alone added to the import path; the path it prints."""
    command = [sys.executable, "-c", f"import sys; sys.path[0] = {str(path)!r}; {code}"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def test_every_package_is_listed() -> None:
    listed = setup_cfg()["options"]["packages"].split()
    there = sorted(
        ".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "recbole_dgr2").rglob("__init__.py")
    )
    assert sorted(listed) == sorted([*there, "recbole_dgr2.properties"])


def test_every_import_is_a_requirement() -> None:
    text = setup_cfg()["options"]["install_requires"]
    for name in (
        "torch",
        "recbole",
        "transformers",
        "peft",
        "accelerate",
        "tokenizers",
        "safetensors",
        "rich",
    ):
        assert f"\n{name}>=" in text


def test_constraints_pin_exactly() -> None:
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        assert line.startswith("#") or "==" in line.split(";")[0]


def test_bare_checkout(tmp_path: Path) -> None:
    shutil.copytree(
        ROOT / "recbole_dgr2", tmp_path / "recbole_dgr2", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copytree(ROOT / "properties", tmp_path / "properties")
    assert run(SHOW, tmp_path, tmp_path) == tmp_path / "properties"


def test_missing_properties_say_so(tmp_path: Path) -> None:
    shutil.copytree(
        ROOT / "recbole_dgr2", tmp_path / "recbole_dgr2", ignore=shutil.ignore_patterns("__pycache__")
    )
    with pytest.raises(AssertionError, match="reinstall recbole_dgr2"):
        run(SHOW, tmp_path, tmp_path)


@pytest.mark.slow
def test_wheel(tmp_path: Path) -> None:
    """Built with the setuptools at hand, without a network; unpacked, it works alone."""
    pytest.importorskip("setuptools")
    source = tmp_path / "source"
    source.mkdir()
    for name in ("setup.cfg", "pyproject.toml", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source / name)
    for name in ("recbole_dgr2", "properties", "dataset"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = "from setuptools.build_meta import build_wheel; build_wheel('..')"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    shipped = {
        f"recbole_dgr2/properties/{path.relative_to(ROOT / 'properties').as_posix()}" for path in yamls()
    }
    assert shipped <= set(names)
    assert not [name for name in names if name.startswith(("dataset", "tests", "properties"))]
    inside = tmp_path / "site" / "recbole_dgr2" / "properties"
    assert run(f"{DEEP}; {SHOW}", tmp_path, tmp_path / "site") == inside


def yamls() -> list[Path]:
    return list((ROOT / "properties").rglob("*.yaml"))


@pytest.mark.slow
def test_command_line_help_lists_every_option() -> None:
    done = subprocess.run(
        [sys.executable, "run_recbole_dgr2.py", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for key in ("retriever", "tau", "block_size", "conversion_ar_weight", "seed"):
        assert f"  --{key}=" in done.stdout
    assert "properties/model/DGR2.yaml" in done.stdout


@pytest.mark.slow
def test_command_line_errors_are_one_line() -> None:
    pytest.importorskip("recbole_dgr2.quick_start")
    done = subprocess.run(
        [sys.executable, "run_recbole_dgr2.py", "--dataset=ml-100k", "--tua=0.5"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("error: tua (command line)")
    assert "Traceback" not in done.stderr
