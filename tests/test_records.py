"""Records name what is wrong, every picture is read or named, and equal contents have equal digests."""
import multiprocessing
import os
import pickle
import shutil
import unicodedata
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from files import pictures, rgb
from PIL import Image

from debias_clip.records import (
    Column,
    ImageError,
    Records,
    captions_digest,
    in_processes,
    in_threads,
    load_image,
    made_once,
    pictures_digest,
    readable,
    select,
    write_samples,
)

# records


@pytest.mark.parametrize("captions,message", [
    ([["A."], []], r"1 of 2 samples have no caption.*sample 1 \(b.jpg\)"),
    ([["A."], ["B.", "  \n"]], "blank sentence.*b.jpg"),
    ([["A."]], "2 images, but 1 captions"),
    (["A.", "B."], "lists of sentences")])
def test_records_name_what_is_wrong(captions, message):
    with pytest.raises(ValueError, match=message): Records("x", ["a.jpg", "b.jpg"], captions)


@pytest.mark.parametrize("images,short,message", [
    (["a.jpg"], [[]], "`short`: sample 0"),
    (np.zeros((1, 2, 2, 3)), None, "uint8"),
    (np.zeros((1, 2, 2), np.uint8), None, "uint8"),
    ([], None, "empty")])
def test_records_check_short_captions_and_arrays(images, short, message):
    with pytest.raises(ValueError, match=message): Records("x", images, [["A."]]*len(images), short=short)


def test_select_keeps_pairs_together():
    r = Records("x", ["a", "b", "c"], [["A."], ["B."], ["C."]], short=[["a"], ["b"], ["c"]], splitter="period")
    s = select(r, np.array([2, 0]))
    assert (s.images, s.captions, s.short) == (["c", "a"], [["C."], ["A."]], [["c"], ["a"]])
    assert s.splitter == "period"


# pictures

@pytest.mark.parametrize("mode,suffix", [
    ("L", "png"), ("1", "png"), ("P", "png"), ("P", "gif"), ("RGBA", "png"), ("LA", "png"), ("CMYK", "jpg"),
    ("CMYK", "tif"), ("L", "jpg"), ("YCbCr", "jpg"), ("I;16", "png"), ("I;16", "tif"), ("I", "tif"), ("RGBA", "webp")])
def test_every_mode_becomes_rgb(tmp_path, mode, suffix):
    path = tmp_path/f"x.{suffix}"
    kind = {"I;16": np.uint16, "I": np.int32}.get(mode)
    image = Image.fromarray(np.full((6, 9), 65535, kind)) if kind else rgb().convert(mode)
    image.save(path)
    out = load_image(path)
    assert out.mode == "RGB" and out.size == (9, 6)
    if kind: assert out.getpixel((0, 0)) == (255, 255, 255)
    if mode == "RGBA" and suffix == "png": assert np.array_equal(np.asarray(out), np.asarray(rgb()))


def test_see_through_is_white(tmp_path):
    palette = Image.new("P", (2, 2), 1)
    palette.putpalette([0, 0, 0, 9, 9, 9])
    palette.save(tmp_path/"palette.png", transparency=1)
    Image.new("RGB", (2, 2), (1, 2, 3)).save(tmp_path/"key.png", transparency=(1, 2, 3))
    Image.new("RGBA", (2, 2), (0, 0, 0, 0)).save(tmp_path/"rgba.png")
    Image.new("LA", (2, 2), (0, 0)).save(tmp_path/"la.png")
    Image.new("RGBA", (2, 2), (0, 0, 0, 128)).save(tmp_path/"half.png")
    seen = {file.stem: load_image(file).getpixel((0, 0)) for file in tmp_path.iterdir()}
    assert seen.pop("half") == (127,)*3
    assert set(seen.values()) == {(255,)*3} and len(seen) == 4


TURNS = {1: None, 2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE", 6: "ROTATE_90",
         7: "TRANSVERSE", 8: "ROTATE_270"}


