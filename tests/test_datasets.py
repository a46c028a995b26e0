"""Data sets on disk: fetched whole or not at all, read to the end whatever is wrong with them, every planted fault found."""
import csv, hashlib, io, json, os, re, stat, sys, tarfile, threading, zipfile
from collections import Counter
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from PIL import Image
from typer.testing import CliRunner

from debias_clip import data, datasets, runs
from debias_clip.captions import DEBIAS, NO_SUMMARY, RECIPES, sample_rng, split_sentences
from debias_clip.data import PROTOCOLS, PairDataset, Records, TextStore, load_records, read_records
from debias_clip.datasets import DATASETS, KINDS, DataSet, Source, check_data, data_set, data_table, fetch, get_data, scan, show_samples, unpack
from debias_clip.tokens import get_tokenizer

SHARED = Path(__file__).parents[2]/"shared"/"data"
BODY = bytes(np.random.default_rng(0).integers(0, 256, 300_000, dtype=np.uint8))
sha256 = lambda raw: "sha256:" + hashlib.sha256(raw).hexdigest()


# ---- a server that misbehaves as told

class Server:
    "Files by path. breaks: bytes after which each next reply ends; statuses: of the next replies; ranges, if_range: whether it knows these headers; claim: bytes it says a file has."
    def __init__(self):
        self.files, self.tags, self.moved, self.breaks, self.statuses, self.asked = {}, {}, {}, [], [], []
        self.ranges = self.if_range = True
        self.claim, self.early = None, 0
        server = self
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self): server.answer(self)
            def log_message(self, *args): pass
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, kwargs=dict(poll_interval=.01), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"

    def answer(self, h):
        self.asked.append((h.path, h.headers.get("Range"), h.headers.get("If-Range")))
        status = self.statuses.pop(0) if self.statuses else 200
        if status == 200 and h.path in self.moved: h.send_response(302); h.send_header("Location", self.moved[h.path]); h.send_header("Content-Length", "0"); h.end_headers(); return
        if status != 200 or h.path not in self.files: h.send_error(status if status != 200 else 404); return
        body, tag, wanted = self.files[h.path], self.tags.get(h.path), h.headers.get("Range") if self.ranges else None
        if self.if_range and h.headers.get("If-Range") not in (None, tag): wanted = None
        at = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1]) if wanted else 0
        if wanted and at >= len(body): h.send_response(416); h.send_header("Content-Range", f"bytes */{len(body)}"); h.send_header("Content-Length", "0"); h.end_headers(); return
        at = max(at - self.early, 0)
        h.send_response(206 if wanted else 200)
        if wanted: h.send_header("Content-Range", f"bytes {at}-{len(body) - 1}/{len(body)}")
        if tag: h.send_header("ETag", tag)
        h.send_header("Content-Length", str((self.claim or len(body)) - at)); h.end_headers()
        h.wfile.write(body[at:][:self.breaks.pop(0) if self.breaks else None])
        h.close_connection = True

    def ranges_asked(self): return [r for _, r, _ in self.asked]


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    s = Server()
    s.files["/a.bin"] = BODY
    yield s
    s.http.shutdown(); s.http.server_close()


def get(server, folder, path="/a.bin", **more): return fetch(server.url + path, folder/"a.bin", **dict(wait=0, progress=False) | more)


def left(folder): return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def test_a_file_comes_whole(server, tmp_path):
    found = get(server, tmp_path, size=len(BODY), digest=sha256(BODY))
    assert (tmp_path/"a.bin").read_bytes() == BODY and left(tmp_path) == ["a.bin"] and server.ranges_asked() == [None]
    assert found == dict(bytes=len(BODY), sha256=hashlib.sha256(BODY).hexdigest(), md5=hashlib.md5(BODY).hexdigest())


@pytest.mark.parametrize("tag", [None, '"v1"', 'W/"v1"'])
def test_a_broken_connection_goes_on_where_it_was(server, tmp_path, tag):
    server.tags["/a.bin"], server.breaks = tag, [100_000, 50_000]
    get(server, tmp_path, digest=sha256(BODY))
    assert server.ranges_asked() == [None, "bytes=100000-", "bytes=150000-"] and left(tmp_path) == ["a.bin"]
    assert {i for _, r, i in server.asked if r} == {tag if tag == '"v1"' else None}          # a weak tag says nothing about bytes


def test_a_stopped_call_is_gone_on_with_by_the_next(server, tmp_path):
    server.breaks = [100_000]
    with pytest.raises(ValueError, match="ended after 100,000 of 300,000 bytes.*the same command goes on"): get(server, tmp_path, tries=1)
    assert left(tmp_path) == ["a.bin.part", "a.bin.part.json"]
    get(server, tmp_path, digest=sha256(BODY))
    assert server.ranges_asked() == [None, "bytes=100000-"] and left(tmp_path) == ["a.bin"]


def test_a_part_of_another_address_is_no_beginning(server, tmp_path):
    server.breaks, server.files["/b.bin"] = [100_000], BODY[::-1]
    with pytest.raises(ValueError): get(server, tmp_path, tries=1)
    get(server, tmp_path, "/b.bin", digest=sha256(BODY[::-1]))
    assert server.ranges_asked() == [None, None]


def test_tries_are_counted_without_progress_only(server, tmp_path):
    server.breaks = [1000]*20
    get(server, tmp_path, tries=2, digest=sha256(BODY))
    assert len(server.asked) == 21


def test_a_server_that_knows_no_ranges_sends_all_of_it(server, tmp_path):
    server.ranges, server.breaks = False, [100_000]
    get(server, tmp_path, digest=sha256(BODY))
    assert server.ranges_asked() == [None, "bytes=100000-"]


def test_a_range_that_begins_earlier_overlaps(server, tmp_path):
    server.breaks, server.early = [100_000], 777
    get(server, tmp_path, digest=sha256(BODY))


@pytest.mark.parametrize("if_range", [True, False])
def test_two_versions_of_a_file_are_never_joined(server, tmp_path, if_range):
    server.if_range, server.tags["/a.bin"], server.breaks = if_range, '"v1"', [100_000]
    with pytest.raises(ValueError): get(server, tmp_path, tries=1)
    server.files["/a.bin"], server.tags["/a.bin"] = BODY[::-1] + b"more", '"v2"'
    get(server, tmp_path)
    assert (tmp_path/"a.bin").read_bytes() == BODY[::-1] + b"more"


def test_a_part_that_is_whole_already_is_only_named(server, tmp_path):
    (tmp_path/"a.bin.part").write_bytes(BODY)
    (tmp_path/"a.bin.part.json").write_text(json.dumps(dict(url=f"{server.url}/a.bin", tag=None, total=len(BODY))))
    get(server, tmp_path, digest=sha256(BODY))
    assert server.ranges_asked() == [f"bytes={len(BODY)}-"] and left(tmp_path) == ["a.bin"]
    (tmp_path/"a.bin").rename(tmp_path/"a.bin.part")
    with open(tmp_path/"a.bin.part", "ab") as f: f.write(b"too much")
    (tmp_path/"a.bin.part.json").write_text(json.dumps(dict(url=f"{server.url}/a.bin", tag=None, total=None)))
    get(server, tmp_path, digest=sha256(BODY))                             # a part longer than the file is begun again


