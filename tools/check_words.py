"""Refuse name look-ups that can hang, unpickling of foreign data, and words that are not the field's."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FORBIDDEN = {
    r"\bgetfqdn\b": "a host's own name may not resolve; publish addresses",
    r"\bgethostbyname\w*\b": "use getaddrinfo, which knows IPv6",
    r"\bgethostbyaddr\b|\bgetnameinfo\b": "nothing may wait for reverse DNS",
    r"\bpickle\.loads?\b": "nothing that came from a store or socket is unpickled",
}
WORDS = {
    r"\bslabs?\b": "allocation, receive pool",
    r"\bparcels?\b": "payload, outgoing objects",
    r"\benvelopes?\b": "header",
    r"\bletter_size\b|\bholds_letter\b": "metadata",
    r"\bverbs?\b": "operation, method",
    r"\bthis room\b|\bper room\b|\brooms\b": "package",
    r"\b(the|native) doors?\b": "adapter",
    r"\bsheets?\b": "buffer table",
    r"\bcircles?\b": "cycle",
    r"\bdeposit(s|ed)?\b": "copy in",
    r"\b(is|are|was) told\b": "receives, is notified",
    r"\bwell or badly\b": "with or without an error",
    r"\bloans?\b|\blends?\b": "exposure",
    r"(?<!never )\b(lies?|lying)\b": "is in, the offset of, in place",
    r"\bgoodbye\b|\bcache announcements?\b": "notifies, cache line",
    r"\bdivided anew\b": "re-bucketed",
    r"\ba (?!one\b|once\b|euro|again\b)[aeio][a-z]{2}": 'the article is "an"',
    r"\bhears?\b": "receives, is notified",
    r"\b(is|are|was|were|when|not) over\b(?! (the|its|a|an|TCP)\b)": "has completed, has ended",
}
PLACES = ("src/**/*.py", "native/**/*.?pp", "tests/**/*.py", "examples/*.py", "benchmarks/*.py", "README.md")
PLACES += ("docs/*.md", "docs/design/*.md", "docs/guide/*.md")
MAY_UNPICKLE = {
    "src/procgroup/launch/spawning/spawn.py",  # what the parent process wrote for its own children
    "src/procgroup/groups/pickling.py",  # what the program itself sends by object operations
    "src/procgroup/launch/elastic.py",  # what the ranks that it started have left in its own folder
    "src/procgroup/launch/function_worker.py",  # what its parent process has left there
}


def main() -> int:
    found = 0
    for path in sorted(path for place in PLACES for path in ROOT.glob(place)):
        name = path.relative_to(ROOT).as_posix()
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            for pattern, reason in (WORDS if name.startswith("tests/") else FORBIDDEN | WORDS).items():
                if "pickle" in pattern and name in MAY_UNPICKLE:
                    continue
                if match := re.search(pattern, line, re.IGNORECASE if pattern in WORDS else 0):
                    print(f"{name}:{number}: {match.group()}: {reason}")
                    found += 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
