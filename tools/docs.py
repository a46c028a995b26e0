"""docs.py: mkdocs asks it for every page of the site (`make docs`); nothing of what it makes is kept in the repository.

Pages have the addresses of their sources in the repository, so links between notebooks need another ending only.
"""
import ast
import base64
import html
import inspect
import json
import posixpath
import re
import textwrap
from functools import cache
from pathlib import Path

import yaml
from latex2mathml.converter import convert as mathml
from mkdocs.structure.files import File
from readme import ROOT, text

PRESETS = ("toy", "pretraining", "benchmark")   # whose executed notebooks are shown
TEN_MINUTES = ("nbs/00_captions.ipynb", "runs/toy/main_table.ipynb", "runs/toy/ablation.ipynb",
               "runs/toy/padding.ipynb")
PLACES = {"README.md": "index.md", "nbs/index.ipynb": "index.md", "nbs/experiments": "runs/index.md",
          "runs/toy": "runs/index.md", "LICENSE": "LICENSE.txt"}   # what lies elsewhere than in the repository
DECLARED = (ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
ALONE = "---\nhide: [navigation]\n---\n"   # a page that has no neighbours to show beside it
LISTS = {   # page -> (how it opens, its notebooks; all executed ones where it names none)
    "ten-minutes.md": (ALONE + "# Ten minutes\n\nThe idea, whether it works here, which step does it, and why.",
                       TEN_MINUTES),
    "runs/index.md": ("# Experiments\n\nWhat each found; its tables and figures are a click away.", ()),
}
SETTINGS = {"parameters", "injected-parameters"}
IMPORTS = re.compile(r"(from|import) ")
INTERVAL = re.compile(r"\[(\S+), (\S+)\]")   # stays on one line
CODE_OR_LINK = r"(?s)(```.*?```|`[^`\n]*`)|\]\(([^)\s]+)([^)]*)\)"
CODE_OR_MATH = r"(?s)(```.*?```|`[^`\n]*`)|\$\$(.+?)\$\$|\$([^$\n]+)\$"


# ---- what there is

@cache
def cells(source) -> list:
    "The cells of a notebook."
    return json.loads((ROOT/source).read_text(encoding="utf-8"))["cells"]


@cache
def heading(source) -> tuple[str, str]:
    "(title, the line that says what it is about) of a notebook."
    first = next(text(cell["source"]) for cell in cells(source) if text(cell["source"]).startswith("# "))
    title, about = re.match(r"# (.*)(?:\n+> (.*))?", first).groups()
    return title, about or ""


@cache
def topics() -> dict[str, list[str]]:
    "Topic -> its notebooks, as the README's table has them."
    lines = re.findall(r"(?m)^\| (\w[\w ]*?) \| (.*nbs/\d.*) \|$", (ROOT/"README.md").read_text(encoding="utf-8"))
    return {topic: re.findall(r"\((nbs/\d\w+\.ipynb)\)", notebooks) for topic, notebooks in lines}


@cache
def executed() -> list[str]:
    "The executed notebooks, each preset's in its own order."
    found = []
    for preset in PRESETS:
        names = yaml.safe_load((ROOT/"runs"/preset/"params.yaml").read_text(encoding="utf-8"))["experiments"]
        found += [f"runs/{preset}/{name}.ipynb" for name in names]
    return [source for source in found if (ROOT/source).is_file()]


@cache
def finding(source) -> str:
    "What an executed notebook found, as it wrote it beside its numbers; '' where it wrote nothing."
    found = json.loads((ROOT/source).with_suffix(".json").read_text(encoding="utf-8"))["metrics"]
    return found.get("finding") or "\n\n".join(found.get("verdicts", []))


def report() -> list[str]:
    "The page of `debias-clip diagnose`, where the executed notebook's is there."
    return [file for file in ("runs/toy/report/diagnosis.html",) if (ROOT/file).is_file()]


def module_of(source) -> str:
    "The name of the module that a notebook of the library makes."
    return Path(source).stem[3:]


def name_of(source) -> str:
    "A notebook's name in the navigation."
    number = re.match(r"nbs/(\d+)_", source)
    return f"{number[1]} {heading(source)[0]}" if number else heading(source)[0]


def notebook(source) -> str:
    "Where a notebook that a link names is shown: an experiment as executed, one of the library by its number of today."
    name = re.sub(r"^\d+_", "", Path(source).name)
    if source.startswith("nbs/experiments/"): return next((s for s in executed() if Path(s).name == name), source)
    if (ROOT/source).is_file(): return source
    return next((f"nbs/{f.name}" for f in (ROOT/"nbs").glob(f"[0-9]*_{name}")), source)


# ---- Markdown

def linked(markdown, source, page, pages) -> str:
    "Links of a source to other sources, as links of its page to other pages; formulas as MathML."
    where = source if source.startswith("nbs/") or "/" not in source else "nbs/experiments/"   # they ran from there

    def link(match):
        code, target, rest = match.groups()
        if code or re.match(r"[a-z]+:|#", target): return match[0]
        target, hash_, anchor = target.partition("#")
        there = posixpath.normpath(posixpath.join(posixpath.dirname(where), target))
        if (ROOT/there).suffix == ".ipynb": there = notebook(there)
        content = ROOT/there
        there = PLACES.get(there) or re.sub(r"\.ipynb$", ".md", there)
        if not there.endswith(".md") and content.is_file(): pages[there] = content.read_bytes()
        return f"]({posixpath.relpath(there, posixpath.dirname(page) or '.')}{hash_}{anchor}{rest})"

    def formula(match):
        if match[2]: return f'<div class="formula">{mathml(match[2].strip(), display="block")}</div>'
        return match[0] if match[1] else mathml(match[3])

    return re.sub(CODE_OR_MATH, formula, re.sub(CODE_OR_LINK, link, markdown))


def fenced(code, kind) -> str:
    "A block of code, fenced by more backticks than it has itself."
    ticks = "`"*max(3, 1 + max(map(len, re.findall("`+", code)), default=0))
    return f"{ticks} {{ {kind} }}\n{code}\n{ticks}"


def folded(title, markdown) -> str:
    "Markdown behind a line that opens it."
    return f'??? code "{title}"\n\n{textwrap.indent(markdown, "    ")}'


def plain_table(markup) -> str:
    "A table of pandas without its own looks."
    markup = re.sub(r"(?s)<style.*?</style>", "", markup)
    return re.sub(r'\s(?:id|class|border|style)="[^"]*"', "", markup).strip()


def output_parts(cell, name, alt, pages) -> list[str]:
    "What a cell shows, but for progress bars and warnings, as Markdown. Its pictures go into `pages` under `name`."
    parts = []
    for k, output in enumerate(cell.get("outputs", [])):
        if output.get("name") == "stderr": continue
        data = {"text/plain": output["text"]} if output["output_type"] == "stream" else output.get("data", {})
        kind = next((kind for kind in ("image/svg+xml", "image/png") if kind in data), None)
        if kind:
            picture = f"{name}-{k}.{kind[6:9]}"
            content = text(data[kind])
            pages[picture] = content.encode() if kind == "image/svg+xml" else base64.b64decode(content)
            parts.append(f"![{alt}]({posixpath.basename(picture)})")
        elif "text/markdown" in data: parts.append(INTERVAL.sub(r"[\1,&nbsp;\2]", text(data["text/markdown"])))
        elif "<table" in text(data.get("text/html", "")): parts.append(plain_table(text(data["text/html"])))
        elif "text/plain" in data: parts.append(fenced(text(data["text/plain"]), ".text .output"))
    return parts


def notebook_page(source, pages) -> str:
    "A notebook as Markdown. Of an executed one the finding is on top and all code is folded."
    ran, page, parts, settings, alt = source in executed(), source.replace(".ipynb", ".md"), [], [], heading(source)[0]
    for i, cell in enumerate(cells(source)):
        written = text(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(linked(written, source, page, pages))
            alt = re.sub(r"[\[\]*`{}]", "", (re.findall(r"(?m)^#+ (.*)", written) or [alt])[-1])
            continue
        marks = set(re.findall(r"(?m)^#\| *(\w+)", written))
        if marks & {"hide", "default_exp"} or "_all_ =" in written: continue
        code = text(re.sub(r"(?m)^#\|.*\n?", "", written)).strip("\n")
        hidden = cell["metadata"].get("jupyter", {}).get("source_hidden")
        block = [fenced(code, ".python")] if code and "echo" not in marks else []
        shown = output_parts(cell, page.replace(".md", f"-{i}"), alt, pages)
        if SETTINGS & set(cell["metadata"].get("tags", [])): settings += block
        elif ran and IMPORTS.match(code): settings, parts = settings + block, parts + shown
        elif ran and "write_metrics(" in code: settings += block   # it shows a path only
        elif ran or hidden: parts += [*shown, *(folded("Code", part) for part in block)]
        elif IMPORTS.match(code): parts += [*(folded("Imports", part) for part in block), *shown]
        else: parts += block + shown
    if ran and finding(source): parts[0] = opened(parts[0], finding(source))
    if source.endswith("diagnose.ipynb") and report(): parts[0] += "\n\n[The report](report/diagnosis.html)"
    if settings: parts.append("## Settings\n\n" + folded("Parameters, imports, results", "\n\n".join(settings)))
    if source.startswith("nbs/"): parts.append(f"[API of `{module_of(source)}`](../api/{module_of(source)}.md)")
    return "\n\n".join(parts) + "\n"


def opened(first, found) -> str:
    "The first cell of an experiment, with what was found behind the title and the line that says what it is about."
    title, rest = re.match(r"(?s)(# [^\n]*\n+(?:> [^\n]*\n+)?)(.*)", first + "\n").groups()
    return f'{title}!!! success "Finding"\n\n{textwrap.indent(found, "    ")}\n\n{rest}'


# ---- the API

def described(docstring) -> str:
    "A docstring as HTML: paragraphs, and lists where each line is `name: what it is`."
    parts = []
    for block in inspect.cleandoc(docstring).split("\n\n"):
        if block.startswith(" "):
            parts.append(f"<pre><code>{html.escape(inspect.cleandoc(block))}</code></pre>")
            continue
        lines = re.sub(r"\n\s+", " ", block).split("\n")
        named = [re.match(r"([*\w]+(?:, [*\w]+)*): (.*)", line) for line in lines]
        marked = [re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(line, quote=False)) for line in lines]
        if all(named):
            items = [re.sub(r"^(.*?):", r"<code>\1</code>:", line, count=1) for line in marked]
            parts.append("<ul>" + "".join(f"<li>{item}</li>" for item in items) + "</ul>")
        else: parts.append(f"<p>{'<br>'.join(marked) if any(named) else ' '.join(marked)}</p>")
    return "\n".join(parts)


def declared_from(node) -> int:
    "The line on which a function or class begins, with its decorators."
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def signature(node, lines) -> str:
    "A function as it is declared."
    first, body = declared_from(node), node.body[0]
    head = "\n".join([*lines[first - 1:body.lineno - 1], lines[body.lineno - 1].encode()[:body.col_offset].decode()])
    return re.sub(r":\s*(#[^\n]*)?$", "", textwrap.dedent(head).strip())


def public(nodes):
    return [n for n in nodes if isinstance(n, ast.FunctionDef) and not n.name.startswith("_") and ast.get_docstring(n)]


def entry(node, lines) -> list[str]:
    "A function, class or constant as Markdown."
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        code = lines[node.lineno - 1:node.end_lineno]
        return [fenced("\n".join(code) if len(code) < 12 else f"{code[0]} …", ".python")]
    doc = ast.get_docstring(node)
    if isinstance(node, ast.FunctionDef): parts = [fenced(signature(node, lines), ".python")]
    else:
        head = lines[declared_from(node) - 1:node.lineno]
        fields = [lines[n.lineno - 1:n.end_lineno] for n in node.body if isinstance(n, ast.AnnAssign)]
        made = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__" and not fields]
        body = sum(fields, []) + [textwrap.indent(signature(n, lines), "    ") for n in made]
        parts = [fenced("\n".join([*head, *body]), ".python")]
    if doc: parts.append(described(doc))
    if isinstance(node, ast.ClassDef):
        for method in public(node.body): parts += [f"### {node.name}.{method.name}", *entry(method, lines)]
    return parts


def api_page(source) -> str:
    "The public names of a notebook's module as Markdown, in the order of the notebook."
    module = module_of(source)
    written = (ROOT/"debias_clip"/f"{module}.py").read_text(encoding="utf-8")
    tree, lines = ast.parse(written), written.split("\n")
    names, parts = [], []
    for node in tree.body:
        if not isinstance(node, DECLARED): continue
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]
        name = getattr(targets[0], "id", getattr(targets[0], "name", ""))
        if name == "__all__": names = ast.literal_eval(node.value)
        elif name in names: parts += [f"## {name}", *entry(node, lines)]
    link = f"Told step by step in the notebook [{name_of(source)}](../{source.replace('.ipynb', '.md')})."
    return "\n\n".join([f"# debias_clip.{module}", described(ast.get_docstring(tree) or ""), link, *parts]) + "\n"


