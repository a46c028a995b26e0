"""Tables of one's own: every fault is named with its line, by loading and by checking alike, and none passes unsaid."""
import csv
import gzip
import io
import json
import pickle
from pathlib import Path

import pyarrow as pa
import pytest
from files import pictures, rgb, write_csv
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from debias_clip.captions import split_sentences
from debias_clip.readers import ENDINGS, Sample, checked, kind_of, read_records, sentences_of, table, table_file

def faults_of(path, **options):
    "(samples, faults) as checking sees them."
    faults = []
    def note(kind, what, group=""): faults.append(f"{kind}: {what}")
    return list(checked(table(path, note, **options), note, Path(path).name)), faults


# what is right

def test_own_csv_and_jsonl(tmp_path):
    pictures(tmp_path, "a.png", "deep/b.png")
    write_csv(tmp_path/"captions.csv", ["image", "caption"], ["a.png", 'A "red" box, open.\nIt is old.'],
              ["deep/b.png", "赤い箱。古い。"])
    r = read_records(tmp_path)
    assert r.captions == [['A "red" box, open.', "It is old."], ["赤い箱。", "古い。"]]
    assert (r.name, r.short, r.protocol) == (tmp_path.name, None, "all rows of captions.csv")
    assert [Path(p).relative_to(tmp_path).as_posix() for p in r.images] == ["a.png", "deep/b.png"]
    lines = ['\ufeff{"file": "a.png", "text": ["One box.", "A box. Red."]}', "",
             '{"file": "deep/b.png", "text": ["Two."]}']
    (tmp_path/"other.jsonl").write_text("\n".join(lines), encoding="utf-8")
    r = read_records(tmp_path/"other.jsonl", image="file", caption="text")
    assert r.short == [["One box.", "A box. Red."], ["Two."]] and r.captions == [["One box."], ["Two."]]


def test_lists_have_a_column_of_their_own(tmp_path):
    write_csv(pictures(tmp_path, "a.png")/"list.csv", ["image", "captions"], ["a.png", '["One.", "Two."]'])
    assert read_records(tmp_path/"list.csv").short == [["One.", "Two."]]
    write_csv(tmp_path/"one.csv", ["image", "captions"], ["a.png", "One. Two."])
    assert read_records(tmp_path/"one.csv").captions == [["One.", "Two."]]
    write_csv(tmp_path/"square.csv", ["image", "caption"], ["a.png", "[sic] A dog."])
    assert read_records(tmp_path/"square.csv").captions[0][0].startswith("[sic]")


def test_pictures_may_lie_elsewhere(tmp_path):
    (pictures(tmp_path, "a.png")/"away").mkdir()
    write_csv(tmp_path/"away"/"t.csv", ["image", "caption"], ["a.png", "A box. Red."])
    r = read_records(tmp_path/"away"/"t.csv", root=tmp_path, splitter="period")
    assert (r.splitter, r.captions) == ("period", [["A box", "Red."]])


# what is wrong: (text of the table, what must be said)

CSV = {
    "a comma without quotation marks": ("a.png,A dog, a cat and a hat. Red.", r"line 2 has 3 cells.*quotation marks"),
    "a cell too few": ("a.png", "line 2 has 1 cells"),
    "an open quotation mark at the end": ('a.png,"A dog.', "line 2: is a quotation mark opened and not closed"),
    "an open one, a closed one behind": ('a.png,"A dog.\nb.png,"A cat."', "line 2: is a quotation mark opened"),
    "an open one that ends in another's": ('a.png,"A dog.\nb.png,A cat."', "line 2 swallows the rows behind it"),
    "an endless cell": ('a.png,"' + "A dog. "*20_000 + '\nb.png,A cat.', "line 2: is a quotation mark opened"),
    "a JSON list in `caption`": ('a.png,"[""One."", ""Two.""]"', "line 2: 'caption' holds a JSON list.*'captions'"),
    "a blank caption": ("a.png,A.\nb.png,  ", "line 3: the caption is empty"),
    "a blank name": (",A.", "line 2: 'image' is empty"),
    "no row": ("", "captions.csv holds no samples"),
}


