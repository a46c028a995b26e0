"""Copies on disk: read to the end, every planted fault found; samples as training has them."""
import json
import os
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layouts import LAYOUTS, FlickrToken, ShareGpt4v, Urban1k, made_up_caption, write_lines
from PIL import Image

from debias_clip.benchmarks import is_own, load_records
from debias_clip.captions import DEBIAS, NO_SUMMARY, RECIPES, split_sentences
from debias_clip.checks import KINDS, check_data, show_samples
from debias_clip.datasets import DATASETS
from debias_clip.pairs import PairDataset
from debias_clip.readers import read_records
from debias_clip.records import Records, load_image
from debias_clip.store import TextStore
from debias_clip.tokens import get_tokenizer

SHARED = Path(__file__).parents[2]/"shared"/"data"


@pytest.fixture
def make(tmp_path, monkeypatch):
    "Makes a copy in a layout; as many samples are published as it has."
    def made(name, n=16, root=tmp_path):
        layout = LAYOUTS[name](root, n)
        layout.name = root if name.startswith("own") else name.split(" ")[0]
        layout.home = None if name.startswith("own") else root
        if row := DATASETS.get(layout.name):
            row = replace(row, images=n, texts=5*n if layout.several else n)
            monkeypatch.setitem(DATASETS, layout.name, row)
        return layout
    return made


def checked(layout, **more):
    "Writes a copy's captions and checks it."
    layout.write()
    return check_data(layout.name, layout.home, **more)


def found(report): return {kind: len(items) for kind, items in report.findings.items() if items}


# ---- copies without a fault

ONE_EACH = [name for name in LAYOUTS
            if name not in ("urban1k-whole", "long-dci", "docci-5100", "coco-first5", "flickr30k-karpathy-all")]


def test_every_protocol_has_a_layout():
    readers = {name for name, row in DATASETS.items() if row.reader}
    assert readers - {name.split(" ")[0] for name in LAYOUTS} == {"sharegpt4v"}


@pytest.mark.parametrize("name", ONE_EACH)
def test_a_whole_copy_has_no_faults(make, name):
    layout = make(name)
    report = checked(layout)
    assert found(report) == {} and report.faults == {}, report.summary()
    assert report.images == 16 and report.texts == len(report.tokens) == (80 if layout.several else 16)
    assert len(report.sentences) == (0 if layout.several else 16)
    assert "No faults." in report.summary() and checked(layout, quick=True).faults == {}
    load = read_records if is_own(layout.name) else load_records
    assert len(load(layout.name, **({"root": layout.home} if layout.home else {}))) == 16


# ---- every fault, planted in every layout

def lose_record(layout, i):
    "The record is gone; in Urban1k, where a picture without a caption is another fault, its picture too."
    if isinstance(layout, Urban1k): layout.path(layout.rows[i]).unlink()
    layout.rows[i] = None
    return {"counts"}


def damage_record(layout, i):
    layout.rows[i].damaged = True
    return {"counts", "records"}


def lose_picture(layout, i):
    layout.path(layout.rows[i]).unlink()
    return {"missing images"}


def link_to_nowhere(layout, i):
    lose_picture(layout, i)
    layout.path(layout.rows[i]).symlink_to("nowhere")
    return {"missing images"}


def upper_case(layout, i):
    path = layout.path(layout.rows[i])
    path.rename(path.with_suffix(path.suffix.upper()))
    return {"letter case"}


def empty_picture(layout, i):
    layout.path(layout.rows[i]).write_bytes(b"")
    return {"unreadable images"}


def cut_picture(layout, i):
    path = layout.path(layout.rows[i])
    path.write_bytes(path.read_bytes()[:-200])
    return {"unreadable images"}


def page_for_picture(layout, i):
    layout.path(layout.rows[i]).write_text("<html>404 Not Found</html>")
    return {"unreadable images"}


def folder_for_picture(layout, i):
    lose_picture(layout, i)
    layout.path(layout.rows[i]).mkdir()
    return {"unreadable images"}


def too_many_pixels(layout, i):
    Image.new("L", (400, 400)).save(layout.path(layout.rows[i]))
    return {"unreadable images"}


def blank_caption(layout, i):
    layout.rows[i].texts[-1] = " "
    return {"empty captions"}


def same_caption(layout, i):
    layout.rows[i].texts[-1] = layout.rows[i - 1].texts[-1] + " "
    return {"repeated captions"}


def same_content(layout, i):
    layout.path(layout.rows[i]).write_bytes(layout.path(layout.rows[i - 1]).read_bytes())
    return {"repeated images"}


def same_path(layout, i):
    layout.rows[i].image = layout.rows[i - 3 if i > 3 else i + 3].image   # of the row before: no fault
    return {"repeated images"}


