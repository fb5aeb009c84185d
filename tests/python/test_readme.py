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


@pytest.mark.parametrize("code", C_PROGRAMS or MISSING)
def test_c_program(code, tmp_path):
    """Compiled and run by the README's own command."""
    if shutil.which("pkg-config") is None or subprocess.run(["pkg-config", "--exists", "xent"]).returncode:
        pytest.skip("pkg-config does not find xent: set PKG_CONFIG_PATH to the installation")
    command = re.search(r"^cc program\.c .*$", README.read_text(encoding="utf-8"), flags=re.M)
    assert command, "README.md does not say how to compile program.c"
    (tmp_path / "program.c").write_text(code)
    folder = subprocess.run(["pkg-config", "--variable=libdir", "xent"], capture_output=True, text=True).stdout.strip()
    environment = {**os.environ, "LD_LIBRARY_PATH": f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}"}
    strict = 'cc() { command cc -Wall -Wextra -Werror "$@"; }; '
    got = subprocess.run(
        ["bash", "-c", strict + command[0]], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert got.returncode == 0, got.stdout + got.stderr
    assert got.stdout


@pytest.mark.parametrize("code", PYTHON_PROGRAMS or MISSING)
def test_python_program(code, tmp_path):
    if "import torch" in code:
        pytest.importorskip("torch")
    source = tmp_path / "program.py"
    source.write_text(code)
    environment = {**os.environ, "LIBXENT_LIBRARY": lib._name} if os.sep in lib._name else None
    got = subprocess.run([sys.executable, str(source)], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert got.returncode == 0, got.stderr
    assert got.stdout