@pytest.mark.parametrize("fault", CSV)
def test_faults_of_csv_name_the_line(tmp_path, fault):
    text, message = CSV[fault]
    (pictures(tmp_path, "a.png", "b.png")/"captions.csv").write_text(f"image,caption\n{text}\n")
    with pytest.raises(ValueError, match=f"{tmp_path}: captions.csv.*{message.replace('captions.csv ', '')}"):
        read_records(tmp_path)
    _, faults = faults_of(tmp_path)
    assert len(faults) == 1 or [f for f in faults if "no samples" not in f] == faults[:1]


@pytest.mark.parametrize("header,message", [
    ("picture,caption", "line 2 has no 'image' or 'file_name', only 'picture', 'caption'; name .*--image-column NAME"),
    ("image;title", "line 2 has no 'caption' or 'captions' or 'text', only 'image', 'title'; name the columns"),
    ("image|caption", "line 2 has no 'image' or 'file_name', only 'image|caption'; name the columns"),
    ("image,image", "columns of one name")])
def test_faults_of_the_header_are_told_once(tmp_path, header, message):
    separator = "," if "," in header else header[5]
    rows = [separator.join([f"{i}.png", "A."]) for i in range(3)]
    (tmp_path/"captions.csv").write_text("\n".join([header, *rows]))
    with pytest.raises(ValueError, match=message): read_records(tmp_path)
    _, faults = faults_of(tmp_path)
    assert len([f for f in faults if "no samples" not in f]) == (3 if header == "image,image" else 1)


JSONL = {
    "half a line": (b'{"image": "a.png", "caption": "A."}\n{"image": "a.png", "cap', "line 2 cannot be read"),
    "a list for a row": (b'["a.png", "A."]', r"line 1 is no record, only \['a.png', 'A.'\]"),
    "no text": (b'{"image": "a.png", "caption": NaN}', r"line 1: 'caption' is no text \(nan\)"),
    "null": (b'{"image": "a.png", "caption": null}', r"line 1: 'caption' is no text \(None\)"),
    "a blank one of several": (b'{"image": "a.png", "caption": ["A.", ""]}', "line 1: the caption is empty"),
    "none of several": (b'{"image": "a.png", "caption": []}', "line 1: the caption is empty"),
    "a number of several": (b'{"image": "a.png", "caption": ["A.", 1]}', "line 1: 'caption' is no text"),
    "latin-1": ('{"image": "a.png", "caption": "é"}'.encode("latin-1"), "line 1: bytes that are no UTF-8"),
    "half a character": (br'{"image": "a.png", "caption": "A \ud83d."}', "line 1: .*half a character"),
    "no such column": (b'{"image": "a.png", "title": "A."}', "line 1 has no 'caption' or .*, only 'image', 'title'"),
    "nested too deep": (b"["*100_000, "line 1 cannot be read"),
    "nothing": (b"\n\n", "captions.jsonl holds no samples"),
}


@pytest.mark.parametrize("fault", JSONL)
def test_faults_of_jsonl_name_the_line(tmp_path, fault):
    raw, message = JSONL[fault]
    (pictures(tmp_path, "a.png")/"captions.jsonl").write_bytes(raw)
    with pytest.raises(ValueError, match=message): read_records(tmp_path)
    _, faults = faults_of(tmp_path)
    assert len([f for f in faults if "no samples" not in f]) + ("no samples" in message) == 1


def test_latin_1_in_csv_is_named(tmp_path):
    (tmp_path/"captions.csv").write_bytes("image,caption\na.png,A.\nb.png,é\n".encode("latin-1"))
    with pytest.raises(ValueError, match="line 3: bytes that are no UTF-8"): read_records(tmp_path)


def test_checking_goes_on_behind_each_fault(tmp_path):
    rows = ["image,caption", "a.png,A.", "b.png,B, and more.", "c.png", 'd.png,"D" x', "e.png,", "f.png,F.",
            'g.png,"G.']
    (tmp_path/"captions.csv").write_text("\n".join(rows))
    found, faults = faults_of(tmp_path)
    assert [Path(s.image).name for s in found] == ["a.png", "e.png", "f.png"]
    assert [int(f.split("line ")[1].split()[0].strip(":")) for f in faults] == [3, 4, 5, 6, 8]
    assert faults[3].startswith("empty captions: ")


