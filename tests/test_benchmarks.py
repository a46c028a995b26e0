"""The paper's data sets in the layout they have on disk; each opened once, by one name, and known by its contents."""
import json
import os
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import wraps
from pathlib import Path

import numpy as np
import pytest
from files import pictures, sharegpt4v_record, write_csv, write_json, write_lines, write_sharegpt4v

from debias_clip import benchmarks, readers, scenes
from debias_clip.benchmarks import data_digest, is_own, load_records, open_data, samples, wrong_data
from debias_clip.datasets import DATASETS, DataSet, data_set
from debias_clip.records import Records, select

def load(name, root, **options):
    "Records of a data set that is smaller than the published one."
    smaller = pytest.warns(UserWarning, match="published") if DATASETS[name].images else nullcontext()
    with smaller: return load_records(name, root, **options)


def names(records): return [Path(p).name for p in records.images]


def faults(name, root):
    "What checking is told of."
    found = []
    list(samples(name, lambda kind, what, group="": found.append(what), root))
    return found


# one reader a format

@pytest.fixture
def urban(tmp_path):
    for i in (1, 2, 10):
        pictures(tmp_path, f"image/{i}.jpg")
        (tmp_path/"caption").mkdir(exist_ok=True)
        text = f"Street {i}. It is wet.\nSecond line."
        (tmp_path/f"caption/{i}.txt").write_text(f"\n Street {i}.  It is wet.\nSecond line.\n" if i == 2 else text)
    return tmp_path


def test_urban1k(urban):
    r = load("urban1k", urban)
    assert names(r) == ["1.jpg", "2.jpg", "10.jpg"]
    assert r.captions == [[f"Street {i}.", "It is wet."] for i in (1, 2, 10)]
    whole = load("urban1k-whole", urban)
    assert whole.captions[1] == ["Street 2.", "It is wet.", "Second line."] and "whole" in whole.protocol


def test_faults_of_urban1k(urban):
    (urban/"caption/10.txt").write_text("  \n")
    with pytest.raises(ValueError, match=r"caption/10\.txt: the caption is empty"): load_records("urban1k", urban)
    (urban/"caption/10.txt").write_text("A.")
    (urban/"image/10.jpg").unlink()
    with pytest.raises(ValueError, match=r"1 of 3 image files are missing"): load_records("urban1k", urban)
    (urban/"caption/1.txt").unlink()
    with pytest.raises(ValueError, match=r"image/1\.jpg has no caption/1\.txt"): load_records("urban1k", urban)
    shutil.rmtree(urban/"image")
    for file in (urban/"caption").iterdir(): file.unlink()
    with pytest.raises(ValueError, match="urban1k holds no samples"): load_records("urban1k", urban)


@pytest.mark.parametrize("inside", ["", "densely_captioned_images/"])
def test_dci(tmp_path, inside):
    base = tmp_path/inside
    rows = [(2, "sa_7.jpg", "A dog", "It runs. It is old."), (10, "sa_5.jpg", "A cat.", ""),
            (30, "sa_6.jpg", "A cow.", "It eats.")]
    for number, image, short, extra in rows:
        record = dict(image=image, short_caption=short, extra_caption=extra, mask_data={}, mask_keys=[])
        write_json(base/f"annotations/{number}-data.json", record)
        pictures(base, f"photos/{image}")
    r = load("dci", tmp_path)
    assert names(r) == ["sa_7.jpg", "sa_5.jpg", "sa_6.jpg"]
    assert r.captions == [["A dog", "It runs.", "It is old."], ["A cat."], ["A cow.", "It eats."]]
    assert load("dci", tmp_path, splitter="period").captions[0] == ["A dog It runs", "It is old."]
    long = load("long-dci", tmp_path)
    assert names(long) == ["sa_7.jpg", "sa_6.jpg"] and long.captions[1] == ["It eats."]
    (base/"annotations/2-data.json").write_text("{")
    with pytest.raises(ValueError, match="annotations/2-data.json is damaged"): load_records("dci", tmp_path)


def test_docci(tmp_path):
    rows = [dict(split=split, image_file=f"{split}_{i}.jpg", description=f"Scene {i}. Red.")
            for split in ("train", "test", "qual_test") for i in range(2)]
    write_lines(tmp_path/"docci_descriptions.jsonlines", rows)
    pictures(tmp_path, *[f"images/{row['image_file']}" for row in rows])
    assert names(load("docci", tmp_path)) == ["test_0.jpg", "test_1.jpg"] and len(load("docci-5100", tmp_path)) == 4
    write_lines(tmp_path/"docci_descriptions.jsonlines", [*rows, dict(split="test", image_file="x.jpg")])
    with pytest.raises(ValueError, match="line 7 has no 'description'"): load_records("docci", tmp_path)
    write_lines(tmp_path/"docci_descriptions.jsonlines", rows[:2])
    with pytest.raises(ValueError, match="docci holds no samples"): load_records("docci", tmp_path)


