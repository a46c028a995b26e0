"""readme.py: writes the front page nbs/index.ipynb as markdown (`make readme`); tests check that they agree."""
import json
import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEAD = "<!-- Written from nbs/index.ipynb by `make readme`; edit that. -->\n"
LINK = r"(\[[^\]]*\])\(([^)\s]+)([^)]*)\)"


def text(lines) -> str:
    "A cell's or an output's lines as one text."
    return "".join(lines).rstrip()


def from_root(link) -> str:
    "A link as seen from nbs/ (a match of LINK), as seen from the root."
    shown, target, title = link.groups()
    if re.match(r"[a-z]+:|#|/", target): return link[0]
    return f"{shown}({posixpath.normpath('nbs/' + target)}{title})"


def output_parts(cell) -> list[str]:
    "Markdown outputs as they are, other text fenced. Pictures are linked from the prose."
    parts = []
    for output in cell["outputs"]:
        if output.get("name") == "stderr": continue
        data = {"text/plain": output["text"]} if output["output_type"] == "stream" else output.get("data", {})
        if "text/markdown" in data: parts.append(text(data["text/markdown"]))
        elif "text/plain" in data: parts.append(f"```\n{text(data['text/plain'])}\n```")
    return parts


def cell_parts(cell) -> list[str]:
    "A cell as markdown: nothing where it is marked `#| hide`, no code where it is marked `#| echo: false`."
    source = text(cell["source"])
    if cell["cell_type"] == "markdown": return [source]
    marks = set(re.findall(r"(?m)^#\| *(.*?) *$", source))
    if "hide" in marks: return []
    code = text(re.sub(r"(?m)^#\|.*\n?", "", source)).strip("\n")
    shown = [f"```python\n{code}\n```"] if code and "echo: false" not in marks else []
    return shown + output_parts(cell)


def readme(notebook=ROOT/"nbs"/"index.ipynb") -> str:
    "The notebook as markdown."
    cells = json.loads(Path(notebook).read_text(encoding="utf-8"))["cells"]
    parts = [part for cell in cells for part in cell_parts(cell) if part]
    return HEAD + re.sub(LINK, from_root, "\n\n".join(parts)) + "\n"


if __name__ == "__main__": (ROOT/"README.md").write_text(readme(), encoding="utf-8")