# Not "\r": Python's csv writes a cell that ends in it without quotation marks, and reads its own line as another.
CAPTION = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r"), min_size=1, max_size=60).filter(
    lambda text: text.strip() and not text.lstrip().startswith("[") and "\0" not in text)


@settings(max_examples=150, deadline=None)
@given(st.lists(CAPTION, min_size=1, max_size=6), st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_MINIMAL]),
       st.sampled_from(["\n", "\r\n"]))
def test_whatever_csv_writes_comes_back(tmp_path_factory, captions, quoting, end):
    path = tmp_path_factory.mktemp("t")/"captions.csv"
    with open(path, "w", encoding="utf-8", newline="") as f:
        csv.writer(f, quoting=quoting, lineterminator=end).writerows(
            [["image", "caption"], *[[f"{i}.png", text] for i, text in enumerate(captions)]])
    found, faults = faults_of(path)
    assert faults == [] and [s.texts for s in found] == [[text] for text in captions]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(CAPTION, st.lists(CAPTION, min_size=1, max_size=3)), min_size=1, max_size=6), st.booleans())
def test_whatever_json_writes_comes_back(tmp_path_factory, captions, ascii_only):
    path = tmp_path_factory.mktemp("t")/"captions.jsonl"
    rows = [json.dumps({"image": f"{i}.png", "caption": text}, ensure_ascii=ascii_only)
            for i, text in enumerate(captions)]
    path.write_text("\n".join(rows), encoding="utf-8")
    found, faults = faults_of(path)
    assert faults == []
    assert [s.texts for s in found] == [[text] if isinstance(text, str) else text for text in captions]


@pytest.mark.parametrize("caption", ["A dog.<br>It runs.", "A dog.<br/>It runs.", r"A dog.\nIt runs."])
def test_what_only_looks_like_a_line_end_is_warned_of(tmp_path, caption):
    table = pictures(tmp_path, "a.png", "b.png")/"captions.csv"
    write_csv(table, ["image", "caption"], ["a.png", caption], ["b.png", "B."])
    with pytest.warns(UserWarning, match="captions.csv: 1 samples have <br> or .*no sentence ends"):
        read_records(tmp_path)


# every kind of table, whoever wrote it

def write_table(path, rows, columns=("image", "caption")):
    "Rows as a table of the kind that its name tells."
    kind = kind_of(path)
    if kind == "parquet": return parquet.write_table(pa.Table.from_pylist(
        [dict(zip(columns, row, strict=True)) for row in rows]), path)
    text = io.StringIO()
    if kind in ("csv", "tsv"):
        csv.writer(text, delimiter="\t" if kind == "tsv" else ",").writerows([columns, *rows])
    else:
        objects = [dict(zip(columns, row, strict=True)) for row in rows]
        text.write(json.dumps(objects) if kind == "json" else "\n".join(map(json.dumps, objects)))
    raw = text.getvalue().encode()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)


@settings(max_examples=120, deadline=None)
@given(st.lists(CAPTION, min_size=1, max_size=6), st.sampled_from(ENDINGS))
def test_whatever_is_written_comes_back_from_every_kind(tmp_path_factory, captions, ending):
    path = tmp_path_factory.mktemp("t")/f"captions{ending}"
    write_table(path, [[f"{i}.png", text] for i, text in enumerate(captions)])
    for place in (path, path.parent):
        found, faults = faults_of(place)
        assert faults == [] and [s.texts for s in found] == [[text] for text in captions]


@pytest.mark.parametrize("ending", ENDINGS)
def test_every_kind_becomes_records_in_memory_and_at_rest(tmp_path, ending):
    pictures(tmp_path, "a.png", "b.png")
    write_table(tmp_path/f"metadata{ending}", [["a.png", "A dog. It runs."], ["b.png", "B."]], ("file_name", "text"))
    for cache in (None, tmp_path/"cache"):
        r = read_records(tmp_path, cache=cache)
        assert list(r.captions) == [["A dog.", "It runs."], ["B."]] and r.short is None
        assert [Path(image).name for image in r.images] == ["a.png", "b.png"]


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".parquet"])
def test_lists_are_independent_captions(tmp_path, ending):
    write_table(pictures(tmp_path, "a.png")/f"captions{ending}", [["a.png", ["A dog. It runs.", "B."]]])
    assert list(read_records(tmp_path).short) == [["A dog. It runs.", "B."]]