# ---- pages that list others

def listed(opening, sources, page) -> str:
    "A page of notebooks: what they are about, and what they found."
    parts = [opening]
    for source in sources:
        title, about = heading(source)
        parts.append(f"## [{title}]({posixpath.relpath(source, posixpath.dirname(page) or '.')})\n\n> {about}")
        if source in executed(): parts.append(finding(source))
    return linked("\n\n".join(parts) + "\n", page, page, {})


def api_index() -> str:
    parts = ["# API", "Every public name, a page a module; each module is written in a notebook."]
    for topic, sources in topics().items():
        rows = [f"| [{module_of(s)}]({module_of(s)}.md) | {heading(s)[1]} |" for s in sources]
        parts.append("\n".join([f"## {topic.capitalize()}", "", "| module | |", "| --- | --- |", *rows]))
    return "\n\n".join(parts) + "\n"


def all_pages() -> dict[str, str | bytes]:
    "Address -> content: Markdown, or a file as it is."
    files = {"site.css": "tools/docs.css", "iframe-worker.js": "tools/docs.js"} | {file: file for file in report()}
    pages = {address: (ROOT/file).read_bytes() for address, file in files.items()}
    for source in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md"):
        page = PLACES.get(source, source)
        pages[page] = ALONE + linked((ROOT/source).read_text(encoding="utf-8"), source, page, pages)
    library = [source for sources in topics().values() for source in sources]
    for source in [*library, *executed()]: pages[source.replace(".ipynb", ".md")] = notebook_page(source, pages)
    for source in library: pages[f"api/{module_of(source)}.md"] = api_page(source)
    pages["api/index.md"] = api_index()
    for page, (opening, sources) in LISTS.items(): pages[page] = listed(opening, sources or executed(), page)
    return pages


# ---- what mkdocs calls

def on_config(config):
    def page(source): return {name_of(source): source.replace(".ipynb", ".md")}
    library = [{topic.capitalize(): [page(source) for source in sources]} for topic, sources in topics().items()]
    api = [{topic.capitalize(): [{module_of(s): f"api/{module_of(s)}.md"} for s in sources]}
           for topic, sources in topics().items()]
    config.nav = [{"Home": "index.md"}, {"Ten minutes": "ten-minutes.md"}, {"Library": library},
                  {"Experiments": ["runs/index.md", *map(page, executed()),
                                   *({"The report": file} for file in report())]},
                  {"API": ["api/index.md", *api]}, {"Changelog": "CHANGELOG.md"}, {"Contributing": "CONTRIBUTING.md"}]


def on_files(files, config):
    for file in [f for f in files if f.src_dir == config.docs_dir]: files.remove(file)
    for address, content in all_pages().items(): files.append(File.generated(config, address, content=content))
