#!/usr/bin/env python3
# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""The ABI checks, one a subcommand; Meson's suite `abi` runs them.

Exits 0 (holds), 1 (broken, with the reason on standard error) or 77 (a tool is absent: skipped).
"""

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADERS = ["xent/xent.h", "xent/xent_plugin.h", "xent/dlpack_util.h"]
STANDARDS = [("c", "c99"), ("c", "c11"), ("c++", "c++11"), ("c++", "c++17"), ("c++", "c++20")]
STRICT = ["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only"]
ALLOWED_NEEDED = re.compile(
    r"^(libhwy\.so\.\d+|libstdc\+\+\.so\.6|libgcc_s\.so\.1|lib(m|c|dl|rt|pthread)\.so\.\d+|ld-linux.*)$"
)


def broken(*reasons):
    for reason in reasons:
        print(reason, file=sys.stderr)
    sys.exit(1)


def skip(reason):
    print(f"skipped: {reason}", file=sys.stderr)
    sys.exit(77)


def need(tool):
    return shutil.which(tool) or skip(f"no {tool}")


def output(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def include_args(args):
    return ["-I", str(ROOT / "include")] + (["-isystem", args.dlpack] if args.dlpack else [])


def declared_functions():
    text = (ROOT / "include/xent/xent.h").read_text()
    return set(re.findall(r"^XENT_API\b[^;(]*?\b(xent_\w+)\(", text, re.MULTILINE))


def map_symbols(path):
    """name -> node. Wildcards hide mistakes, so `local: *` is the only one allowed."""
    found = {}
    text = re.sub(r"#[^\n]*", "", path.read_text())
    for node, body in re.findall(r"(\w*)\s*\{(.*?)\}", text, re.DOTALL):
        exported = re.search(r"global:(.*?)local:\s*\*;", body, re.DOTALL) or broken(f"{path}: no 'local: *;'")
        for name in exported.group(1).split(";"):
            if name.strip():
                found[name.strip()] = node
    if any("*" in name for name in found):
        broken(f"{path}: exports by wildcard")
    return found


def exported_symbols(library):
    """name -> node"""
    lines = output(need("nm"), "-D", "--defined-only", library).splitlines()
    pairs = [line.split()[-1].partition("@@") for line in lines if line.split()[-2] != "A"]
    return {name: node for name, _, node in pairs}


def compare(left_name, left, right_name, right):
    return [f"{name}: in {left_name}, not in {right_name}" for name in sorted(set(left) - set(right))] + [
        f"{name}: in {right_name}, not in {left_name}" for name in sorted(set(right) - set(left))
    ]


def check_headers(args):
    compilers = [pair for pair in (("gcc", "g++"), ("clang", "clang++")) if all(map(shutil.which, pair))]
    if not compilers:
        skip("neither gcc nor clang")
    failures = []
    for compiler in compilers:
        for language, standard in STANDARDS:
            for header in HEADERS:
                # Twice: the include guard holds.
                code = f"#include <{header}>\n#include <{header}>\nextern int unused;\n"
                command = [
                    compiler[language == "c++"],
                    "-x",
                    language,
                    f"-std={standard}",
                    *STRICT,
                    *include_args(args),
                    "-",
                ]
                done = subprocess.run(command, input=code, text=True, capture_output=True, check=False)
                if done.returncode:
                    failures.append(f"{header} with {compiler[language == 'c++']} {standard}:\n{done.stderr}")
    if failures:
        broken(*failures)


def check_symbols(args):
    mapped = map_symbols(ROOT / "abi/libxent.map")
    rows = [line.split() for line in (ROOT / "abi/symbols.txt").read_text().splitlines() if line and line[0] != "#"]
    listed = {row[0]: row[1] for row in rows}
    exported = exported_symbols(args.library)
    problems = compare("xent.h", declared_functions(), "abi/libxent.map", mapped)
    problems += compare("abi/libxent.map", mapped, "abi/symbols.txt", listed)
    problems += compare("abi/libxent.map", mapped, "the library", exported)
    problems += [
        f"{name}: node {mapped[name]} in the map, {where.get(name)} in {which}"
        for which, where in (("abi/symbols.txt", listed), ("the library", exported))
        for name in mapped
        if name in where and where[name] != mapped[name]
    ]
    if [row[0] for row in rows] != sorted(listed):
        problems.append("abi/symbols.txt: not sorted, or a name twice")
    if problems:
        broken(*problems)


def check_plugin(args):
    mapped = map_symbols(ROOT / "abi/plugin.map")
    problems = compare("abi/plugin.map", mapped, "the plugin", exported_symbols(args.library))
    if problems:
        broken(*problems)


def check_link(args):
    """A C program that takes every function's address links, and none is NULL."""
    names = sorted(declared_functions())
    code = "#include <stddef.h>\n#include <xent/xent.h>\nint main(void) {\n  int missing = 0;\n"
    code += "".join(
        f"  void (*volatile f{i})(void) = (void (*)(void)){n};\n  missing += f{i} == NULL;\n"
        for i, n in enumerate(names)
    )
    code += "  return missing;\n}\n"
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder) / "link.c", Path(folder) / "link"
        source.write_text(code)
        library = Path(args.library).resolve()
        subprocess.run(
            ["cc", "-std=c99", *include_args(args), source, library, f"-Wl,-rpath,{library.parent}", "-o", program],
            check=True,
        )
        subprocess.run([program], check=True)