def test_semicolons_and_tabs_separate_what_commas_do_not(tmp_path):
    pictures(tmp_path, "a.png")
    for mark in ";\t":
        (tmp_path/"captions.csv").write_text(f"image{mark}caption\na.png{mark}A dog, a cat. And more.\n")
        assert read_records(tmp_path).captions == [["A dog, a cat.", "And more."]]


def test_texts_beside_pictures(tmp_path):
    pictures(tmp_path, "x/a.JPG", "b.png", "no_text.png")
    for name, text in {"x/a.txt": "A dog. It runs.\n", "b.txt": "B.", "LICENSE.txt": "Free."}.items():
        (tmp_path/name).write_text(text)
    for cache in (None, tmp_path.parent/"cache"):
        r = read_records(tmp_path, cache=cache)
        assert list(r.captions) == [["B."], ["A dog.", "It runs."]]
        assert [Path(image).name for image in r.images] == ["b.png", "a.JPG"]
    (tmp_path/"b.txt").write_text("Changed.")
    assert read_records(tmp_path, cache=tmp_path.parent/"cache").captions[0] == ["Changed."]
    (tmp_path/"b.txt").write_text(" ")
    with pytest.raises(ValueError, match="b.txt: the caption is empty"): read_records(tmp_path)


@pytest.mark.parametrize("ending", [".csv.gz", ".jsonl.gz", ".json.gz", ".parquet"])
def test_a_table_that_is_cut_short_is_named(tmp_path, ending):
    path = pictures(tmp_path, "a.png")/f"captions{ending}"
    write_table(path, [["a.png", "A dog. "*40 + str(i)] for i in range(50)])
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match=f"captions{ending} is damaged or cut short"): read_records(tmp_path)


def test_json_that_is_no_list_of_records(tmp_path):
    written = {'{"a": 1}': "is no list of records", "[1]": "record 1 is no record", "[": "cannot be read"}
    for text, told in written.items():
        (tmp_path/"captions.json").write_text(text)
        with pytest.raises(ValueError, match=f"captions.json {told}"): read_records(tmp_path)


def test_own_tables_must_be_clear(tmp_path):
    with pytest.raises(ValueError, match="no folder with captions.csv"): read_records(tmp_path)
    for suffix in ("csv", "jsonl"): (tmp_path/f"captions.{suffix}").touch()
    with pytest.raises(ValueError, match="both"): read_records(tmp_path)
    (tmp_path/"x.txt").touch()
    with pytest.raises(ValueError, match="must end in .csv, .tsv, .jsonl, .json, "): read_records(tmp_path/"x.txt")
    (tmp_path/"wds").mkdir()
    for shard in ("0.tar", "0.tar.gz"):
        (tmp_path/"wds"/shard).touch()
        for path in (tmp_path/"wds", tmp_path/"wds"/shard):
            with pytest.raises(ValueError, match="tar shards are not read: unpack them"): table_file(path)


# pictures that are not there

def test_missing_pictures_are_counted_by_folder(tmp_path):
    pictures(tmp_path, "a/1.png", "b/1.png")
    names = [f"{folder}/{i}.png" for folder in "ab" for i in range(1, 6)]
    write_csv(tmp_path/"captions.csv", ["image", "caption"], *[[name, f"Number {name}."] for name in names])
    told = r"8 of 10 image files are missing: 4 in \S*a \(first: 2.png, 3.png, 4.png …\); 4 in \S*b .*max_missing"
    with pytest.raises(ValueError, match=told): read_records(tmp_path)
    with pytest.warns(UserWarning, match="8 of 10.*left out"): r = read_records(tmp_path, max_missing=.8)
    assert r.captions == [["Number a/1.png."], ["Number b/1.png."]]
    for name, hint in [("a/1.PNG", "names differ in upper and lower case"), ("a\\1.png", "write folders with /"),
                       ("https://x.org/1.png", "it is an address")]:
        write_csv(tmp_path/"captions.csv", ["image", "caption"], [name, "A."])
        with pytest.raises(ValueError, match=hint): read_records(tmp_path)