def test_a_moved_file_is_followed_and_gone_on_with(server, tmp_path):
    server.moved["/old"], server.breaks = "/a.bin", [100_000]
    get(server, tmp_path, "/old", digest=sha256(BODY))
    assert server.ranges_asked() == [None, None, "bytes=100000-", "bytes=100000-"]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(breaks=st.lists(st.integers(0, 200_000), max_size=5), ranges=st.booleans(), early=st.integers(0, 5000), tag=st.sampled_from([None, '"x"']))
def test_whatever_breaks_the_bytes_are_right(server, tmp_path_factory, breaks, ranges, early, tag):
    server.breaks, server.ranges, server.early, server.tags["/a.bin"] = list(breaks), ranges, early, tag
    folder = tmp_path_factory.mktemp("x")
    get(server, folder, tries=7)
    assert (folder/"a.bin").read_bytes() == BODY and left(folder) == ["a.bin"]


def test_a_wrong_checksum_is_not_kept(server, tmp_path):
    for digest in (sha256(b"other"), "md5:" + "0"*32):
        with pytest.raises(ValueError, match=rf"its {digest.split(':')[0]} is \w+, not {digest.split(':')[1]}.*not kept.*--unverified"): get(server, tmp_path, digest=digest)
        assert left(tmp_path) == []


@pytest.mark.parametrize("status", [404, 403, 410])
def test_a_file_that_is_not_there_is_told_at_once(server, tmp_path, status):
    server.statuses = [status]
    with pytest.raises(ValueError, match=f"/a.bin: the server answers {status} .*by hand"): get(server, tmp_path)
    assert len(server.asked) == 1 and left(tmp_path) == []


def test_a_server_in_trouble_is_asked_again(server, tmp_path):
    server.statuses = [503, 429, 500]
    get(server, tmp_path, digest=sha256(BODY))
    server.statuses = [503]*5
    (tmp_path/"a.bin").unlink()
    with pytest.raises(ValueError, match="answers 503 .*5 tries"): get(server, tmp_path)
    assert left(tmp_path) == []


def test_a_server_that_is_away(tmp_path, server):
    server.http.shutdown(); server.http.server_close()
    with pytest.raises(ValueError, match="cannot be fetched .*2 tries"): get(server, tmp_path, tries=2)
    assert left(tmp_path) == []


def test_a_wrong_length_is_noticed(server, tmp_path):
    server.claim, server.ranges = len(BODY) + 10, False
    with pytest.raises(ValueError, match="ended after 300,000 of 300,010 bytes"): get(server, tmp_path, tries=2)
    assert "a.bin" not in left(tmp_path)
    server.claim, server.asked[:] = None, []
    with pytest.raises(ValueError, match="offers 300,000 bytes, 5 are published"): get(server, tmp_path/"new", size=5)
    assert len(server.asked) == 1 and left(tmp_path/"new") == []


def test_a_full_disk_is_told_before(server, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.shutil, "disk_usage", lambda folder: os.terminal_size((0, 0)) and type("U", (), dict(free=1000)))
    with pytest.raises(ValueError, match=r"a\.bin needs 300,000 bytes, but .* has 1,000 bytes free"): get(server, tmp_path)
    assert left(tmp_path) == []


def test_one_process_fetches(server, tmp_path):
    fcntl = pytest.importorskip("fcntl")
    with open(tmp_path/"a.bin.part", "ab") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="fetched by another process"): get(server, tmp_path)
    get(server, tmp_path, digest=sha256(BODY))


# ---- archives

def a_zip(path, *members):
    with zipfile.ZipFile(path, "w") as z:
        for m in members: z.writestr(*m) if isinstance(m, tuple) else z.writestr(m, b"content of it")
    return path


def a_tar(path, *members, mode="w:gz"):
    with tarfile.open(path, mode) as tar:
        for m in members:
            info = m if isinstance(m, tarfile.TarInfo) else tarfile.TarInfo(m)
            if info.isreg(): info.size = 13
            tar.addfile(info, io.BytesIO(b"content of it"))
    return path


def special(name, kind, link=""):
    if kind == "zip":
        info = zipfile.ZipInfo(name); info.external_attr = (stat.S_IFLNK | 0o777) << 16
        return info
    info = tarfile.TarInfo(name); info.type, info.linkname = kind, link
    return info


@pytest.mark.parametrize("make,name", [(a_zip, "x.zip"), (a_tar, "x.tar.gz"), (lambda p, *m: a_tar(p, *m, mode="w"), "x.tar"), (lambda p, *m: a_tar(p, *m, mode="w:xz"), "x.tar.xz")])
def test_an_archive_lands_in_its_folder(tmp_path, make, name):
    archive = make(tmp_path/name, "image/1.jpg", "caption/1.txt", "image/2.jpg")
    assert unpack(archive, tmp_path/"to", progress=False) == 3 and left(tmp_path/"to") == ["caption/1.txt", "image/1.jpg", "image/2.jpg"]
    (tmp_path/"to/image/1.jpg").write_bytes(b"older"); (tmp_path/"to/image/mine.jpg").touch()
    assert unpack(archive, tmp_path/"to", only=("image/*",), progress=False) == 2
    assert (tmp_path/"to/image/1.jpg").read_bytes() == b"content of it" and (tmp_path/"to/image/mine.jpg").exists()
    with pytest.raises(ValueError, match="holds nothing like video"): unpack(archive, tmp_path/"to", only=("video/*",), progress=False)


BAD_NAMES = ["../x.jpg", "a/../../x.jpg", "/x.jpg", "..", "C:/x.jpg", "C:\\x.jpg", "a\\..\\..\\x.jpg", "\\x.jpg"]


@pytest.mark.parametrize("make,name,bad", [
    *[(a_zip, "x.zip", n) for n in BAD_NAMES], *[(a_tar, "x.tgz", n) for n in BAD_NAMES], (a_zip, "x.zip", special("link", "zip")),
    *[(a_tar, "x.tgz", special("link", kind, link)) for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE) for link in ("/etc", "../..", "image/1.jpg")],
    (a_tar, "x.tgz", special("dev", tarfile.CHRTYPE)), (a_tar, "x.tgz", special("pipe", tarfile.FIFOTYPE))], ids=str)
def test_an_archive_that_leads_elsewhere_is_refused_whole(tmp_path, make, name, bad):
    (tmp_path/"in").mkdir()
    archive = make(tmp_path/"in"/name, "image/1.jpg", bad, "image/2.jpg")
    with pytest.raises(ValueError, match="is refused: its member .*Nothing was unpacked"): unpack(archive, tmp_path/"in/to", progress=False)
    assert left(tmp_path) == [f"in/{name}"]