def test_iiw(tmp_path):
    write_lines(tmp_path/"datasets/IIW-400/data.jsonl", [{"image/key": "aar_4600", "IIW": "A flower. Blue."}])
    write_lines(tmp_path/"datasets/DCI_Test/data.jsonl", [{"image": "sa_1.jpg", "ex_id": "1", "IIW": "A balcony."}])
    write_lines(tmp_path/"datasets/DOCCI_Test/data.jsonl", [{"image": "test_7", "DOCCI": "A.", "IIW": "A white one."}])
    pictures(tmp_path, "images/aar_4600.jpg", "images/sa_1.jpg", "images/test_7.jpg")
    assert load("iiw", tmp_path).captions == [["A flower.", "Blue."], ["A balcony."], ["A white one."]]


def coco_file(n=12):
    "COCO's layout: two images, whose captions take turns."
    images = [dict(id=7, file_name="07.jpg"), dict(id=3, file_name="03.jpg")]
    return dict(images=images, annotations=[dict(id=k, image_id=3 if k % 2 else 7, caption=f" Caption {k}.\n")
                                            for k in range(n)])


def test_coco_val2017(tmp_path):
    write_json(tmp_path/"annotations/captions_val2017.json", coco_file())
    pictures(tmp_path, "val2017/07.jpg", "val2017/03.jpg")
    r = load("coco", tmp_path)
    assert names(r) == ["07.jpg", "03.jpg"] and r.captions[0] == ["Caption 0."]
    assert r.short[1] == [f"Caption {k}." for k in range(1, 12, 2)]
    assert [len(s) for s in load("coco-first5", tmp_path).short] == [5, 5]


@pytest.mark.parametrize("change,message", [
    (lambda c: c["images"].append(dict(id=3, file_name="x.jpg")), "image 2: id 3 is given twice"),
    (lambda c: c["annotations"].append(dict(image_id=9, caption="A.")), "annotation 12 is of image 9, which is not"),
    (lambda c: c["annotations"].append(dict(image_id=7)), "image 7: the caption is empty"),
    (lambda c: c["images"].append(dict(id=5, file_name="x.jpg")), "image 5: the caption is empty"),
    (lambda c: c.pop("annotations"), "has no list 'annotations'")])
def test_faults_of_coco(tmp_path, change, message):
    content = coco_file()
    change(content)
    write_json(tmp_path/"captions_val2017.json", content)
    with pytest.raises(ValueError, match=message): load_records("coco", tmp_path)


def karpathy_file(**more):
    def row(i, split):
        return dict(filename=f"{i}.jpg", split=split, sentences=[dict(raw=f"{i} {k}.") for k in range(2)], **more)
    return dict(dataset="x", images=[row(i, split) for i, split in enumerate(["train", "test", "val", "restval"])])


def test_karpathy(tmp_path):
    write_json(tmp_path/"dataset_coco.json", karpathy_file(filepath="val2014"))
    write_json(tmp_path/"dataset_flickr30k.json", karpathy_file())
    pictures(tmp_path, "val2014/1.jpg", *[f"flickr30k-images/{i}.jpg" for i in range(4)])
    assert load("coco-karpathy", tmp_path).short == [["1 0.", "1 1."]]
    assert names(load("flickr30k-1k", tmp_path)) == ["1.jpg"]
    assert names(load("flickr30k-karpathy-all", tmp_path)) == ["0.jpg", "1.jpg", "2.jpg"]


def test_flickr30k_token_file_and_csv(tmp_path):
    pictures(tmp_path, "flickr30k_images/10.jpg", "flickr30k_images/9.jpg")
    lines = ["image_name| comment_number| comment", "10.jpg| 0| Two men | talk .", "10.jpg| 1   A dog runs .",
             "9.jpg| 0| A tree ."]                         # the line whose second bar is missing keeps its text
    (tmp_path/"results.csv").write_text("\n".join(lines) + "\n")
    r = load("flickr30k-full", tmp_path)
    assert r.short == [["Two men | talk .", "A dog runs ."], ["A tree ."]] and names(r) == ["10.jpg", "9.jpg"]
    token = "".join(f"{n}.jpg#{k}\tCaption {k} of {n} .\n" for n in (9, 10) for k in range(5))
    (tmp_path/"results_20130124.token").write_text(token)
    r = load("flickr30k-full", tmp_path)
    assert [len(s) for s in r.short] == [5, 5] and names(r) == ["9.jpg", "10.jpg"]
    (tmp_path/"results_20130124.token").write_text(token + "9.jpg no mark\n")
    with pytest.raises(ValueError, match="token line 11 is no caption"): load_records("flickr30k-full", tmp_path)
    (tmp_path/"results_20130124.token").write_text(token + "9.jpg#5\n")
    with pytest.raises(ValueError, match=r"9\.jpg: the caption is empty"): load_records("flickr30k-full", tmp_path)