FAULTS = [lose_record, damage_record, lose_picture, link_to_nowhere, upper_case, empty_picture, cut_picture,
          page_for_picture, folder_for_picture, too_many_pixels, blank_caption, same_caption, same_content, same_path]


def faults_of(layout):
    "Faults that a layout can have: some know a picture only by the name of its caption."
    by_name = isinstance(layout, (Urban1k, FlickrToken))
    return [fault for fault in FAULTS if not (by_name and fault is same_path)]


def plant(layout, faults):
    "Plants faults, dict of row -> fault. Returns how often a check must find each kind."
    kinds = Counter()
    for i, fault in faults.items(): kinds += Counter(fault(layout, i))
    layout.rows = [row for row in layout.rows if row is not None]
    kinds["counts"] = min(kinds["counts"], 1)
    if layout.home is None: del kinds["counts"]                        # of one's own captions none are published
    if isinstance(layout, FlickrToken): kinds["records"] *= 5                  # a line a caption
    return dict(+kinds)


@pytest.fixture
def few_pixels(monkeypatch): monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 2000)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ONE_EACH)
def test_every_planted_fault_is_found(make, few_pixels, name, fault):
    layout = make(name)
    if fault not in faults_of(layout): pytest.skip("this layout cannot have it")
    image = layout.rows[7].image
    kinds = plant(layout, {7: fault})
    report = checked(layout)
    assert found(report) == kinds, report.summary()
    excused = {} if layout.home is None else DATASETS[layout.name].repeats
    assert report.faults == {kind: n for kind, n in kinds.items() if kind not in excused}
    named = kinds.keys() & {"missing images", "letter case", "unreadable images"}
    for kind in named: assert Path(image).stem in report.findings[kind][0][1]


@pytest.mark.parametrize("name", ONE_EACH)
def test_all_faults_at_once_are_all_found(make, few_pixels, name):
    layout = make(name, 2*len(FAULTS) + 1)
    faults = faults_of(layout)
    kinds = plant(layout, {2*k + 1: fault for k, fault in enumerate(faults)})
    report = checked(layout)
    assert found(report) == kinds, report.summary()
    lines = report.summary().splitlines()
    assert len(lines) <= 30 and max(map(len, lines)) <= 100
    unreadable = str(report.findings["unreadable images"])
    for told in ("empty (0 bytes)", "cut short", "no picture inside", "a folder", "too many pixels"):
        assert told in unreadable
    json.dumps(report.as_dict())


@pytest.mark.parametrize("name", ["docci", "own csv"])
def test_a_quick_check_finds_what_names_and_sizes_tell(make, name):
    layout = make(name, 2*len(FAULTS) + 1)
    kinds = plant(layout, {2*k + 1: fault for k, fault in enumerate(FAULTS)})
    report = checked(layout, quick=True)
    assert found(report) == kinds | {"unreadable images": 1, "repeated images": 1}       # empty; named twice
    assert "--quick opens no picture" in checked(make(name), quick=True).summary()


