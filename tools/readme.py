"""readme.py: writes the front page nbs/index.ipynb as markdown (`make readme`); tests check that they agree."""
import json, posixpath, re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

def _text(lines) -> str: return "".join(lines).rstrip()

def _link(match) -> str:
    "A link as seen from nbs/, seen from the root."
    target = match[2]
    return match[0] if re.match(r"[a-z]+:|#|/", target) else f"{match[1]}({posixpath.normpath('nbs/' + target)}{match[3]})"

def _outputs(cell) -> list[str]:
    "Markdown as it is, other text fenced; pictures are linked from the prose."
    data = [{"text/plain": o["text"]} if o["output_type"] == "stream" else o.get("data", {}) for o in cell["outputs"] if o.get("name") != "stderr"]
    return [_text(d["text/markdown"]) if "text/markdown" in d else f"```\n{_text(d['text/plain'])}\n```" for d in data if "text/plain" in d]

def readme(notebook=ROOT/"nbs"/"index.ipynb") -> str:
    "The notebook as markdown: without cells marked `#| hide`, without the code of those marked `#| echo: false`, without directives."
    parts = []
    for cell in json.loads(Path(notebook).read_text(encoding="utf-8"))["cells"]:
        source = _text(cell["source"])
        if cell["cell_type"] == "markdown": parts.append(source); continue
        marks = set(re.findall(r"(?m)^#\| *(.*?) *$", source))
        if "hide" in marks: continue
        code = _text(re.sub(r"(?m)^#\|.*\n?", "", source)).strip("\n")
        if code and "echo: false" not in marks: parts.append(f"```python\n{code}\n```")
        parts += _outputs(cell)
    body = re.sub(r"(\[[^\]]*\])\(([^)\s]+)([^)]*)\)", _link, "\n\n".join(p for p in parts if p))
    return "<!-- Written from nbs/index.ipynb by `make readme`; edit that. -->\n" + body + "\n"

if __name__ == "__main__": (ROOT/"README.md").write_text(readme(), encoding="utf-8")