# ShareGPT4V

@pytest.fixture(scope="module")
def written(tmp_path_factory): return write_sharegpt4v(tmp_path_factory.mktemp("sharegpt4v"))


@pytest.fixture
def sharegpt4v(written, tmp_path):
    "A copy to do harm to."
    shutil.copytree(written, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.index-*"))
    return tmp_path


def test_sharegpt4v(written):
    r = load("sharegpt4v", written)
    assert len(r) == 7 and names(r)[:2] == ["1000.jpg", "1001.jpg"]
    assert r.captions[0] == ["The image shows item 1000.", "It is  grey.", "Nothing else, 2.5 m wide."]
    validation = load_records("sharegpt4v-val", written)
    assert len(validation) == 1000 and validation.captions[-1][0] == "The image shows item 999."
    period = load("sharegpt4v", written, splitter="period")
    assert period.captions[0] == ["The image shows item 1000", "It is  grey", " Nothing else, 2.5 m wide."]
    again = pickle.loads(pickle.dumps(r))
    assert again.captions[6] == r.captions[6] and again.images[6] == r.images[6] and len(pickle.dumps(r)) < 2000
    few = select(r, [5, 2])
    assert names(few) == ["sa_1005.jpg", "sa_1002.jpg"] and few.captions[0][0] == "The image shows item 1005."


def test_sharegpt4v_is_indexed_once_and_may_move(sharegpt4v, tmp_path, monkeypatch):
    want = list(load("sharegpt4v", sharegpt4v).captions)
    moved = sharegpt4v.rename(sharegpt4v.with_name(f"{sharegpt4v.name} moved"))
    monkeypatch.setattr(readers, "cut", lambda *_: pytest.fail("captions are split again"))
    r = load("sharegpt4v", moved)
    assert list(r.captions) == want and r.images[0].startswith(str(moved)) and os.path.exists(r.images[0])


def test_processes_that_start_together_make_one_index(sharegpt4v):
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: list(load_records("sharegpt4v-val", sharegpt4v).captions), range(3)))
    assert found[0] == found[1] == found[2] and len(list(sharegpt4v.glob("*.index-*"))) == 1


def test_sharegpt4v_names_missing_pictures_by_folder(sharegpt4v):
    gone = sharegpt4v/"data"/sharegpt4v_record(1003)["image"]
    gone.unlink()
    with pytest.raises(ValueError, match=rf"1 of 7 image files are missing: 1 in \S* \(first: {gone.name}\)"):
        load_records("sharegpt4v", sharegpt4v)
    with pytest.warns(UserWarning): r = load_records("sharegpt4v", sharegpt4v, max_missing=.2)
    assert len(r) == 6 and r.captions[3][0] == "The image shows item 1004." and names(r)[3] == "1004.jpg"


