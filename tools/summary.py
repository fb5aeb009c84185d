#!/usr/bin/env python3
# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""Adds up test results: tools/summary.py NAME=FILE...

FILE is a JUnit XML file, or a text file "passed failed skipped". A file that is missing counts as one failure, since
its suite did not run to its end. Prints a table and, alone on the last line, 'N passed, N failed, N skipped'.
"""

import sys
import xml.etree.ElementTree as ET
from pathlib import Path


def count_junit(text):
    """(passed, failed, skipped, [(test, reason skipped)])"""
    passed = failed = skipped = 0
    reasons = []
    for case in ET.fromstring(text).iter("testcase"):
        skip = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            failed += 1
        elif skip is not None or case.get("result") == "skipped" or case.get("status") == "notrun":
            skipped += 1
            message = skip.get("message") if skip is not None else None
            reasons.append((case.get("name"), (message or "").strip().splitlines()))
        else:
            passed += 1
    return passed, failed, skipped, reasons


def main(arguments):
    total = [0, 0, 0]
    why = {}
    print(f"{'suite':<34}{'passed':>8}{'failed':>8}{'skipped':>9}")
    for argument in arguments:
        name, _, file = argument.partition("=")
        try:
            text = Path(file).read_text()
            if text.lstrip().startswith("<"):
                *counts, reasons = count_junit(text)
            else:
                counts, reasons = [int(word) for word in text.split()], []
            note = ""
        except (OSError, ValueError, ET.ParseError):
            counts, reasons, note = [0, 1, 0], [], "  (no result)"
        print(f"{name:<34}{counts[0]:>8}{counts[1]:>8}{counts[2]:>9}{note}")
        total = [a + b for a, b in zip(total, counts)]
        for _, message in reasons:
            reason = message[-1].strip() if message else "no reason given"
            why[reason] = why.get(reason, 0) + 1
    for reason, times in sorted(why.items(), key=lambda item: -item[1]):
        print(f"  skipped {times:>5}: {reason[:110]}")
    print(f"{total[0]} passed, {total[1]} failed, {total[2]} skipped")
    return 1 if total[1] or not total[0] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
