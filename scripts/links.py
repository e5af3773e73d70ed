"""Check every relative link of every Markdown page: the file exists, and the heading that a `#fragment` names too.

Links that lead out of the project are not followed: nothing here talks to the network.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[[^\]]*\]\(([^()\s]+)\)")
FENCE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.DOTALL | re.MULTILINE)
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)


def main() -> int:
    broken = [problem for page in pages() for problem in problems(page)]
    print("\n".join(broken) or "every link leads somewhere")
    return 1 if broken else 0


def pages() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).exists()]


def problems(page: Path) -> Iterator[str]:
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        if "://" in target or target.startswith("mailto:"):
            continue
        name, _, fragment = target.partition("#")
        path = (page.parent / name) if name else page
        if not path.exists():
            yield f"{page.relative_to(ROOT)}: {target}: there is no such file"
        elif fragment and path.suffix == ".md" and fragment not in anchors(path):
            yield f"{page.relative_to(ROOT)}: {target}: there is no such heading"


def anchors(page: Path) -> set[str]:
    """Headings as link targets: lower case, spaces to hyphens, nothing but letters, digits, hyphens, underscores."""
    fenceless = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in HEADING.findall(fenceless)}


if __name__ == "__main__":
    sys.exit(main())
