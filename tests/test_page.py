"""The page: that it shows what was measured, holds all it needs, and that a browser draws it."""
import base64
import io
import json
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import diagnosed
import numpy as np
import pandas as pd
import pytest
from browser import CHROMIUM, needs_chromium
from diagnosed import ask
from PIL import Image

from debias_clip.diagnosis import interval
from debias_clip.page import page_values, report_page, write_report
from debias_clip.records import Records
from debias_clip.shortsight import shortsight, shortsight_difference

@pytest.fixture(scope="module")
def flat(): return diagnosed.diagnosis("flat")


class Page(HTMLParser):
    "Elements, references and text of a page; refuses a page whose elements are not closed in their order."
    def __init__(self, text):
        super().__init__()
        self.refers, self.tags, self.alts, self.text, self.open = [], [], [], "", []
        self.feed(text)
        self.close()
        assert not self.open
        self.text = re.sub(r"\s+", " ", self.text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.refers += [v for k, v in attrs if k in ("src", "href", "srcset", "data", "action", "poster")]
        if tag == "img": self.alts.append(dict(attrs).get("alt"))
        if tag not in ("img", "meta", "br"): self.open.append(tag)

    def handle_endtag(self, tag): assert self.open.pop() == tag

    def handle_data(self, data): self.text += "" if self.open and self.open[-1] == "style" else data


# ---- the values

def test_values_are_plain_data(one, siglip, flat):
    values = page_values([one, siglip, flat])
    json.dumps(values, allow_nan=False)
    assert values["names"] == ["one", "a SigLIP", "flat"] and values["figures"]["place"].startswith("data:image/svg")


def test_tables_put_models_side_by_side(one, siglip, flat):
    tables = page_values([one, siglip, flat])["tables"]
    orders = {line["variant"]: line["cells"] for line in tables["orders"]}
    assert list(orders) == ["full", "move", "remove", "first", "first2", "swap2"] and orders["move"][2] is None
    assert [cell["recall"] for cell in orders["full"]] == [m["orders"][0]["recall"] for m in (one, siglip, flat)]
    assert [line["order"] for line in tables["shuffled"]] == [f"shuffled, {o}" for o in ("mean", "worst", "best")]
    assert [line["number"] for line in tables["lengths"]] == [1, 2, 3, 4]
    card = {line["line"]: [cell and cell["value"] for cell in line["cells"]] for line in tables["card"]}
    assert card["images"] == [30, 25, 30]


def test_counts_say_what_a_section_rests_on(one, flat):
    counts = page_values([one, flat])["counts"]
    orders = next(r for r in one["orders"] if r["direction"] == "t2i")
    mine, theirs = (model["count"] for model in counts["orders"]["models"])
    assert (mine["n"], mine["total"], mine["least"]) == (str(orders["n"]), 30, 4) and mine["left_out"]
    assert (theirs["n"], theirs["left_out"]) == ("30", False) and not counts["orders"]["same"]
    assert [m["name"] for m in counts["push"]["models"]] == ["one"] and not counts["push"]["same"]
    assert page_values([one, one | dict(name="two")])["counts"]["orders"]["same"]


def test_one_or_more_models_of_different_names(one):
    for wrong in ([], [one, one]):
        with pytest.raises(ValueError, match="different names"): page_values(wrong)


# ---- the page

def test_the_page_holds_all_it_needs(one, siglip):
    text = report_page([one, siglip])
    shown = Page(text)
    assert all(r.startswith("data:image/") for r in shown.refers) and len(shown.refers) > 10 and all(shown.alts)
    assert not {"script", "link", "iframe", "object", "base", "form"} & set(shown.tags)
    assert "url(" not in text and "@import" not in text and not re.search(r"\bon\w+=", re.sub(r'"[^"]*"', "", text))
    assert "viewport" in text and "@media print" in text and '<html lang="en">' in text
    assert not re.search(r"\bnan\b|\bNone\b|\binf\b", shown.text) and "Protocol" in shown.text
    for uri in shown.refers:
        kind, data = re.fullmatch(r"data:image/([\w+]+);base64,(.*)", uri).groups()
        data = base64.b64decode(data, validate=True)
        if kind == "svg+xml": assert b"</svg>" in data and b"<script" not in data
        else: Image.open(io.BytesIO(data)).load()


def test_names_and_captions_stay_text(one, world):
    evil = '_<script>alert("x")</script> & $ <img src=http://x.example/y>'
    found = ask(Records(evil, world.images, [[f"{s} {evil}" for s in c] for c in world.captions]), name=evil)
    shown = Page(report_page([found]))
    assert "script" not in shown.tags and all(r.startswith("data:") for r in shown.refers) and evil in shown.text


def test_every_section_says_what_it_rests_on(one, siglip):
    shown = Page(report_page([one, siglip])).text
    titles = ("Where it reads, and what", "Order of the sentences", "Every order", "Early tokens", "Attention Weight",
              "What the embedding holds", "The worst captions", "Omitted")
    parts = re.split("|".join(titles), shown)[1:8]
    assert len(parts) == 7
    for part in parts:
        assert re.search(r"one – [\d to]+ of 30 captions", part)
        assert re.search(r"a SigLIP – [\d to]+ of 25 captions", part)
    for k, name in ((1, "orders"), (2, "matrix"), (3, "push")):
        row = next(r for r in one[name] if r["direction"] == "t2i")
        assert f"one – {row['n']} of 30 captions" in parts[k]
    assert "(left out: of fewer than 4 sentences), " in parts[1]
    for row in one["similarity"]["length"]:
        assert interval(row, 3) in parts[5] and interval(row, 3, "margin") in parts[5]


def test_what_is_omitted_is_on_the_page(flat):
    text = Page(report_page([flat])).text
    assert all(o["why"] in text for o in flat["omitted"]) and "no index" in text
    assert "Not measured: see what is omitted." in text


def test_a_context_too_short_for_anything_still_has_a_page(world):
    long = Records("long", world.images, [[" ".join(c)]*3 for c in world.captions])
    assert "narrow" in Page(report_page([ask(long, length=28, name="narrow")])).text


def test_two_images_are_little_but_have_a_page(world):
    two = Records("two", world.images[:2], [list(c) for c in world.captions[:2]])
    assert "two images" in Page(report_page([ask(two, name="two images")])).text


def sharp(diagnosis, most):
    "A diagnosis as if each exchange had cost .1, and more at the first place for an index above zero."
    falls = pd.DataFrame(diagnosis["falls"])
    falls["fall"] = .1 + most*(falls.place == 1)
    return diagnosis | dict(falls=falls.to_dict("list"), index=diagnosis["index"] | shortsight(falls))


def test_models_are_compared_with_the_first(one, world, tmp_path):
    "On the captions of which both contexts hold as many sentences, or not at all, and the page says so."
    two = ask(world, name="two", length=44)
    cut = pd.DataFrame(one["falls"])
    cut = cut[(cut.sentences > 2) & (cut.place <= 2)].assign(sentences=2)
    models = [sharp(one, 0.), sharp(two, .5), sharp(one | dict(name="three", falls=cut.to_dict("list")), .5),
              one | dict(name="four", index=None, place=None, sentence=None, falls=None)]
    k, m = (pd.DataFrame(d["falls"]).groupby("sample").sentences.first() for d in models[:2])
    same = int((k[m.index] == m).sum())
    text = Page(report_page(models)).text
    assert f"two against one, paired on {same} captions" in text and f"Left out: {len(m) - same} of which" in text
    assert "three against one: no difference can be told, since the two models were asked about fewer than two" in text
    assert "four against one: no difference can be told, since four could not be asked" in text
    written = json.loads(write_report(models, tmp_path)[1].read_text())["against first"]
    want = shortsight_difference(*(pd.DataFrame(d["falls"]) for d in models[1::-1]))
    assert written["two"] == want and want["low"] > 0 and want["n"] == same and 1 < same < len(m)
    assert written["three"]["value"] is written["four"]["value"] is None


def test_written_files(one, tmp_path):
    page, numbers = write_report([one], tmp_path/"new"/"folder")
    assert page.read_text() == report_page([one])
    written = json.loads(numbers.read_text())
    kept, = written["models"]
    assert written["against first"] == {} and kept.keys() == one.keys() - {"falls"}
    assert kept["orders"] == one["orders"] and kept["index"] == one["index"]
    names = {"sample", "file", "sentences", "before", "after", "instead", "instead_file"}
    assert [set(r) for r in kept["worst"]] == [names]*len(one["worst"])
    assert sorted(f.name for f in page.parent.iterdir()) == ["diagnosis.html", "diagnosis.json"]
    assert all("image" in r for r in one["worst"])   # the diagnosis itself keeps its pictures


# ---- in a browser

def chromium(*arguments, folder):
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-logging=stderr",
               "--v=0", "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder}/profile"]
    command = [CHROMIUM, *options, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


PROBE = """<script>
addEventListener("load", async () => {
  const figures = [...document.images];
  const drawn = i => i.decode().then(() => i.naturalWidth > 0 && i.getBoundingClientRect().width > 40, () => false);
  const ok = await Promise.all(figures.map(drawn));
  const right = [...document.querySelectorAll("table")].map(t => t.getBoundingClientRect().right);
  parent.postMessage([location.hash.slice(1), {
    figures: figures.length, drawn: ok.filter(Boolean).length, wide: document.documentElement.scrollWidth,
    screen: innerWidth, tables: Math.max(...right)}], "*")
})
</script>"""
LISTEN = """<!doctype html><script>
const found = {};
onmessage = e => { found[e.data[0]] = e.data[1]; document.body.setAttribute("data-found", JSON.stringify(found)) }
</script><body>"""
SCREENS = dict(phone=360, desk=1200, paper=717)   # CSS pixels; paper is A4 without Chromium's margins


def framed(pages, folder):
    """What a browser finds of each page (name in SCREENS -> HTML) in a frame of that width.

    A window of its own would not be narrower than 500. The probe is added here; the pages themselves have no script.
    """
    frames = LISTEN
    for name, text in pages.items():
        (folder/f"{name}.html").write_text(text.replace("</body>", PROBE + "</body>"))
        frames += f'<iframe src="{name}.html#{name}" width="{SCREENS[name]}" height="9000" style="border:0"></iframe>'
    (folder/"frames.html").write_text(frames)
    address = (folder/"frames.html").as_uri()
    for budget in (20_000, 120_000, 600_000):   # ms of the page's own time: a busy machine needs more
        time = f"--virtual-time-budget={budget}"
        done = chromium("--window-size=1300,1000", time, "--dump-dom", address, folder=folder)
        assert "CONSOLE" not in done.stderr, done.stderr[-2000:]
        said = re.search(r'data-found="([^"]*)"', done.stdout)
        found = json.loads(said[1].replace("&quot;", '"')) if said else {}
        if found.keys() == pages.keys(): return found
    pytest.fail("the browser did not finish")


@needs_chromium
@pytest.mark.filterwarnings("error:constrained_layout")   # which leaves a figure without room for itself
def test_a_browser_draws_it(one, siglip, tmp_path):
    "Every figure is decoded, nothing is wider than a phone, a screen or, in print, paper; the console stays silent."
    long = siglip | dict(name="a-checkpoint-whose-name-is-as-long-as-names-of-files-can-be-epoch-3")
    html, _ = write_report([one, long], tmp_path)
    many = report_page([one | dict(name=f"model {i}") for i in range(6)])
    assert many.count("@media print {") == 1
    pages = dict(phone=html.read_text(), desk=html.read_text(), paper=many.replace("@media print {", "@media all {"))
    for name, found in framed(pages, tmp_path).items():
        assert found["screen"] == SCREENS[name] and found["wide"] <= SCREENS[name], (name, found)
        assert found["figures"] == found["drawn"] == len(Page(pages[name]).refers), (name, found)
        if name == "paper": assert found["tables"] <= SCREENS[name], found
    chromium("--window-size=1200,6000", f"--screenshot={tmp_path}/shot.png", html.as_uri(), folder=tmp_path)
    shot = np.asarray(Image.open(tmp_path/"shot.png").convert("L"))
    assert shot.shape[1] >= 1200 and (shot < 128).mean() > .002   # something is on it


@needs_chromium
def test_it_prints(one, tmp_path):
    html, _ = write_report([one], tmp_path)
    chromium(f"--print-to-pdf={tmp_path}/page.pdf", "--no-pdf-header-footer", html.as_uri(), folder=tmp_path)
    pdf = Path(tmp_path/"page.pdf").read_bytes()
    assert pdf.startswith(b"%PDF") and len(pdf) > 20_000
