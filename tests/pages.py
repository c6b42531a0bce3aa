"""The pages for readers, taken apart: fenced blocks and the commands in them."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

# Commands of the pages that are not ours and that no test runs, by their first words, and why not.
NOT_RUN = {
    ("python3", "-m", "venv"): "the tests run in an environment",
    ("source",): "the same",
    ("pip", "install"): "needs the network",
    (".venv/bin/pip", "install"): "needs the network; .ci/run runs README's line",
    (".venv/bin/python", "-m", "pytest"): "is these tests",
    ("python", "-m", "pytest"): "is these tests",
    ("python", "-m", "bench.tables"): "rewrites pages; tests/test_tables.py compares them",
    ("git", "clone"): "needs the network",
    ("kill", "-HUP"): "needs a process; tests/test_reconfigure.py sends the signal",
    ("vllm", "serve"): "needs vLLM and a GPU",
    ("python", "-m", "sglang.launch_server"): "needs SGLang and a GPU",
    ("python", "convert_hf_to_gguf.py"): "needs llama.cpp",
    ("llama-server",): "needs llama.cpp",
    ("python", "-m", "bench.reliability", "fuzz"): "takes minutes; tests/test_fuzz.py runs what it runs",
}


@dataclass(frozen=True)
class Block:
    """What stands between two fences of a page: its language and text, and the heading that it stands under."""

    language: str
    text: str
    heading: str

    @property
    def file(self) -> str | None:
        """The file that it is: its first line is `# name`, with an ending."""
        named = re.match(r"# ([a-z-]+\.[a-z]+)\n", self.text)
        return named and named[1]


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    heading = ""
    parts = re.compile(r"^#+ ([^\n]+)$|^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    for match in parts.finditer(page.read_text(encoding="utf-8")):
        if match[1] is not None:
            heading = match[1]
        else:
            yield Block(match[2], match[3], heading)


def commands(text: str) -> list[list[str]]:
    """The command lines of a bash block as words: comments gone, continued lines joined, `&&` taken apart."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while "&&" in words:
            found.append(words[: words.index("&&")])
            words = words[words.index("&&") + 1 :]
        found.append(words)
    return [words for words in found if words]
