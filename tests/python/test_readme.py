# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""The programs of README.md do what a reader will do with them: build, run and end well."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from libxent._library import lib

README = pathlib.Path(__file__).resolve().parents[2] / "README.md"


def programs(language, whole):
    text = README.read_text(encoding="utf-8") if README.exists() else ""
    found = re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.M | re.S)
    return [pytest.param(code, id=f"{language}{index}") for index, code in enumerate(found) if whole in code]


C_PROGRAMS = programs("c", "int main")
PYTHON_PROGRAMS = programs("python", "import")
MISSING = [pytest.param(None, marks=pytest.mark.skip(reason="README.md shows no such program"))]


def flags():
    if shutil.which("pkg-config") is None or subprocess.run(["pkg-config", "--exists", "xent"]).returncode:
        pytest.skip("pkg-config does not find xent: set PKG_CONFIG_PATH to the installation")
    found = subprocess.run(["pkg-config", "--cflags", "--libs", "xent"], capture_output=True, text=True, check=True)
    return found.stdout.split()


@pytest.mark.parametrize("code", C_PROGRAMS or MISSING)
def test_c_program(code, tmp_path):
    source, program = tmp_path / "program.c", tmp_path / "program"
    source.write_text(code)
    compiler = os.environ.get("CC", "cc")
    link = flags()
    subprocess.run([compiler, "-Wall", "-Wextra", "-Werror", str(source), *link, "-o", str(program)], check=True)
    folders = [flag[2:] for flag in link if flag.startswith("-L")]
    path = ":".join([*folders, os.environ.get("LD_LIBRARY_PATH", "")])
    got = subprocess.run([str(program)], capture_output=True, text=True, env={**os.environ, "LD_LIBRARY_PATH": path})
    assert got.returncode == 0, got.stdout + got.stderr
    assert got.stdout


@pytest.mark.parametrize("code", PYTHON_PROGRAMS or MISSING)
def test_python_program(code, tmp_path):
    source = tmp_path / "program.py"
    source.write_text(code)
    environment = {**os.environ, "LIBXENT_LIBRARY": lib._name} if os.sep in lib._name else None
    got = subprocess.run([sys.executable, str(source)], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert got.returncode == 0, got.stderr
    assert got.stdout