@pytest.mark.parametrize("make,name", [(a_zip, "x.zip"), (a_tar, "x.tar.gz"), (lambda p, *m: a_tar(p, *m, mode="w"), "x.tar")])
def test_a_damaged_archive_leaves_nothing(tmp_path, make, name):
    archive = make(tmp_path/name, *[f"image/{i}.jpg" for i in range(50)])
    whole = archive.read_bytes()
    damaged = [whole[:len(whole)//2], b"<html>404</html>", b"", whole.replace(b"content", b"CONTENT") if name == "x.zip" else whole[:200] + bytes(60) + whole[260:]]
    for raw in damaged:
        archive.write_bytes(raw)
        with pytest.raises(ValueError, match=f"{name} is damaged"): unpack(archive, tmp_path/"to", progress=False)
        assert left(tmp_path/"to") == []


def test_a_locked_zip_is_refused(tmp_path):
    raw = bytearray(a_zip(tmp_path/"x.zip", "a.txt").read_bytes())
    raw[raw.index(b"PK\1\2") + 8] |= 1
    (tmp_path/"x.zip").write_bytes(raw)
    with pytest.raises(ValueError, match="encrypted"): unpack(tmp_path/"x.zip", tmp_path, progress=False)


@pytest.mark.parametrize("make,name", [(a_zip, "x.zip"), (a_tar, "x.tgz")])
def test_interrupted_unpacking_leaves_nothing_that_looks_whole(tmp_path, monkeypatch, make, name):
    archive, calls = make(tmp_path/name, *[f"image/{i}.jpg" for i in range(9)]), []
    def stop(*args):
        calls.append(1)
        if len(calls) == 5: raise KeyboardInterrupt
    with monkeypatch.context() as m:
        m.setattr(datasets.tqdm, "update", stop)
        with pytest.raises(KeyboardInterrupt): unpack(archive, tmp_path/"to", progress=False)
    assert left(tmp_path/"to") == []
    killed = tmp_path/"to"/f".{name}.unpacking"/"image"               # what a kill would leave
    killed.mkdir(parents=True); (killed/"junk.jpg").touch()
    assert unpack(archive, tmp_path/"to", progress=False) == 9 and left(tmp_path/"to") == [f"image/{i}.jpg" for i in range(9)]


@pytest.mark.parametrize("make,name", [(a_zip, "x.zip"), (a_tar, "x.tgz")])
def test_no_room_to_unpack(tmp_path, monkeypatch, make, name):
    archive = make(tmp_path/name, "a.jpg", "b.jpg")
    monkeypatch.setattr(datasets.shutil, "disk_usage", lambda folder: type("U", (), dict(free=5)))
    with pytest.raises(ValueError, match=f"{name}, unpacked, needs"): unpack(archive, tmp_path/"to", progress=False)
    assert left(tmp_path/"to") == []


# ---- the layouts, whole: captions of pictures, written as each data set has them

def sentences(i, n=4): return " ".join([f"Scene {i} has {i + 2} houses.", "The first one is red.", f"Beside it {i} trees stand.", "The sky is grey."][:n])


def write_json(path, value): path.parent.mkdir(parents=True, exist_ok=True); path.write_text(json.dumps(value), encoding="utf-8")
def write_lines(path, lines): path.parent.mkdir(parents=True, exist_ok=True); path.write_bytes(b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines))


class Layout:
    """A data set of n samples in the layout of a protocol, whole or with faults.

    rows: [image name, list of captions] each. folder: of the pictures. write(root, rows, damaged): its captions; rows numbered in `damaged` cannot be read.
    """
    several, shares_images = False, True
    def __init__(self, name, root, n=16):
        self.name, self.root = name, root
        self.rows = [[self.image(i), [sentences(i)] if not self.several else [f"Scene {i}, told by person {k}." for k in range(5)]] for i in range(n)]
        self.damaged = set()
        for i, (image, _) in enumerate(self.rows): self.picture(image, i)

    def image(self, i): return f"{i}.jpg"
    def path(self, image): return self.root/self.folder/image
    def picture(self, image, seed):
        self.path(image).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.random.default_rng(seed).integers(0, 256, (24, 24 + seed, 3), dtype=np.uint8)).save(self.path(image), quality=90)   # no two of a size
    def where(self): return (self.name, self.root)
    def load(self): return load_records(self.name, self.root)
    def check(self, **more):
        self.write()
        return check_data(*self.where(), **dict(progress=False, threads=2) | more)


class Urban1k(Layout):
    folder, shares_images = "image", False
    def write(self):
        for i, (image, texts) in enumerate(self.rows):
            write_lines(self.root/"caption"/f"{Path(image).stem}.txt", [b"\xff\xfe"] if i in self.damaged else [*[""]*(i == 3), *texts, *["A second line."]*bool(texts[0].strip())])