def test_faults_of_sharegpt4v(sharegpt4v):
    source = next(sharegpt4v.glob("*.json"))
    whole = source.read_text()
    source.write_text(whole[:len(whole)//2])
    with pytest.raises(ValueError, match="cut short behind record"): load_records("sharegpt4v-val", sharegpt4v)
    assert len(list(samples("sharegpt4v-val", lambda *_: None, sharegpt4v))) > 450   # all before it
    for record, message in [({"image": "a.jpg", "conversations": [{"value": "x"}]}, "record 0 has no"), (3, "record 0"),
                            (sharegpt4v_record(0, "a.jpg", " \n"), "record 0: the caption is empty")]:
        write_json(source, [record])
        with pytest.raises(ValueError, match=message): load_records("sharegpt4v-val", sharegpt4v)
    for other in ("{}", "[]"):
        source.write_text(other)
        with pytest.raises(ValueError, match="holds no samples"): load_records("sharegpt4v-val", sharegpt4v)
    assert {p.name for p in sharegpt4v.iterdir() if not p.suffix} == {"data"}   # nothing half made stays
    (sharegpt4v/"file").touch()
    source.write_text(whole)
    with pytest.raises(ValueError, match=r"cannot be written.*cache"):
        load_records("sharegpt4v", sharegpt4v, cache=sharegpt4v/"file")
    with pytest.raises(ValueError, match="no folder"): load_records("sharegpt4v", sharegpt4v/"nowhere")
    with pytest.raises(ValueError, match="has no share-captioner"): load_records("sharegpt4v", sharegpt4v/"data")


# the table

def test_names_of_data_sets_are_not_ambiguous(tmp_path):
    with pytest.raises(ValueError, match="flickr30k-karpathy-all, flickr30k-full, flickr30k-1k"): data_set("flickr30k")
    with pytest.raises(ValueError, match="no data set 'cocoa'; did you mean coco?"): load_records("cocoa", tmp_path)
    paper = {"sharegpt4v", "sharegpt4v-val", "urban1k", "dci", "docci", "coco", "flickr30k-karpathy-all"}
    assert {name for name, row in DATASETS.items() if row.paper} == paper


def test_rows_are_whole():
    for name, row in DATASETS.items():
        assert row.home and row.licence and row.where and row.protocol and (row.reader or name == "scenes")
        assert row.sources or row.by_hand or name == "scenes", f"{name}: nobody is told where it is"
        assert all(s.holds or s.unpack is None for s in row.sources)


def test_a_new_data_set_is_a_function_and_a_row(tmp_path, monkeypatch):
    def two_lines(root, note):
        for n, line in enumerate(readers.find(root, "x.txt").read_text().splitlines()):
            yield readers.Sample(f"x.txt line {n + 1}", Path(root)/f"{n}.png", [line])
    monkeypatch.setitem(DATASETS, "mine", DataSet(two_lines, "mine", "all", 2, 2))
    (pictures(tmp_path, "0.png", "1.png")/"x.txt").write_text("A dog. It runs.\n\n")
    assert faults("mine", tmp_path) == ["x.txt line 2: the caption is empty; fill it or leave the sample out"]
    (tmp_path/"x.txt").write_text("A dog. It runs.\nA cat.\n")
    assert open_data("mine", tmp_path).captions == [["A dog.", "It runs."], ["A cat."]] and not faults("mine", tmp_path)


def test_data_of_ones_own_is_told_from_names(tmp_path):
    own = [tmp_path, "nowhere/captions.csv", "captions.jsonl", "./docci"]
    assert all(is_own(data) and is_own(str(data)) for data in own) and not any(map(is_own, [*DATASETS, "docc"]))


# any data set by one name

@pytest.fixture
def own(tmp_path):
    "A table of two pictures."
    pictures(tmp_path/"own", "a.png", "b.png")
    return write_csv(tmp_path/"own/captions.csv", ["image", "caption"], ["a.png", "A dog. Red."], ["b.png", "A cat."])


def test_each_data_set_is_loaded_once(own, urban, monkeypatch):
    "As the paper's notebooks read them: seven sets in each of three arms."
    loads = []
    def counted(load): return wraps(load)(lambda *args, **more: loads.append(args) or load(*args, **more))
    for load in (benchmarks.read_records, benchmarks.load_records):
        monkeypatch.setattr(benchmarks, load.__name__, counted(load))
    benchmarks.opened.cache_clear()
    sets = [(own, None, {}), (own, None, {"splitter": "period"}), (str(own.parent), None, {}), ("urban1k", urban, {}),
            ("urban1k-whole", str(urban), {}), ("scenes", None, {"n": 3}), ("scenes", None, {"n": 3, "text": "web"})]
    with pytest.warns(UserWarning, match="published"):
        arms = [[open_data(*each) for each in sets] for _ in range(3)]
    assert len(loads) == 5 and all(a is b is c for a, b, c in zip(*arms, strict=True))


def test_a_table_that_changes_is_read_again(own):
    before = open_data(own)
    write_csv(own, ["image", "caption"], ["a.png", "Another dog."])
    assert open_data(own).captions == [["Another dog."]] and len(before) == 2


def test_unreadable_pictures_are_looked_for_on_demand(own):
    (own.parent/"b.png").write_bytes(b"")
    assert len(open_data(own)) == 2
    with pytest.raises(ValueError, match=r"1 of 2 images cannot be read.*max_unreadable"):
        open_data(own, options={"max_unreadable": 0})
    with pytest.warns(UserWarning, match="left out"): assert len(open_data(own, None, {"max_unreadable": .5})) == 1


@pytest.mark.parametrize("data,root,options,message", [
    (None, None, {}, "data must be a data set's name or the path of a table, not None"),
    ("", None, {}, "data must be"), (3, None, {}, "not 3"), (["docci"], None, {}, "data must be"),
    ("docc", None, {}, "no data set 'docc'; did you mean docci"),
    ("flickr30k", "x", {}, "can mean different test sets"),
    ("docci", None, {}, "docci: where does it lie"),
    ("docci", "nowhere", {}, "docci: there is no folder nowhere"),
    ("nowhere/captions.csv", None, {}, "nowhere/captions.csv: there is no such file or folder"),
    ("docci", ".", {"split": "test"}, "no option 'split'; did you mean splits"),
    ("docci", ".", {"image": "x"}, "no option 'image'"),
    (".", None, {"splits": []}, "no option 'splits'"),
    (".", None, {"root": "x"}, "no option 'root'"),
    (".", None, {"max_missing": "half"}, "max_missing must be a share from 0 to 1, not 'half'"),
    (".", None, {"max_unreadable": 2}, "max_unreadable must be a share"),
    (".", None, {"splitter": "none"}, "no splitter 'none'"),
    ("scenes", None, {"splt": "val"}, "no option 'splt'; did you mean split"),
    ("scenes", None, {"split": "vla"}, "vla")])
def test_wrong_settings_of_data_are_found_before_any_work(data, root, options, message):
    assert message in (wrong_data(data, root, options) or "")
    with pytest.raises(ValueError, match=message.split(";")[0].replace("(", ".")): open_data(data, root, options)
    with pytest.raises(ValueError, match=message.split(";")[0]): data_digest(data, root, options)


def test_right_settings_of_data(own, tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    right = [("scenes", None, {"split": "val", "max_unreadable": .1}), ("own/captions.csv", None, {"image": "x"}),
             ("own", "pictures", {}), ("docci", "own", {"splits": ["train"], "max_missing": 0, "cache": "x"}),
             ("sharegpt4v", "own", {"part": "val"}), ("docci", str(tmp_path), None)]
    assert [wrong_data(*each, checkout=tmp_path) for each in right] == [None]*6


# digests

def test_pictures_count_for_a_key_and_the_folder_does_not(own, tmp_path):
    "Two folders with equal tables: the second model must not be taken for the first's."
    shutil.copytree(own.parent, tmp_path/"copy")
    shutil.copytree(own.parent, tmp_path/"other")
    shutil.copy(own, tmp_path/"other")
    (tmp_path/"other/a.png").write_bytes((own.parent/"a.png").read_bytes()[::-1])
    one, copy, other = (data_digest(folder) for folder in (own.parent, tmp_path/"copy", tmp_path/"other"))
    assert one == copy and one["captions"] == other["captions"] and one["pictures"] != other["pictures"]
    (own.parent/"b.png").write_bytes(b"in place")
    assert data_digest(own)["pictures"] != one["pictures"]                # in the same process, too


def test_a_digest_is_of_the_sentences(own):
    before = data_digest(own)["captions"]
    write_csv(own, ["image", "caption", "note"], ["a.png", "A dog. Red.", "x"], ["b.png", " A cat.", ""])
    assert data_digest(own)["captions"] == before
    assert data_digest(own, None, {"splitter": "period"})["captions"] != before
    rows = [dict(image=name, caption=text) for name, text in (("a.png", "A dog. Red."), ("b.png", "A cat."))]
    write_lines(own.with_suffix(".jsonl"), rows)
    assert data_digest(own.with_suffix(".jsonl"))["captions"] == before


def test_the_world_is_known_without_drawing_it(monkeypatch):
    monkeypatch.setattr(scenes, "SCENES_VERSION", 7, raising=False)
    digest = data_digest("scenes", None, {"split": "val"})
    assert digest == data_digest("scenes", None, {"split": "val", "author": "own", "max_unreadable": 0})
    assert digest != data_digest("scenes", None, {"split": "test"}) and digest["scenes"] == 7
    monkeypatch.setattr(scenes, "SCENES_VERSION", 8, raising=False)
    assert data_digest("scenes", None, {"split": "val"}) != digest
    json.dumps(digest)


def test_a_large_set_is_looked_at_once_a_process(monkeypatch):
    calls = []
    monkeypatch.setattr(Records, "digest", lambda self: calls.append(len(self)) or {"captions": "", "pictures": ""})
    large, small = (Records("x", np.zeros((n, 1, 1, 3), np.uint8), [["A."]]*n) for n in (10_000, 10))
    for _ in range(3):
        for records in (large, small): benchmarks.records_digest(records)
    assert calls == [10_000, 10, 10, 10]