@pytest.mark.parametrize("tag", TURNS)
def test_exif_turns_the_picture_upright(tmp_path, tag):
    image = rgb() if TURNS[tag] is None else rgb().transpose(Image.Transpose[TURNS[tag]])
    exif = Image.Exif()
    exif[0x0112] = tag
    image.save(tmp_path/"x.png", exif=exif)
    assert np.array_equal(np.asarray(load_image(tmp_path/"x.png")), np.asarray(rgb()))


def test_damaged_exif_does_not_lose_the_picture(tmp_path):
    rgb().save(tmp_path/"x.jpg", exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff\x01")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert load_image(tmp_path/"x.jpg").size == (9, 6)


@pytest.mark.parametrize("suffix,options", [("gif", {}), ("webp", {"lossless": True}), ("png", {})])
def test_animations_show_their_first_frame(tmp_path, suffix, options):
    red, blue = (Image.new("RGB", (4, 4), colour) for colour in ("red", "blue"))
    red.save(tmp_path/f"x.{suffix}", save_all=True, append_images=[blue], duration=50, **options)
    assert load_image(tmp_path/f"x.{suffix}").getpixel((0, 0)) == (255, 0, 0)


@pytest.mark.parametrize("suffix", ["jpg", "png", "gif", "webp", "tif", "bmp"])
def test_a_picture_cut_short_is_named(tmp_path, suffix):
    file = tmp_path/f"cut.{suffix}"
    rgb(200, 200).save(file)
    file.write_bytes(file.read_bytes()[:file.stat().st_size//2])
    for at_least in (None, 1):
        with pytest.raises(ImageError, match=rf"cut\.{suffix}: cannot be read"): load_image(file, at_least)


def test_what_cannot_be_read_is_named(tmp_path, monkeypatch):
    rgb(200, 200).save(tmp_path/"good.jpg")
    (tmp_path/"zero.png").touch()
    (tmp_path/"page.jpg").write_text("<html>404</html>")
    with pytest.raises(ImageError, match=r"zero\.png: the file is empty"): load_image(tmp_path/"zero.png")
    with pytest.raises(ImageError, match=r"page\.jpg: cannot be read"): load_image(tmp_path/"page.jpg")
    with pytest.raises(ImageError, match="cannot be read"): load_image(tmp_path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(ImageError, match=r"good\.jpg: more than 200 pixels"): load_image(tmp_path/"good.jpg")


def test_a_missing_picture_is_explained(tmp_path):
    pictures(tmp_path, "good.jpg", unicodedata.normalize("NFD", "é.jpg"))
    (tmp_path/"link.jpg").symlink_to(tmp_path/"nowhere.jpg")
    hints = {"GOOD.jpg": "'good.jpg' is there: the names differ in upper and lower case",
             unicodedata.normalize("NFC", "é.jpg"): "accented letter is written",
             "link.jpg": "a link to a file that is not there", "a\\b.jpg": "write folders with /"}
    for name, hint in hints.items():
        with pytest.raises(ImageError, match=f"no such file; .*{hint}"): load_image(tmp_path/name)
    with pytest.raises(ImageError, match="no such file; it is an address"): load_image(f"{tmp_path}/https://x.org/a.jpg")
    with pytest.raises(ImageError, match="no such file$"): load_image(tmp_path/"nowhere"/"a.jpg")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_a_forbidden_picture_is_explained(tmp_path):
    (pictures(tmp_path, "a.png")/"a.png").chmod(0)
    with pytest.raises(ImageError, match="permissions"): load_image(tmp_path/"a.png")


def test_large_jpegs_are_decoded_small(tmp_path):
    Image.linear_gradient("L").resize((1024, 768)).convert("RGB").save(tmp_path/"x.jpg", quality=95)
    whole, quarter = load_image(tmp_path/"x.jpg"), load_image(tmp_path/"x.jpg", at_least=180)
    assert quarter.size == (256, 192) and load_image(tmp_path/"x.jpg", at_least=193).size == (512, 384)
    thumbnails = [np.asarray(image.resize((64, 48)), float) for image in (whole, quarter)]
    assert np.abs(thumbnails[0] - thumbnails[1]).max() < 4


def test_unreadable_pictures_stop_or_are_left_out_by_name(tmp_path):
    pictures(tmp_path, *[f"{i}.png" for i in range(4)])
    (tmp_path/"2.png").write_bytes(b"")
    r = Records("mine", [tmp_path/f"{i}.png" for i in range(4)], [[f"Number {i}."] for i in range(4)])
    with pytest.raises(ValueError, match=r"mine: 1 of 4 images cannot be read: .*2\.png.*max_unreadable"): readable(r)
    with pytest.raises(ValueError, match="max_unreadable"): readable(r, max_share=.2)
    with pytest.warns(UserWarning, match=r"1 of 4.*2\.png.*left out"): rest = readable(r, max_share=.25)
    assert rest.captions == [["Number 0."], ["Number 1."], ["Number 3."]]
    assert [p.name for p in rest.images] == ["0.png", "1.png", "3.png"]
    array = Records("x", np.zeros((1, 2, 2, 3), np.uint8), [["A."]])
    assert readable(array) is array


# digests

@pytest.fixture
def data(tmp_path):
    "A folder of pictures, and a function that makes its records."
    pictures(tmp_path/"one", "a/1.png", "a/2.png", "b/1.png")
    return tmp_path/"one", lambda root: Records("x", [root/n for n in ("a/1.png", "a/2.png", "b/1.png")],
                                                [["A."], ["B.", "C."], ["D."]])


def test_a_copy_has_the_same_digest_wherever_it_lies(data, tmp_path):
    root, records = data
    shutil.copytree(root, tmp_path/"elsewhere"/"deep", dirs_exist_ok=True)
    os.utime(tmp_path/"elsewhere/deep/a/1.png", (0, 0))
    assert records(root).digest() == records(tmp_path/"elsewhere"/"deep").digest()
    as_text = Records("y", [str(p) for p in records(root).images], records(root).captions)
    assert as_text.digest() == records(root).digest()


def change_bytes(root): (root/"a/2.png").write_bytes((root/"a/2.png").read_bytes()[:-1] + b"x")


@pytest.mark.parametrize("change", [
    change_bytes, lambda root: (root/"a/2.png").write_bytes(b"other"),
    lambda root: shutil.copy(root/"a/1.png", root/"b/1.png") and Image.new("RGB", (9, 6)).save(root/"b/1.png")])
def test_other_pictures_have_another_digest(data, change):
    root, records = data
    before = records(root).digest()
    change(root)
    after = records(root).digest()
    assert after["pictures"] != before["pictures"] and after["captions"] == before["captions"]


def test_order_and_names_count(data):
    root, records = data
    images = records(root).images
    digests = {pictures_digest(some) for some in (images, images[::-1], images[:2])}
    (root/"a/1.png").rename(root/"a/0.png")
    digests.add(pictures_digest([root/"a/0.png", *images[1:]]))
    assert len(digests) == 4
    with pytest.raises(ImageError, match="1.png"): records(root).digest()


def test_captions_are_known_by_their_sentences():
    digests = [captions_digest(c, j) for c in ([["A. B."]], [["A.", "B."]], [["A."], ["B."]]) for j in (" ", ". ")]
    assert len(set(digests)) == 6
    assert captions_digest((("A.", "B."),)) == captions_digest([["A.", "B."]])


def test_arrays_are_known_by_their_pixels():
    a = np.zeros((2, 2, 2, 3), np.uint8)
    b = a.copy()
    b[1, 1, 1, 2] = 1
    assert len({pictures_digest(x) for x in (a, b, a[:1])}) == 3 and pictures_digest(a) == pictures_digest(a.copy())


def test_of_many_pictures_some_are_opened(tmp_path, monkeypatch):
    files = [tmp_path/f"{i:03}.jpg" for i in range(50)]
    for file in files: file.write_bytes(b"same size")
    before = pictures_digest(files, opened=5)
    files[3].write_bytes(b"same sized"[:9])
    assert pictures_digest(files, opened=5) == before                     # equal in size, and not among the five
    files[-1].write_bytes(b"SAME size")
    assert pictures_digest(files, opened=5) != before


# captions at rest

ROWS = [("a.png", ["One.", "Two."], []), ("b/c.png", ["Drei ü 赤い."], ["short", "more"]), ("d.png", ["Four."], [])]


@pytest.fixture
def folder(tmp_path):
    write_samples(tmp_path, ROWS, block=2)
    return tmp_path


def test_a_column_reads_as_the_list_it_was_written_from(folder):
    captions, images = Column(folder, "caption"), Column(folder, "image", root="/pictures")
    assert list(captions) == [caption for _, caption, _ in ROWS] == list(captions.values())
    assert captions[-1] == ["Four."] and images[1] == os.path.join("/pictures", "b/c.png")
    assert list(Column(folder, "short")) == [[], ["short", "more"], []]
    for i in (3, -4):
        with pytest.raises(IndexError): captions[i]


def test_a_part_of_a_column_is_one(folder):
    some = Column(folder, "caption").take([2, 1, 1])
    assert list(some) == list(some.values()) == [ROWS[2][1], ROWS[1][1], ROWS[1][1]]
    assert some.take(np.array([1]))[0] == ROWS[1][1]
    again = pickle.loads(pickle.dumps(some))
    assert list(again) == list(some) and len(pickle.dumps(Column(folder, "caption"))) < 300
    records = Records("x", Column(folder, "image", root=folder), Column(folder, "caption"))
    assert select(records, [1]).images[0] == os.path.join(folder, "b/c.png")


def test_captions_and_pictures_at_rest_have_the_digest_of_those_in_memory(folder, tmp_path):
    pictures(tmp_path, *[name for name, _, _ in ROWS])
    at_rest = Records("x", Column(folder, "image", root=folder), Column(folder, "caption"))
    in_memory = Records("x", [tmp_path/name for name, _, _ in ROWS], [caption for _, caption, _ in ROWS])
    for index in ([0, 1, 2], [2, 0]): assert select(at_rest, index).digest() == select(in_memory, index).digest()
    assert at_rest.digest() == in_memory.digest() != select(at_rest, [1, 0, 2]).digest()


# by all cores

def total(part): return len(part), sum(part)


def test_parts_come_in_order_and_short_lists_start_no_process(monkeypatch):
    assert list(in_processes(total, range(100), block=7, workers=2)) == [total(range(100)[i:i + 7])
                                                                         for i in range(0, 100, 7)]
    monkeypatch.setattr(multiprocessing.Process, "start", lambda self: pytest.fail("a process was started"))
    assert list(in_processes(total, range(10), block=7, workers=2)) == [(7, 21), (3, 24)]
    assert list(in_processes(total, range(21), block=7, workers=1)) == [(7, 21), (7, 70), (7, 119)]
    assert list(in_processes(total, [])) == []


def test_a_long_list_is_never_held():
    taken = []
    def items():
        for i in range(1000):
            taken.append(i)
            yield i
    parts = in_processes(total, items(), block=1, workers=1)
    next(parts)
    assert len(taken) < 5


def test_threads_keep_the_order():
    assert in_threads(lambda x: -x, range(1000), threads=3) == [-i for i in range(1000)] and in_threads(abs, []) == []


def test_a_folder_is_made_once_and_whole(tmp_path):
    made = []
    def make(beside):
        made.append(beside)
        (beside/"x").write_text("whole")
    with ThreadPoolExecutor(4) as pool: list(pool.map(lambda _: made_once(tmp_path/"deep/index", make), range(4)))
    assert len(made) == 1 and (tmp_path/"deep/index/x").read_text() == "whole"
    def stop(beside):
        (beside/"x").write_text("half")
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt): made_once(tmp_path/"other", stop)
    assert [p.name for p in tmp_path.iterdir() if p.suffix != ".lock"] == ["deep"]
    (tmp_path/"file").touch()
    with pytest.raises(ValueError, match=r"cannot be written.*another folder"): made_once(tmp_path/"file"/"index", make)