class Dci(Layout):
    folder = "photos"
    def image(self, i): return f"sa_{i + 100}.jpg"
    def write(self):
        for i, (image, texts) in enumerate(self.rows):
            short, _, extra = texts[0].partition(". ")
            row = json.dumps(dict(image=image, short_caption=f"{short}." if short.strip() and extra else short, extra_caption=extra, mask_data={}))
            write_lines(self.root/"annotations"/f"{i}-data.json", [row[:len(row)//2] if i in self.damaged else row])


class Docci(Layout):
    folder = "images"
    def image(self, i): return f"test_{i:05}.jpg"
    def write(self):
        rows = [json.dumps(dict(example_id=Path(image).stem, split="test", image_file=image, description=t)) for image, (t,) in self.rows]
        other = json.dumps(dict(example_id="q", split="qual_test", image_file="q.jpg", description="Not of this split."))
        write_lines(self.root/"docci_descriptions.jsonlines", [r[:30] if i in self.damaged else r for i, r in enumerate(rows)] + [other])


class Iiw(Layout):
    folder = "images"
    def write(self):
        for k, part in enumerate(("IIW-400", "DCI_Test", "DOCCI_Test")):
            rows = [(i, json.dumps({"image/key" if k == 0 else "image": Path(image).stem if k != 1 and Path(image).suffix == ".jpg" else image, "IIW": t})) for i, (image, (t,)) in enumerate(self.rows) if i % 3 == k]
            write_lines(self.root/part/"data.jsonl", ["[1, 2]" if i in self.damaged else r for i, r in rows])


class Coco(Layout):
    folder, several = "val2017", True
    def image(self, i): return f"{i:012}.jpg"
    def write(self):
        images = [dict(id=i, file_name=image) for i, (image, _) in enumerate(self.rows)]
        for i in self.damaged: del images[i]["file_name"]
        write_json(self.root/"annotations/captions_val2017.json", dict(images=images, annotations=[dict(id=100*i + k, image_id=i, caption=t) for i, (_, texts) in enumerate(self.rows) if i not in self.damaged for k, t in enumerate(texts)]))


class Karpathy(Layout):
    folder, several, file, inside = "val2014", True, "dataset_coco.json", dict(filepath="val2014")
    def write(self):
        rows = [dict(filename=image, split="test", sentences=[dict(raw=t) for t in texts]) | self.inside for image, texts in self.rows]
        for i in self.damaged: del rows[i]["filename"]
        write_json(self.root/self.file, dict(images=[*rows, dict(filename="t.jpg", split="none", sentences=[]) | self.inside]))


class FlickrKarpathy(Karpathy): folder, file, inside = "flickr30k-images", "dataset_flickr30k.json", {}


class FlickrToken(Layout):
    folder, several, shares_images = "flickr30k-images", True, False
    def lines(self): return [f"{image} #{k}\t{t}".replace(" #", "#") for image, texts in self.rows for k, t in enumerate(texts)]
    def write(self): write_lines(self.root/"results_20130124.token", self.broken(self.lines()))
    def broken(self, lines): return ["no caption at all" if n//5 in self.damaged else line for n, line in enumerate(lines)]


class FlickrCsv(FlickrToken):
    folder = "flickr30k_images"
    def lines(self): return [f"{image}| {k}| {t}" for image, texts in self.rows for k, t in enumerate(texts)]
    def write(self): write_lines(self.root/"results.csv", ["image_name| comment_number| comment", *self.broken(self.lines())])


class ShareGpt4v(Layout):
    folder = "data"
    def image(self, i): return ("sam/images/sa_{}.jpg", "coco/train2017/{}.jpg", "llava/llava_pretrain/images/0/{}.jpg")[i % 3].format(i)
    def write(self):
        rows = [dict(image=image, conversations=[dict(value="What?"), dict(value=texts[0])][:1 if i in self.damaged else 2]) for i, (image, texts) in enumerate(self.rows)]
        write_json(self.root/"share-captioner_coco_lcs_sam_1246k_1107.json", rows)


class OwnCsv(Layout):
    folder = "pictures"
    def image(self, i): return f"deep/{i}.png"
    def write(self):
        out = io.StringIO(newline="")
        rows = [[f"pictures/{image}", t] + ["cut at a comma"]*(i in self.damaged) for i, (image, (t,)) in enumerate(self.rows)]
        csv.writer(out).writerows([["image", "caption"], *rows])
        (self.root/"captions.csv").write_bytes(out.getvalue().encode())
    def where(self): return (self.root,)
    def load(self): return read_records(self.root)


class OwnJsonl(OwnCsv):
    several = True
    def write(self):
        rows = [json.dumps(dict(image=f"pictures/{image}", captions=texts)) for image, texts in self.rows]
        write_lines(self.root/"captions.jsonl", [r[:-5].encode() + b"\xff" if i in self.damaged else r for i, r in enumerate(rows)])


LAYOUTS = {"urban1k": Urban1k, "urban1k-whole": Urban1k, "dci": Dci, "long-dci": Dci, "docci": Docci, "docci-5100": Docci, "iiw": Iiw, "coco": Coco, "coco-first5": Coco, "coco-karpathy": Karpathy, "flickr30k-1k": FlickrKarpathy,
           "flickr30k-karpathy-all": FlickrKarpathy, "flickr30k-full": FlickrToken, "flickr30k-full (csv)": FlickrCsv, "sharegpt4v-val": ShareGpt4v, "own csv": OwnCsv, "own jsonl": OwnJsonl}


@pytest.fixture
def make(tmp_path, monkeypatch):
    def made(name, n=16, root=tmp_path):
        layout = LAYOUTS[name](name.split(" ")[0], root, n)
        if layout.name in PROTOCOLS: monkeypatch.setitem(PROTOCOLS, layout.name, replace(PROTOCOLS[layout.name], images=n, texts=n*(5 if layout.several else 1)))
        return layout
    return made


def test_every_protocol_has_a_layout_here(): assert set(PROTOCOLS) - {n.split(" ")[0] for n in LAYOUTS} == {"sharegpt4v"}


@pytest.mark.filterwarnings("ignore:.*published")
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_whole_copy_is_read_as_its_loader_reads_it_and_has_no_faults(make, name):
    layout = make(name)
    layout.write()
    if name == "docci-5100": (layout.root/"images/q.jpg").write_bytes(layout.path(layout.rows[0][0]).read_bytes())
    records, noted = layout.load(), []
    samples = list(scan(*layout.where(), note=lambda *what: noted.append(what)))
    assert [os.path.normpath(s.image) for s in samples] == [os.path.normpath(p) for p in records.images] and not noted
    assert [data._sentences(s.texts[0], "default") for s in samples] == [list(c) for c in records.captions]
    if records.short is not None: assert [[t.strip() for t in s.texts] for s in samples] == records.short
    if name == "docci-5100": return
    report = layout.check()
    assert report.faults == {} and not any(report.found.values()) and report.images == 16 and report.texts == (80 if layout.several else 16), report.summary()
    assert len(report.tokens) == report.texts and "No faults." in report.summary() and layout.check(quick=True).faults == {}


@pytest.mark.filterwarnings("ignore:.*published")
def test_the_training_part_is_what_its_loader_reads(tmp_path):
    layout = ShareGpt4v("sharegpt4v", tmp_path, 3)
    layout.rows = [[f"sam/images/{i}.jpg", [f"Scene {i}. It is red."]] for i in range(1000)] + layout.rows
    layout.write()
    assert [(str(s.image), data._sentences(s.texts[0], "default")) for s in scan("sharegpt4v", tmp_path)] == [(r, c) for r, c in zip(layout.load().images, layout.load().captions)]


# ---- every fault, planted in every layout

def cut(path): path.write_bytes(path.read_bytes()[:-200])


def plant(layout, fault, i):
    "Damages sample i of a copy. Returns the kinds that a check must find once, or None where the layout cannot have it."
    image, texts = layout.rows[i]
    path = layout.path(image)
    if fault == "lost record": layout.rows[i] = None; return {"counts"}
    if fault == "unreadable record": layout.damaged.add(i); return {"counts", "records"}
    if fault == "missing picture": path.unlink(); return {"missing images"}
    if fault == "dangling link": path.unlink(); path.symlink_to("nowhere"); return {"missing images"}
    if fault == "letter case": path.rename(path.with_suffix(path.suffix.upper())); return {"letter case"}
    if fault == "empty picture": path.write_bytes(b""); return {"unreadable images"}
    if fault == "cut picture": cut(path); return {"unreadable images"}
    if fault == "page": path.write_text("<html>404 Not Found</html>"); return {"unreadable images"}
    if fault == "folder": path.unlink(); path.mkdir(); return {"unreadable images"}
    if fault == "bomb": Image.new("L", (200, 200)).save(path); return {"unreadable images"}
    if fault == "blank caption": texts[-1] = " " if layout.name != "flickr30k-full" else ""; return {"empty captions"}
    if fault == "same caption": texts[-1] = layout.rows[i - 1][1][-1] + " "; return {"repeated captions"}
    if fault == "same content": path.write_bytes(layout.path(layout.rows[i - 1][0]).read_bytes()); return {"repeated images"}
    if fault == "same path" and layout.shares_images: layout.rows[i][0] = layout.rows[i - 1][0]; return {"repeated images"}


FAULTS = ["lost record", "unreadable record", "missing picture", "dangling link", "letter case", "empty picture", "cut picture", "page", "folder", "bomb", "blank caption", "same caption", "same content", "same path"]
ONE_EACH = [n for n in LAYOUTS if n not in ("urban1k-whole", "long-dci", "docci-5100", "coco-first5", "flickr30k-karpathy-all")]


def lose(layout):
    "Writes the copy without the records that were lost."
    gone = [i for i, r in enumerate(layout.rows) if r is None]
    if layout.name == "urban1k":
        for i in gone: layout.path(layout.image(i)).unlink()
    shift = [i for i in range(len(layout.rows)) if i not in gone]
    layout.rows, layout.damaged = [layout.rows[i] for i in shift], {shift.index(i) for i in layout.damaged}


def expected(layout, kinds, lines=1):
    "How often a check finds each kind: records of files with a line for each caption count by the line, and one's own captions have no published number."
    found = Counter(kinds)
    if "records" in found and layout.name == "flickr30k-full": found["records"] *= 5
    if found["counts"] and layout.name.startswith("own"): del found["counts"]
    elif found["counts"]: found["counts"] = 1
    return +found


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ONE_EACH)
def test_every_planted_fault_is_found(make, name, fault, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 2000)
    layout = make(name)
    kinds = plant(layout, fault, 7)
    if kinds is None: pytest.skip("this layout cannot have it")
    lose(layout)
    report = layout.check()
    found = {k: len(v) for k, v in report.found.items() if v}
    assert found == expected(layout, kinds), report.summary()
    told = data_set_of(layout).repeats
    assert report.faults == {k: n for k, n in found.items() if k not in told}                  # what the published copy has, too, is told only
    (_, what), = report.found[kinds.intersection(("missing images", "letter case", "unreadable images")).pop()] if kinds & {"missing images", "letter case", "unreadable images"} else [(0, Path(layout.rows[7][0]).stem)]
    assert Path(layout.rows[7][0]).stem in what


def data_set_of(layout): return data_set(layout.name)[1] if layout.name in PROTOCOLS else DataSet("", 0, 0, "", "", "", ())


@pytest.mark.parametrize("name", ONE_EACH)
def test_all_faults_at_once_are_all_found(make, name, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 2000)
    layout, kinds = make(name, 2*len(FAULTS) + 1), []
    for k, fault in enumerate(FAULTS): kinds += plant(layout, fault, 2*k + 1) or ()
    lose(layout)
    report = layout.check()
    assert {k: len(v) for k, v in report.found.items() if v} == expected(layout, kinds), report.summary()
    assert len(report.summary().splitlines()) <= 30 and max(map(len, report.summary().splitlines())) <= 100
    for kind, told in dict(empty="empty (0 bytes)", cut="cut short", page="no picture inside", folder="a folder", bomb="too many pixels").items(): assert told in str(report.found["unreadable images"]), kind
    json.dumps(report.as_dict())
    quick = layout.check(quick=True)
    assert {k: len(v) for k, v in quick.found.items() if v} | {"unreadable images": 1, "repeated images": 1*layout.shares_images} == {**quick_of(expected(layout, kinds)), "unreadable images": 1, "repeated images": 1*layout.shares_images}
    assert "--quick opens no picture" in quick.summary() or layout.shares_images


def quick_of(found): return {k: v for k, v in found.items() if k not in ("unreadable images", "repeated images")}


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.data())
def test_any_faults_anywhere_are_counted_rightly(make, tmp_path_factory, monkeypatch, draw):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 2000)
    layout = make(draw.draw(st.sampled_from(["docci", "own csv", "iiw", "urban1k"])), 13, tmp_path_factory.mktemp("x"))
    kinds = []
    for i in draw.draw(st.lists(st.sampled_from(range(1, 13, 2)), unique=True)): kinds += plant(layout, draw.draw(st.sampled_from(FAULTS)), i) or ()
    lose(layout)
    report = layout.check()
    assert {k: len(v) for k, v in report.found.items() if v} == expected(layout, kinds), report.summary()


def test_lengths_are_told(make):
    layout = make("docci")
    layout.rows[2][1] = ["A single sentence."]
    layout.rows[4][1] = ["It is red. " + "It is very very long. "*20]
    layout.rows[5][1] = ["It is blue. " + "It is very very long. "*60]
    report = layout.check()
    assert (report.tokens > 77).sum() == 2 and (report.tokens > 248).sum() == 1 and (report.sentences == 1).sum() == 1 and report.faults == {}
    assert "over 77: 2 (12.5 %), over 248: 1 (6.2 %)" in report.summary() and "single sentence: 1 (6.2 %)" in report.summary()
    tokenizer = get_tokenizer("ViT-B-16-quickgelu")
    assert report.tokens.tolist() == [len(tokenizer.encode(t)) + 2 for _, (t,) in layout.rows]


@pytest.mark.skipif(not SHARED.is_dir(), reason="../shared/data is not beside this checkout")
def test_real_captions_and_photographs(tmp_path):
    rows = [json.loads(line) for line in (SHARED/"docci/captions.jsonl").read_text().splitlines()]
    write_lines(tmp_path/"docci_descriptions.jsonlines", [json.dumps(dict(split=r["id"].rsplit("_", 1)[0], image_file=f"{r['id']}.jpg", description=r["caption"])) for r in rows])
    report = check_data("docci", tmp_path, quick=True, progress=False)
    assert report.faults == {"missing images": 5000} and report.images == 5000                                   # captions as published, of which none repeats
    assert (np.median(report.tokens), report.tokens.max(), (report.tokens > 77).sum(), (report.tokens > 248).sum()) == (132, 567, 4720, 188)
    rows = [json.loads(line) for line in (SHARED/"coco_val/captions.jsonl").read_text().splitlines()]
    write_lines(tmp_path/"captions.jsonl", [json.dumps(dict(image=os.path.relpath(SHARED/"coco_val"/r["image"], tmp_path), captions=r["captions"])) for r in rows])
    report = check_data(tmp_path/"captions.jsonl", progress=False)
    assert report.faults == {} and (report.images, report.texts) == (len(rows), 5*len(rows))


def test_many_captions_are_counted_by_all_cores(monkeypatch):
    texts = [f"Scene {i}. It is red." for i in range(7_500)]
    assert list(datasets._all_lengths(iter(texts), workers=2, block=300)) == datasets._lengths(texts)


def test_missing_pictures_are_grouped_by_prefix_and_may_be_allowed(make):
    layout = make("sharegpt4v-val", 30)
    for i in (*range(0, 30, 3), 1, 2): layout.path(layout.rows[i][0]).unlink()
    report = layout.check()
    assert re.search(r"FAULT missing images +12\n +10 in data/sam/images \(sa_0.jpg, sa_3.jpg, sa_6.jpg, …\)\n +1 in data/\S+ \(1.jpg\)\n +1 in data/llava/llava_pretrain \(2.jpg\)", report.summary()), report.summary()
    assert layout.check(max_missing=.39).faults == {"missing images": 12} and layout.check(max_missing=.4).faults == {} and "note  missing images" in layout.check(max_missing=.4).summary()


def test_names_are_compared_from_any_folder(make, tmp_path, monkeypatch):
    layout = make("docci")
    (tmp_path/"images").rename(tmp_path/"IMAGES")
    layout.write()
    for here, root in [(tmp_path, "."), (tmp_path.parent, tmp_path.name), (tmp_path/"IMAGES", "..")]:
        monkeypatch.chdir(here)
        assert check_data("docci", root, progress=False).faults == {"letter case": 16}


def test_names_differ_by_folders_and_accents_too(make):
    layout = make("sharegpt4v-val")
    (layout.root/"data/sam").rename(layout.root/"data/SAM")
    report = layout.check()
    assert report.faults == {"letter case": 6} and "data/sam/images/sa_0.jpg is data/SAM/images/sa_0.jpg on disk" in report.found["letter case"][0][1]
    layout.rows[1][0] = "coco/train2017/caf\u00e9.jpg"
    (layout.root/"data/coco/train2017/1.jpg").rename(layout.root/"data/coco/train2017/cafe\u0301.jpg")
    assert layout.check().faults == {"letter case": 7}


def test_nothing_is_read_behind_damaged_json_but_all_before_it(make):
    layout = make("sharegpt4v-val")
    layout.write()
    file = next(layout.root.glob("*.json"))
    file.write_text(file.read_text()[:-500])
    report = check_data(*layout.where(), progress=False)
    assert set(report.faults) == {"counts", "records"} and 10 < report.images < 16 and "nothing can be read behind record" in report.summary()


@pytest.mark.parametrize("name,lost", [("docci", "docci_descriptions.jsonlines"), ("urban1k", "caption"), ("coco", "annotations"), ("iiw", "DCI_Test"), ("flickr30k-1k", "flickr30k-images"), ("own csv", "captions.csv")])
def test_a_copy_without_its_captions_is_a_fault(make, name, lost):
    layout = make(name)
    layout.write()
    (layout.root/lost).rename(layout.root/"elsewhere")
    report = check_data(*layout.where(), progress=False)
    assert report.faults["records"] == (1 if name != "urban1k" else 1) and "No faults" not in report.summary()


def test_faults_of_single_layouts(make):
    layout = make("coco")
    layout.write()
    file = layout.root/"annotations/captions_val2017.json"
    content = json.loads(file.read_text())
    content["annotations"] = content["annotations"][5:] + [dict(id=1, image_id=99, caption="Nowhere."), dict(id=2, image_id=3)]
    content["images"].append(dict(id=3, file_name="again.jpg"))
    file.write_text(json.dumps(content))
    report = check_data(*layout.where(), progress=False)
    assert report.faults == {"counts": 1, "records": 3, "empty captions": 1} and "image 0 (none)" in report.summary()
    (layout.root/"captions.csv").write_text('image,caption\nval2017/000000000000.jpg,A "red" box.\nval2017/000000000001.jpg\nval2017/000000000002.jpg,x, y\n,Blue.\nval2017/000000000003.jpg,\xe9\n', encoding="latin-1")
    report = check_data(layout.root/"captions.csv", progress=False)
    assert report.faults == {"records": 3, "empty captions": 1} and "not UTF-8" in str(report.found)
    (layout.root/"captions.csv").write_text('picture,text\na.jpg,b\n')
    assert check_data(layout.root, progress=False).faults == {"records": 1}


def test_shards_are_checked(tmp_path):
    png = lambda seed: (b := io.BytesIO(), Image.fromarray(np.random.default_rng(seed).integers(0, 256, (24, 24, 3), dtype=np.uint8)).save(b, "png")) and b.getvalue()
    def shard(k, faults=False):
        with tarfile.open(tmp_path/f"{k}.tar", "w") as tar:
            for i in range(6):
                picture = png(0 if faults and i == 1 else 10*k + i) if not (faults and i == 2) else b"<html>"
                text = "" if faults and i == 3 else sentences(10*k + i)
                for ending, raw in [("png", picture), ("txt", text.encode())]:
                    if faults and (i, ending) in ((4, "png"), (5, "txt")): continue
                    info = tarfile.TarInfo(f"{i}.{ending}"); info.size = len(raw); tar.addfile(info, io.BytesIO(raw))
    shard(0); shard(1)
    samples, records = list(scan(tmp_path)), read_records(tmp_path)
    assert [s.image for s in samples] == list(records.images) and [split_sentences(s.texts[0]) for s in samples] == [list(c) for c in records.captions]
    assert check_data(tmp_path, progress=False).faults == {}
    shard(1, True)
    report = check_data(tmp_path, progress=False)
    assert report.faults == {"records": 1, "missing images": 1, "unreadable images": 1, "empty captions": 1, "repeated images": 1}, report.summary()


def test_what_cannot_be_checked_is_said(tmp_path):
    for args, told in [(("flickr30k", tmp_path), "say one of flickr30k-karpathy-all, flickr30k-full, flickr30k-1k"), (("doci", tmp_path), "did you mean 'docci'"), (("docci", tmp_path/"no"), "is no folder"),
                       ((tmp_path/"no",), "There is no"), (("https://HOST/{000..001}.tar",), "copy them here")]:
        with pytest.raises(ValueError, match=re.escape(told)): check_data(*args)


# ---- data sets as they are published

def test_the_table_of_data_sets():
    lines = data_table().splitlines()
    assert max(map(len, lines)) <= 100 and len(lines) <= 30 and not any(line.endswith("…") for line in lines)
    assert Counter(p for d in DATASETS.values() for p in d.protocols) == Counter(list(PROTOCOLS))                # each protocol is read from one
    for name, d in DATASETS.items():
        assert name in data_table() and d.where.split("://")[1] in data_table()
        for p in d.protocols: assert data_set(p) == (name, d) and (PROTOCOLS[p].images or 0) <= d.images and (PROTOCOLS[p].texts or 0) <= d.texts
        for s in d.sources:
            assert re.fullmatch(r"https?://\S+", s.url) and re.fullmatch(r"|sha256:[0-9a-f]{64}|md5:[0-9a-f]{32}", s.digest) and (s.url.startswith("https") or s.digest), s     # without TLS a checksum is a must
            assert (s.unpack is None) == (not s.holds) == (not s.place.endswith((".zip", ".gz")))
    assert [n for n, d in DATASETS.items() if d.get == "by hand"] == ["flickr30k"]
    with pytest.raises(ValueError, match="did you mean 'urban1k'"): data_set("urban-1k")


def publish(server, monkeypatch, name, contents):
    "Serves a data set of one's own making in place of the real one. contents: place of each source -> bytes."
    sources = []
    for s in DATASETS[name].sources:
        server.files[f"/{s.place}"] = contents[s.place]
        sources.append(replace(s, url=f"{server.url}/{s.place}", to=s.place, bytes=len(contents[s.place]) if s.bytes else None, disk=None,
                               digest=s.digest and f"{s.digest.split(':')[0]}:{hashlib.new(s.digest.split(':')[0], contents[s.place]).hexdigest()}"))
    monkeypatch.setitem(DATASETS, name, replace(DATASETS[name], sources=tuple(sources)))


def packed(folder, kind, names=lambda p: True, inside=""):
    buffer = io.BytesIO()
    files = [p for p in sorted(folder.rglob("*")) if p.is_file() and names(p.relative_to(folder).as_posix())]
    if kind == "zip":
        with zipfile.ZipFile(buffer, "w") as z:
            for p in files: z.write(p, inside + p.relative_to(folder).as_posix())
    else:
        with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
            for p in files: tar.add(p, inside + p.relative_to(folder).as_posix())
    return buffer.getvalue()


def published(name, folder):
    "A whole copy as its owner would pack it: place of each source -> bytes."
    is_in = lambda *starts: lambda p: p.startswith(starts)
    if name == "urban1k": return {"Urban1k.zip": packed(folder, "zip", inside="Urban1k/")}
    if name == "dci": return {"dci.tar.gz": packed(folder, "tar", is_in("annotations", "complete", "splits"), "densely_captioned_images/")}
    if name == "docci": return {"docci_descriptions.jsonlines": (folder/"docci_descriptions.jsonlines").read_bytes(), "docci_images.tar.gz": packed(folder, "tar", is_in("images"))}
    if name == "iiw": return {f"{part}/data.jsonl": (folder/part/"data.jsonl").read_bytes() for part in ("IIW-400", "DCI_Test", "DOCCI_Test")}
    if name == "coco": return {"annotations_trainval2017.zip": packed(folder, "zip", is_in("annotations")), "val2017.zip": packed(folder, "zip", is_in("val2017"))}
    if name == "coco-karpathy": return {"caption_datasets.zip": packed(folder, "zip", is_in("dataset")), "val2014.zip": packed(folder, "zip", is_in("val2014"))}
    return {"share-captioner_coco_lcs_sam_1246k_1107.json": (folder/"share-captioner_coco_lcs_sam_1246k_1107.json").read_bytes(), "train2017.zip": packed(folder/"data/coco", "zip", is_in("train2017"))}


@pytest.mark.parametrize("name,protocol", [("urban1k", "urban1k"), ("docci", "docci"), ("coco", "coco"), ("coco-karpathy", "coco-karpathy"), ("dci", "dci"), ("iiw", "iiw"), ("sharegpt4v", "sharegpt4v-val")])
def test_what_is_fetched_is_what_the_loader_reads(server, make, tmp_path, monkeypatch, name, protocol):
    layout = make(protocol, root=tmp_path/"origin")
    layout.write()
    if name == "coco": (tmp_path/"origin/annotations/instances_val2017.json").write_text("large, and not wanted")
    publish(server, monkeypatch, name, published(name, tmp_path/"origin"))
    root, said = tmp_path/"to", []
    whole = get_data(protocol, root, progress=False, say=said.append)
    assert whole == (not DATASETS[name].by_hand) and not [f for f in left(root) if f.endswith((".zip", ".gz", ".part", ".part.json", ".tmp"))] and "annotations/instances_val2017.json" not in left(root)
    if not whole:                                                            # the pictures, which nobody may hand out, come by hand
        assert "put them into" in "\n".join(said) and all(what in "\n".join(said) for _, what in DATASETS[name].by_hand)
        for (image, _) in layout.rows:
            target = (root/"densely_captioned_images"/"photos" if name == "dci" else root/layout.folder)/image
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(layout.path(image).read_bytes())
    asked = len(server.asked)
    assert get_data(name, root, progress=False, say=said.append) and len(server.asked) == asked and "there already" in said[-2]       # the second call does nothing
    report = check_data(protocol, root, progress=False)
    assert report.faults == {} and report.images == 16 and len(load_records(protocol, root)) == 16
    receipts = json.loads((root/"downloads.json").read_text())
    assert {place: r["sha256"] for place, r in receipts.items()} == {place: sha256(server.files[f"/{place}"])[7:] for place in receipts} and len(receipts) == len(DATASETS[name].sources)


@pytest.fixture
def docci(server, make, tmp_path, monkeypatch):
    layout = make("docci", root=tmp_path/"origin")
    layout.write()
    publish(server, monkeypatch, "docci", published("docci", tmp_path/"origin"))
    return layout


def fetch_docci(tmp_path, **more):
    said = []
    get_data("docci", tmp_path/"to", **dict(progress=False, say=said.append) | more)
    return "\n".join(said)


def test_captions_can_be_fetched_alone(server, docci, tmp_path):
    fetch_docci(tmp_path, captions_only=True)
    assert left(tmp_path/"to") == ["docci_descriptions.jsonlines", "downloads.json"] and len(server.asked) == 1


def test_without_a_known_checksum_the_first_download_sets_it(server, docci, tmp_path):
    said = fetch_docci(tmp_path, captions_only=True)
    assert "checksum written down in downloads.json" in said
    file = tmp_path/"to/docci_descriptions.jsonlines"
    body = file.read_bytes()
    file.unlink()
    server.files["/docci_descriptions.jsonlines"] = body.replace(b"red", b"RED")
    with pytest.raises(ValueError, match="its sha256 is .*not kept"): fetch_docci(tmp_path, captions_only=True)
    assert not file.exists()
    assert "not checked" in fetch_docci(tmp_path, captions_only=True, unverified=True) and file.read_bytes() != body
    file.unlink()
    assert "sha256 as the first time" in fetch_docci(tmp_path, captions_only=True)


def test_interrupted_unpacking_is_made_good_without_another_download(server, docci, tmp_path, monkeypatch):
    with monkeypatch.context() as m:
        m.setattr(datasets, "_move", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt): fetch_docci(tmp_path)
    assert left(tmp_path/"to") == ["docci_descriptions.jsonlines", "docci_images.tar.gz", "downloads.json"]
    fetch_docci(tmp_path)
    assert len(server.asked) == 2 and len(load_records("docci", tmp_path/"to")) == 16
    fetch_docci(tmp_path, keep=True)
    assert len(server.asked) == 2 and "docci_images.tar.gz" not in left(tmp_path/"to")


def test_a_damaged_archive_sets_no_checksum_for_the_next(server, docci, tmp_path):
    good = server.files["/docci_images.tar.gz"]
    server.files["/docci_images.tar.gz"] = good[:len(good)//2] + bytes(len(good) - len(good)//2)
    with pytest.raises(ValueError, match="docci_images.tar.gz is damaged.*delete it and fetch it again"): fetch_docci(tmp_path)
    (tmp_path/"to/docci_images.tar.gz").unlink()
    server.files["/docci_images.tar.gz"] = good
    fetch_docci(tmp_path)
    assert len(load_records("docci", tmp_path/"to")) == 16


def test_files_put_there_by_hand_are_used_if_they_are_right(server, docci, tmp_path):
    root = tmp_path/"to"
    root.mkdir()
    (root/"docci_images.tar.gz").write_bytes(server.files["/docci_images.tar.gz"])
    fetch_docci(tmp_path, keep=True)
    assert [path for path, *_ in server.asked] == ["/docci_descriptions.jsonlines"] and "docci_images.tar.gz" in left(root)
    (root/"docci_descriptions.jsonlines").write_text("mine")
    with pytest.raises(ValueError, match=r"docci_descriptions.jsonlines was there before.*Move it away"): fetch_docci(tmp_path)
    assert (root/"docci_descriptions.jsonlines").read_text() == "mine"


def test_lost_pictures_are_fetched_again(server, docci, tmp_path):
    fetch_docci(tmp_path)
    for p in (tmp_path/"to/images").iterdir(): p.unlink()
    fetch_docci(tmp_path)
    assert len(left(tmp_path/"to/images")) == 16


def test_another_layout_or_a_small_disk_is_said(server, docci, tmp_path, monkeypatch):
    with monkeypatch.context() as m:
        m.setattr(datasets.shutil, "disk_usage", lambda folder: type("U", (), dict(free=1000)))
        with pytest.raises(ValueError, match="docci needs .*make room"): fetch_docci(tmp_path)
        assert not server.asked
    monkeypatch.setitem(DATASETS, "docci", replace(DATASETS["docci"], sources=tuple(replace(s, holds=("photos",) if s.holds else ()) for s in DATASETS["docci"].sources)))
    with pytest.raises(ValueError, match="there is no photos .*another than known"): fetch_docci(tmp_path)
    (tmp_path/"to/downloads.json").write_text("{")
    with pytest.raises(ValueError, match="downloads.json.*damaged"): fetch_docci(tmp_path)


def test_what_may_not_be_fetched_is_refused_with_where_to_ask(tmp_path, server):
    with pytest.raises(ValueError, match="may not be fetched") as e: get_data("flickr30k-1k", tmp_path/"f")
    for told in ("shannon.cs.illinois.edu", "flickr30k-images", "results_20130124.token", "dataset_flickr30k.json", "form"): assert told in str(e.value)
    assert not (tmp_path/"f").exists()


# ---- the command

def invoke(*args): return CliRunner().invoke(runs.app, ["data", *map(str, args)])


def test_check_ends_with_a_code_that_scripts_can_use(make, tmp_path):
    layout = make("docci")
    layout.write()
    where = ("docci", "--root", tmp_path)
    clean = invoke("check", *where)
    assert clean.exit_code == 0 and clean.output.rstrip().endswith("No faults.")
    layout.path(layout.rows[3][0]).unlink()
    faulty = invoke("check", *where, "--report", tmp_path/"found.json")
    assert faulty.exit_code == 1 and "FAULT missing images" in faulty.output
    found = json.loads((tmp_path/"found.json").read_text())
    assert found["faults"] == {"missing images": 1} and found["found"]["missing images"] == ["in images: test_00003.jpg"]
    assert invoke("check", *where, "--max-missing", .1).exit_code == 0 and "not opened" in invoke("check", *where, "--max-missing", .1, "--quick").output
    for args, told in [((*where, "--max-missing", 2), "max-missing"), (("flickr30k", "--root", tmp_path), "say one of"), (("docci", "--root", tmp_path/"no"), "no folder"), ((tmp_path/"no",), "There is no"), (("docci",), "--root"), ((), "NAME_OR_PATH")]:
        wrong = invoke("check", *args)
        assert wrong.exit_code == 2 and told in wrong.output, args


def test_own_tables_and_folders_are_checked(make, tmp_path):
    layout = make("own csv")
    layout.write()
    for what in (tmp_path, tmp_path/"captions.csv"): assert invoke("check", what).exit_code == 0
    layout.path("deep/2.png").write_bytes(b"")
    assert invoke("check", tmp_path).exit_code == 1 and invoke("check", tmp_path, "--quick").exit_code == 1         # a size of 0 is seen without opening


def test_get_and_list_from_the_command_line(server, docci, tmp_path, monkeypatch):
    assert invoke("list").output.rstrip() == data_table()
    done = invoke("get", "docci", "--root", tmp_path/"to")
    assert done.exit_code == 0 and "CC BY 4.0" in done.output and invoke("check", "docci", "--root", tmp_path/"to").exit_code == 0
    assert invoke("get", "doci", "--root", tmp_path).exit_code == 2 and invoke("get", "docci").exit_code == 2
    monkeypatch.setitem(DATASETS, "docci", replace(DATASETS["docci"], by_hand=((("photos",), "ask her"),)))
    assert invoke("get", "docci", "--root", tmp_path/"to").exit_code == 1
    monkeypatch.setattr(datasets, "fetch", lambda *args, **more: (_ for _ in ()).throw(KeyboardInterrupt))
    stopped = invoke("get", "docci", "--root", tmp_path/"new")
    assert stopped.exit_code == 1 and "the same command goes on" in stopped.output


@pytest.mark.parametrize("args,code,told", [(["check", "nowhere"], 2, "There is no nowhere"), (["get", "flickr30k", "--root", "f"], 1, "may not be fetched"), (["get", "docci", "--root", "f"], 1, "cannot be fetched")])
def test_errors_are_told_in_a_line_and_a_code(args, code, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["debias-clip", "data", *args])
    monkeypatch.setattr(datasets.urllib.request, "urlopen", lambda *a, **k: (_ for _ in ()).throw(datasets.urllib.error.URLError("no net")))
    monkeypatch.setattr(datasets.time, "sleep", lambda s: None)
    monkeypatch.setattr(datasets.shutil, "disk_usage", lambda folder: type("U", (), dict(free=1e12)))
    with pytest.raises(SystemExit) as e: runs.main()
    err = capsys.readouterr().err
    assert e.value.code == code and err.startswith("debias-clip: ") and told in err and "Traceback" not in err


def test_show_works_for_each_kind_of_data(make, tmp_path):
    layout = make("own csv")
    layout.write()
    for args in [("scenes",), (tmp_path,)]:
        shown = invoke("show", *args, "--n", 2)
        assert shown.exit_code == 0 and shown.output.count("long:") == 2 and shown.output.count("short:") == 4 and "pads before" in shown.output
    assert "tokens of 88" in invoke("show", "scenes").output and "tokens of 60" in invoke("show", tmp_path, "--context", 60).output
    layout = make("docci", root=tmp_path/"docci")
    layout.write()
    assert "sentences 2" in invoke("show", "docci", "--root", tmp_path/"docci", "--recipe", "no_summary").output


@pytest.mark.parametrize("command", ["list", "get", "check", "show"])
def test_help_reads_well(command):
    shown = invoke(command, "--help")
    assert shown.exit_code == 0 and re.search(r"(?m)^  [A-Z].*\.$", shown.output)


# ---- samples as training sees them

@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("splitter", ["default", "period"])
def test_what_is_shown_is_what_training_draws(recipe, splitter):
    tokenizer = get_tokenizer("ViT-B-16-quickgelu", 77)
    records = Records("x", [f"{i}.jpg" for i in range(4)], [split_sentences(sentences(i, n), splitter) for i, n in enumerate((4, 1, 3, 4))], splitter=splitter)
    shown = show_samples(records, RECIPES[recipe], tokenizer, n=9, epochs=2, seed=5, width=500)
    blocks = re.findall(r"short: (.*)\n +\(epoch (\d): sentences? ([\d ]+) of \d, (\d+) tokens of 77(?:, (\d+) pads before them)?\)", shown)
    store = TextStore(records.captions, tokenizer, records.joiner)
    rows = PairDataset(records, store, RECIPES[recipe], data.load_image, 5).texts([(e, i) for i in range(4) for e in range(2)])["short"]
    assert len(blocks) == 8
    for row, (text, epoch, picks, tokens, pads) in zip(rows, blocks):
        want = tokenizer([text], int(pads or 0))[0]
        assert row.equal(want) and int(tokens) == len(tokenizer.encode(text)) + 2 and (pads != "") == RECIPES[recipe].prefix_pad
    assert shown.count("long: ") == 4 and f"({len(tokenizer.encode(records.text(records.captions[0]))) + 2} tokens of 77)" in shown


def test_shown_samples_say_what_is_cut():
    tokenizer = get_tokenizer("ViT-B-16-quickgelu", 77)
    records = Records("x", np.zeros((1, 4, 4, 3), np.uint8), [["It is red."] + ["It is a very long caption."]*20])
    shown = show_samples(records, NO_SUMMARY, tokenizer)
    n = len(tokenizer.encode(records.text(records.captions[0])))
    assert f"{n + 2} tokens of 77, {n - 75} cut off" in shown and "sample 0" in shown and max(map(len, shown.splitlines())) <= 100
    assert "pads" not in shown and "pads before" in show_samples(records, DEBIAS, tokenizer)