def test_repeats_are_counted(tmp_path):
    write_csv(pictures(tmp_path, "a.png", "b.png")/"captions.csv", ["image", "caption"], ["a.png", "A."],
              ["a.png", "A."], ["b.png", "A."], ["a.png", "Another."])
    with pytest.warns(UserWarning) as said: r = read_records(tmp_path)
    assert len(r) == 3
    assert "1 of 4 rows repeat" in str(said[0].message)
    assert "1 rows name an image" in str(said[1].message) and "Sort the table by picture" in str(said[1].message)


def test_rows_in_turn_are_the_captions_of_one_picture(tmp_path):
    "As in Flickr8k; the only caption of another picture is its independent one, too."
    write_csv(pictures(tmp_path, "a.png", "b.png")/"captions.csv", ["image", "caption"], ["a.png", "A dog. It runs."],
              ["a.png", "Another."], ["a.png", "Another."], ["b.png", "B."])
    with pytest.warns(UserWarning, match="captions.csv: 1 pictures have a row a caption.* 1 rows repeat"):
        r = read_records(tmp_path)
    assert r.captions == [["A dog.", "It runs."], ["B."]] and r.short == [["A dog. It runs.", "Another."], ["B."]]
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="1 of 2 pictures have one caption.*`captions`"):
        read_records(tmp_path, cache=tmp_path/"cache")


# captions that are too many for memory

def test_a_table_at_rest_is_the_table_in_memory(tmp_path):
    rows = [[f"{i % 5}.png", f"Number {i}. It is {i % 7}."] for i in range(40)]
    write_csv(pictures(tmp_path, *[f"{i}.png" for i in range(5)])/"captions.csv", ["image", "caption"], *rows)
    with pytest.warns(UserWarning, match="name an image"): want = read_records(tmp_path)
    with pytest.warns(UserWarning, match="name an image"): found = read_records(tmp_path, cache=tmp_path/"cache")
    assert list(found.captions) == want.captions and list(found.images) == want.images and found.short is None
    assert read_records(tmp_path, cache=tmp_path/"cache").captions[39] == want.captions[39]      # not written again
    assert len(list((tmp_path/"cache").glob("captions.index-*"))) == 1
    assert list(pickle.loads(pickle.dumps(found)).captions) == want.captions
    write_csv(tmp_path/"captions.csv", ["image", "captions"], ["0.png", '["A.", "B. C."]'])
    assert list(read_records(tmp_path, cache=tmp_path/"cache").short) == [["A.", "B. C."]]


def test_another_splitter_or_column_makes_another_file(tmp_path):
    line = {"image": "a.png", "caption": "One. Two.", "text": "Three. Four."}
    (pictures(tmp_path, "a.png")/"captions.jsonl").write_text(json.dumps(line))
    found = [read_records(tmp_path, cache=tmp_path, **more).captions[0]
             for more in ({}, {"splitter": "period"}, {"caption": "text"}, {})]
    assert found == [["One.", "Two."], ["One", "Two."], ["Three.", "Four."], ["One.", "Two."]]
    assert len(list(tmp_path.glob("captions.index-*"))) == 3


# readers

def test_a_caption_in_parts_is_cut_at_them():
    assert sentences_of(("A dog", "It runs. It is old."), "default") == ["A dog", "It runs.", "It is old."]
    assert sentences_of(("A dog", "It runs."), "period") == split_sentences("A dog\nIt runs.", "period")


def test_a_file_that_is_gone_on_with_keeps_its_order():
    "What `checked` yields is what can be used; what it notes is every other."
    given_samples = [Sample("1", "a", ["A."]), Sample("2", "b", ["\ud800"]), Sample("3", "c", [("", "C.")])]
    noted = []
    assert list(checked(given_samples, lambda *what: noted.append(what), "x")) == [given_samples[0], given_samples[2]]
    assert len(noted) == 1 and noted[0][0] == "records"


def test_pictures_are_not_opened_by_reading(tmp_path):
    (tmp_path/"a.png").write_bytes(b"no picture")
    write_csv(tmp_path/"captions.csv", ["image", "caption"], ["a.png", "A."])
    assert len(read_records(tmp_path)) == 1
    out = io.BytesIO()
    rgb().save(out, "png")
    (tmp_path/"a.png").write_bytes(out.getvalue())