@settings(max_examples=30, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_any_faults_anywhere_are_counted_rightly(make, few_pixels, tmp_path_factory, data):
    name = data.draw(st.sampled_from(["docci", "own csv", "iiw", "urban1k"]))
    layout = make(name, 13, tmp_path_factory.mktemp("x"))
    rows = data.draw(st.lists(st.sampled_from(range(1, 13, 2)), unique=True))
    kinds = plant(layout, {i: data.draw(st.sampled_from(faults_of(layout))) for i in rows})
    report = checked(layout)
    assert found(report) == kinds, report.summary()


# ---- single findings

def test_lengths_are_told(make):
    layout = make("docci")
    for row in layout.rows: row.texts = [" ".join(split_sentences(row.texts[0])[:3])]
    layout.rows[2].texts = ["A single sentence."]
    layout.rows[4].texts = ["It is red. " + "It is very very long. "*20]
    layout.rows[5].texts = ["It is blue. " + "It is very very long. "*60]
    report = checked(layout)
    lengths = report.as_dict()["lengths"]
    assert lengths == {"over_77": 2, "over_248": 1, "one_sentence": 1} and report.faults == {}
    assert "over 77: 2 (12.5 %), over 248: 1 (6.2 %)" in report.summary()
    assert "single sentence: 1 (6.2 %)" in report.summary()
    tokenizer = get_tokenizer("ViT-B-16-quickgelu")
    assert report.tokens.tolist() == [len(tokenizer.encode(row.texts[0])) + 2 for row in layout.rows]


def test_many_captions_are_counted_in_order_by_all_cores(make):
    layout = make("docci", 1)
    row = layout.rows[0]
    layout.rows = [replace(row, image=f"{i}.jpg", texts=[f"Scene {'a '*(i % 50)}{i}."]) for i in range(3_500)]
    report = checked(layout, quick=True)
    tokenizer = get_tokenizer("ViT-B-16-quickgelu")
    assert report.tokens.tolist() == [len(tokenizer.encode(row.texts[0])) + 2 for row in layout.rows]


@pytest.mark.skipif(not SHARED.is_dir(), reason="../shared/data is not beside this checkout")
def test_real_captions_and_photographs(tmp_path):
    docci = [json.loads(line) for line in (SHARED/"docci/captions.jsonl").read_text().splitlines()]
    rows = [{"split": row["id"].rsplit("_", 1)[0], "image_file": f"{row['id']}.jpg", "description": row["caption"]}
            for row in docci]
    write_lines(tmp_path/"docci_descriptions.jsonlines", map(json.dumps, rows))
    report = check_data("docci", tmp_path, quick=True)
    assert report.faults == {"missing images": 5000} and report.images == 5000     # no caption repeats
    assert (np.median(report.tokens), report.tokens.max()) == (132, 567)
    assert ((report.tokens > 77).sum(), (report.tokens > 248).sum()) == (4720, 188)

    coco = [json.loads(line) for line in (SHARED/"coco_val/captions.jsonl").read_text().splitlines()]
    rows = [{"image": os.path.relpath(SHARED/"coco_val"/row["image"], tmp_path), "captions": row["captions"]}
            for row in coco]
    write_lines(tmp_path/"captions.jsonl", map(json.dumps, rows))
    report = check_data(tmp_path/"captions.jsonl")
    assert report.faults == {} and (report.images, report.texts) == (len(coco), 5*len(coco))


def test_missing_pictures_are_grouped_by_folder_and_may_be_allowed(make):
    layout = make("sharegpt4v-val", 30)
    for i in (*range(0, 30, 3), 1, 2): layout.path(layout.rows[i]).unlink()
    pattern = (r"FAULT missing images +12\n +10 in data/sam/images \(sa_0.jpg, sa_3.jpg, sa_6.jpg …\)\n"
               r" +1 in data/\S+ \(1.jpg\)\n +1 in data/llava/llava_pretrain \(2.jpg\)")
    summary = checked(layout).summary()
    assert re.search(pattern, summary), summary
    assert checked(layout, max_missing=.39).faults == {"missing images": 12}
    allowed = checked(layout, max_missing=.4)
    assert allowed.faults == {} and "note  missing images" in allowed.summary()


@pytest.mark.parametrize("name", [name for name in ONE_EACH if not name.startswith("own")])
def test_a_copy_is_found_from_another_folder(make, tmp_path, monkeypatch, name):
    make(name).write()
    monkeypatch.chdir(tmp_path.parent)
    assert len(load_records(name.split(" ")[0], tmp_path.name)) == 16
    assert check_data(name.split(" ")[0], tmp_path.name, quick=True).faults == {}


def test_names_are_compared_from_any_folder(make, tmp_path, monkeypatch):
    make("docci").write()
    (tmp_path/"images").rename(tmp_path/"IMAGES")
    for here, root in [(tmp_path, "."), (tmp_path.parent, tmp_path.name), (tmp_path/"IMAGES", "..")]:
        monkeypatch.chdir(here)
        assert check_data("docci", root).faults == {"letter case": 16}


def test_names_differ_by_folders_and_accents_too(make):
    layout = make("sharegpt4v-val")
    (layout.root/"data/sam").rename(layout.root/"data/SAM")
    report = checked(layout)
    assert report.faults == {"letter case": 6}
    what = "data/sam/images/sa_0.jpg is data/SAM/images/sa_0.jpg on disk"
    assert report.findings["letter case"][0] == ("", what)
    layout.rows[1].image = "coco/train2017/caf\u00e9.jpg"
    (layout.root/"data/coco/train2017/1.jpg").rename(layout.root/"data/coco/train2017/cafe\u0301.jpg")
    assert checked(layout).faults == {"letter case": 7}


def test_nothing_is_read_behind_damaged_json_but_all_before_it(make):
    layout = make("sharegpt4v-val")
    layout.write()
    file = next(layout.root.glob("*.json"))
    file.write_text(file.read_text()[:-500])
    report = check_data(layout.name, layout.home)
    assert set(report.faults) == {"counts", "records"} and 10 < report.images < 16
    assert "cut short behind record" in str(report.findings["records"])


LOST = [("docci", "docci_descriptions.jsonlines"), ("urban1k", "Urban1k"), ("coco", "annotations"), ("iiw", "DCI_Test"),
        ("flickr30k-1k", "flickr30k-images"), ("own csv", "captions.csv")]


@pytest.mark.parametrize("name,lost", LOST)
def test_a_copy_without_its_captions_is_a_fault(make, name, lost):
    layout = make(name)
    layout.write()
    (layout.root/lost).rename(layout.root/"elsewhere")
    if name == "own csv":
        with pytest.raises(ValueError, match="no folder with captions.csv"): check_data(layout.name)
        return
    report = check_data(layout.name, layout.home)
    assert report.faults["records"] >= 1 and "No faults" not in report.summary()


def test_faults_of_cocos_file(make):
    layout = make("coco")
    layout.write()
    file = layout.root/"annotations/captions_val2017.json"
    content = json.loads(file.read_text())
    of_the_first = [note for note in content["annotations"] if note["image_id"] == 0]
    for note in of_the_first: content["annotations"].remove(note)
    content["annotations"].append({"id": 1, "image_id": 99, "caption": "Nowhere."})
    content["images"].append({"id": 3, "file_name": "again.jpg"})
    file.write_text(json.dumps(content))
    report = check_data(layout.name, layout.home)
    assert report.faults == {"counts": 1, "records": 2, "empty captions": 1} and "image 0" in report.summary()


def test_faults_of_ones_own_table(make):
    layout = make("own csv")
    rows = ["image,caption", 'pictures/deep/0.png,A "red" box.', "pictures/deep/1.png", "pictures/deep/2.png,x, y",
            ",Blue.", b"pictures/deep/3.png,\xe9", "pictures/deep/4.png, "]
    write_lines(layout.root/"captions.csv", rows)
    report = check_data(layout.root)
    assert report.faults == {"records": 4, "empty captions": 1}, report.summary()
    assert "no UTF-8" in str(report.findings) and report.images == 2
    write_lines(layout.root/"captions.csv", ["picture,text", "a.jpg,b"])
    assert check_data(layout.root).faults["records"] >= 1


@pytest.mark.parametrize("args,told", [
    (("flickr30k", "."), "say one of flickr30k-karpathy-all, flickr30k-full, flickr30k-1k"),
    (("doci", "."), "did you mean docci"), (("docci", "no"), "is no folder"), (("docci",), "--root"),
    (("scenes",), "no copy to check"), (("no/where",), "no table"), (("docci.csv",), "no table")])
def test_what_cannot_be_checked_is_said(args, told):
    with pytest.raises(ValueError, match=re.escape(told)): check_data(*args)


# ---- samples as training sees them

BLOCK = re.compile(r"short: (.*)\n +\(epoch (\d): sentences? ([\d ]+) of \d, "
                   r"(\d+) tokens of 77(?:, (\d+) pads before them)?\)")


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("splitter", ["default", "period"])
def test_what_is_shown_is_what_training_draws(recipe, splitter):
    tokenizer = get_tokenizer("ViT-B-16-quickgelu", 77)
    captions = [split_sentences(made_up_caption(i, n), splitter) for i, n in enumerate((4, 1, 3, 4))]
    records = Records("x", [f"{i}.jpg" for i in range(4)], captions, splitter=splitter)
    text = show_samples(records, recipe, tokenizer, n=9, epochs=2, seed=5, width=500)
    shown = BLOCK.findall(text)

    pairs = PairDataset(records, TextStore(captions, tokenizer, records.joiner), recipe, load_image, 5)
    rows = pairs.texts([(epoch, i) for i in range(4) for epoch in range(2)])["short"]
    assert len(shown) == 8
    for row, (caption, _, _, tokens, pads) in zip(rows, shown, strict=True):
        assert row.equal(tokenizer([caption], int(pads or 0))[0])
        assert int(tokens) == len(tokenizer.encode(caption)) + 2 and (pads != "") == recipe.prefix_pad
    first = len(tokenizer.encode(records.text(captions[0]))) + 2
    assert text.count("long: ") == 4 and f"({first} tokens of 77)" in text


def test_shown_samples_say_what_is_cut():
    tokenizer = get_tokenizer("ViT-B-16-quickgelu", 77)
    captions = [["It is red."] + ["It is a very long caption."]*20]
    records = Records("x", np.zeros((1, 4, 4, 3), np.uint8), captions)
    shown = show_samples(records, NO_SUMMARY, tokenizer)
    n = len(tokenizer.encode(records.text(captions[0])))
    assert f"{n + 2} tokens of 77, {n - 75} cut off" in shown and "sample 0" in shown
    assert max(map(len, shown.splitlines())) <= 100
    assert "pads" not in shown and "pads before" in show_samples(records, DEBIAS, tokenizer)


def test_the_training_part_is_checked(tmp_path, monkeypatch):
    monkeypatch.setitem(DATASETS, "sharegpt4v", replace(DATASETS["sharegpt4v"], images=3, texts=3))
    layout = ShareGpt4v(tmp_path, 3)
    held_out = [replace(layout.rows[0], texts=[f"Held out {i}."]) for i in range(1_000)]
    layout.rows = held_out + layout.rows
    layout.write()
    report = check_data("sharegpt4v", tmp_path)
    assert report.faults == {} and report.images == 3 and list(report.findings) == list(KINDS)
