"""The site of `make docs`: it holds every notebook, no link is broken, and a browser reads and searches it offline."""
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from browser import needs_chromium, tab

REPO = Path(__file__).parents[1]
MKDOCS = shutil.which("mkdocs", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
FRONT, LIBRARY, EXPERIMENT, API = "index.html", "nbs/12_losses.html", "runs/toy/main_table.html", "api/captions.html"
pytestmark = [pytest.mark.long, pytest.mark.skipif(MKDOCS is None, reason="no mkdocs; `make docs` installs it")]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    build = [MKDOCS, "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(build, cwd=REPO, env=quiet, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def served(site):
    "The site's address on this machine."
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_): pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def window(tmp_path_factory):
    with tab(tmp_path_factory.mktemp("browser")) as opened: yield opened


class Page(HTMLParser):
    "refers: (element, address) of all that a page links or loads; ids: its anchors."
    def __init__(self, file):
        super().__init__()
        self.refers, self.ids = [], set()
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, element, attributes):
        self.refers += [(element, v) for k, v in attributes if k in ("href", "src", "srcset", "poster", "data") and v]
        self.ids |= {v for k, v in attributes if k in ("id", "name")}


@pytest.fixture(scope="module")
def pages(site): return {file: Page(file) for file in sorted(site.rglob("*.html"))}


def test_every_notebook_has_its_page(site):
    library = sorted((REPO/"nbs").glob("[0-9]*.ipynb"))
    ran = [file for preset in ("toy", "pretraining", "benchmark") for file in (REPO/"runs"/preset).glob("*.ipynb")]
    shown = [site/file.relative_to(REPO).with_suffix(".html") for file in [*library, *ran]]
    shown += [site/"api"/f"{file.stem[3:]}.html" for file in library]
    assert not [page for page in shown if not page.is_file()] and len(library) == 51


def test_no_link_is_broken_and_nothing_is_loaded_from_elsewhere(site, pages):
    broken = []
    for file, page in pages.items():
        for element, address in page.refers:
            parts = urlsplit(address)
            if parts.scheme in ("http", "https") and element == "a" or parts.scheme == "data": continue
            start = site if parts.path.startswith("/") else file.parent   # of the page for what is not there
            there = (start/unquote(parts.path).lstrip("/")).resolve() if parts.path else file
            if parts.path in ("/", ".", "./"): there = site/"index.html"
            known = there.is_file() and not parts.scheme
            if known and parts.fragment and there.suffix == ".html":
                known = unquote(parts.fragment) in pages[there].ids
            if not known: broken.append((file.relative_to(site).as_posix(), element, address))
    assert not broken
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?https?:|@import", style.read_text(encoding="utf-8")), style


def test_an_experiment_opens_with_its_finding(site):
    text = (site/EXPERIMENT).read_text(encoding="utf-8")
    finding = json.loads((REPO/EXPERIMENT).with_suffix(".json").read_text(encoding="utf-8"))["metrics"]["finding"]
    opening, *folded = text[text.index("<article"):].split("<details")
    assert re.search(r"\*\*(.*?)\*\*", finding)[1] in opening and "import" not in opening
    assert len(folded) > 3 and "DataFrame" in "".join(folded)


@needs_chromium
@pytest.mark.parametrize("address", [FRONT, LIBRARY, EXPERIMENT, API])
def test_a_browser_reads_it(window, served, address):
    "The console stays silent, every picture is there, and nothing is asked of another address."
    window.asked.clear(), window.faults.clear()
    window.open(served + address)
    assert all(window.run("Promise.all([...document.images].map(i => i.decode().then(() => i.naturalWidth)))"))
    assert not window.faults and window.asked
    assert not [a for a in window.asked if not a.startswith((served, "data:", "blob:"))]


WIDE = """[...document.querySelectorAll("article *")].filter(e => e.getBoundingClientRect().right > innerWidth + 1
  && !e.closest("pre, math, .md-typeset__table, .formula")).map(e => e.outerHTML.slice(0, 200))"""


@needs_chromium
@pytest.mark.parametrize("address", [FRONT, LIBRARY, EXPERIMENT, API])
def test_nothing_is_wider_than_a_phone(window, served, address):
    window.open(served + address, width=360)
    assert window.run("document.documentElement.scrollWidth") == window.run("innerWidth") == 360
    assert window.run(WIDE) == []
    inside = "[...document.querySelectorAll('pre > code')].some(e => e.scrollWidth > e.clientWidth)"
    if address == LIBRARY: assert window.run(inside)   # its long lines scroll in their box


@needs_chromium
@pytest.mark.parametrize("where", ["served", "disk"])
def test_search_finds_a_word(window, site, served, where):
    "On the web and from disk."
    index = json.loads((site/"search"/"search_index.json").read_text(encoding="utf-8"))
    assert any("permute" in entry["text"] for entry in index["docs"])
    window.faults.clear()
    window.open((served if where == "served" else f"{site.as_uri()}/") + FRONT)
    window.run("document.querySelector('[data-md-component=search-query]').focus()")
    window.type("permute")
    links = "[...document.querySelectorAll('.md-search-result__item a')].map(a => a.href)"
    found = window.until(f"{links}.length && {links}")
    assert any(re.search(r"/(api|nbs)/(00_)?captions\.html", address) for address in found) and not window.faults