def check_elf(args):
    readelf = need("readelf")
    problems = []
    dynamic = output(readelf, "-dW", args.library)
    problems += [
        f"needs {name}, which is not on the allow-list"
        for name in re.findall(r"\(NEEDED\).*\[(.*?)\]", dynamic)
        if not ALLOWED_NEEDED.match(name)
    ]
    if args.soname and f"[{args.soname}]" not in dynamic:
        problems.append(f"SONAME is not {args.soname}")
    if re.search(r"\((TEXTREL)\)", dynamic):
        problems.append("has text relocations")
    stack = re.search(r"GNU_STACK.*?\s(R\w* ?E?)\s", output(readelf, "-lW", args.library))
    if stack is None or "E" in stack.group(1):
        problems.append("the stack is executable")
    if problems:
        broken(*(f"{args.library}: {problem}" for problem in sorted(set(problems))))


def dump(library, out, dlpack):
    flags = ["--exported-interfaces-only", "--drop-private-types", "--no-show-locs", "--no-elf-needed"]
    flags += ["--no-corpus-path", "--no-comp-dir-path", "--type-id-style", "hash", "--headers-dir", ROOT / "include"]
    if dlpack:
        flags += ["--headers-dir", dlpack]
    subprocess.run([need("abidw"), *flags, "--out-file", out, library], check=True)


def check_abidiff(args):
    """abidiff's exit status is a bit field; a reordered field sets bit 4 alone, so any bit fails."""
    reference = ROOT / f"abi/{platform.machine()}-linux-gnu.abi"
    if not reference.exists():
        skip(f"no {reference.name}")
    abidiff = need("abidiff")
    with tempfile.TemporaryDirectory() as folder:
        now = Path(folder) / "now.abi"
        dump(args.library, now, args.dlpack)
        done = subprocess.run([abidiff, reference, now], capture_output=True, text=True, check=False)
        if done.returncode:
            broken(done.stdout, f"abidiff: {done.returncode}. If the change is meant: abi/README.md, then "
                   f"tests/abi_check.py dump {args.library} {reference.relative_to(ROOT)}")  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dlpack", default="", help="folder of dlpack/dlpack.h where it is not the compiler's own")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("headers").set_defaults(run=check_headers)
    for name, run in (
        ("symbols", check_symbols),
        ("plugin", check_plugin),
        ("link", check_link),
        ("abidiff", check_abidiff),
    ):
        command = commands.add_parser(name)
        command.set_defaults(run=run)
        command.add_argument("library")
    command = commands.add_parser("elf")
    command.set_defaults(run=check_elf)
    command.add_argument("library")
    command.add_argument("--soname", default="")
    command = commands.add_parser("dump", help="write the reference that `abidiff` compares with")
    command.set_defaults(run=lambda args: dump(args.library, args.out, args.dlpack))
    command.add_argument("library")
    command.add_argument("out")
    args = parser.parse_args()
    os.environ["LC_ALL"] = "C"
    args.run(args)


if __name__ == "__main__":
    main()
