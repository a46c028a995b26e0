"""Data sets from the net: fetched whole or not at all, unpacked safely, and read by their readers afterwards."""
import hashlib
import io
import os
import re
import stat
import tarfile
import threading
import zipfile
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from filelock import FileLock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layouts import LAYOUTS

from debias_clip import downloads
from debias_clip.benchmarks import load_records
from debias_clip.checks import check_data
from debias_clip.datasets import DATASETS
from debias_clip.downloads import data_table, fetch, files_of, get_data, protocols_of, unpack

BODY = bytes(np.random.default_rng(0).integers(0, 256, 300_000, dtype=np.uint8))
RESUMED = r"bytes=[1-9]\d*-"


def digest_of(raw, kind="sha256"): return f"{kind}:{hashlib.new(kind, raw).hexdigest()}"


def left(folder):
    "The files in a folder, hidden locks aside."
    files = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    return sorted(file for file in files if not file.endswith(".lock"))


# ---- a server that misbehaves as told

class Server:
    """Files by path.

    tags: ETags by path; moved: redirects; breaks: bytes after which each next reply ends; statuses: of the next replies
    ranges: whether it knows the header; early: bytes that a range begins too early; claim: bytes it says a file has
    asked: the path and Range of each request
    """
    def __init__(self):
        self.files, self.tags, self.moved, self.breaks, self.statuses, self.asked = {}, {}, {}, [], [], []
        self.ranges, self.early, self.claim = True, 0, None
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self): server.answer(self)
            def log_message(self, *args): pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": .01}, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"

    def answer(self, reply):
        self.asked.append((reply.path, reply.headers.get("Range")))
        status = self.statuses.pop(0) if self.statuses else 200
        if status == 200 and reply.path in self.moved: return self.head(reply, 302, 0, Location=self.moved[reply.path])
        if status != 200 or reply.path not in self.files: return reply.send_error(404 if status == 200 else status)
        self.send(reply, self.files[reply.path], reply.headers.get("Range") if self.ranges else None)

    def send(self, reply, body, wanted):
        begin = max(int(wanted[6:-1]) - self.early, 0) if wanted else 0
        more = {"Content-Range": f"bytes {begin}-{len(body) - 1}/{len(body)}"} if wanted else {}
        if reply.path in self.tags: more["ETag"] = self.tags[reply.path]
        self.head(reply, 206 if wanted else 200, (self.claim or len(body)) - begin, **more)
        # a client that only asks for the version hangs up before the body: breaks are for bodies that are read
        reply.wfile.write(body[begin:][:self.breaks.pop(0) if self.breaks else None])
        reply.close_connection = True

    def head(self, reply, status, length, **headers):
        reply.send_response(status)
        for name, value in headers.items(): reply.send_header(name, value)
        reply.send_header("Content-Length", str(length))
        reply.end_headers()

    def ranges_asked(self): return [wanted for _, wanted in self.asked if wanted]

    def close(self):
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    one = Server()
    one.files["/a.bin"] = BODY
    yield one
    one.close()


@pytest.fixture
def no_room(monkeypatch):
    monkeypatch.setattr(downloads.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 1000}))


def get(server, folder, path="/a.bin", **more):
    fetch(server.url + path, folder/"a.bin", **{"wait": 0, **more})


def get_broken(server, folder):
    "Leaves a part of the file."
    server.breaks = [100_000]
    with pytest.raises(ConnectionError, match="the same command goes on"): get(server, folder, tries=1)
    assert len(left(folder)) == 1


def test_a_file_comes_whole_and_once(server, tmp_path):
    for _ in range(2): get(server, tmp_path, size=len(BODY), digest=digest_of(BODY))
    assert (tmp_path/"a.bin").read_bytes() == BODY
    assert left(tmp_path) == ["a.bin"] and server.asked == [("/a.bin", None)]


@pytest.mark.parametrize("tag", [None, '"v1"', 'W/"v1"'])
def test_a_broken_connection_goes_on_where_it_was(server, tmp_path, tag):
    if tag: server.tags["/a.bin"] = tag
    server.breaks = [100_000]
    get(server, tmp_path, digest=digest_of(BODY))
    wanted, = server.ranges_asked()
    assert re.fullmatch(RESUMED, wanted) and left(tmp_path) == ["a.bin"]


def test_a_stopped_call_is_gone_on_with_by_the_next(server, tmp_path):
    get_broken(server, tmp_path)
    get(server, tmp_path, digest=digest_of(BODY))
    assert re.fullmatch(RESUMED, *server.ranges_asked()) and left(tmp_path) == ["a.bin"]


def test_a_part_of_another_address_is_no_beginning(server, tmp_path):
    server.files["/b.bin"] = BODY[::-1]
    get_broken(server, tmp_path)
    get(server, tmp_path, "/b.bin", digest=digest_of(BODY[::-1]))
    assert server.ranges_asked() == [] and left(tmp_path) == ["a.bin"]


@pytest.mark.parametrize("tags", [('"v1"', '"v2"'), ('W/"v1"', 'W/"v2"')])
def test_two_versions_of_a_file_are_never_joined(server, tmp_path, tags):
    server.tags["/a.bin"] = tags[0]
    get_broken(server, tmp_path)
    server.files["/a.bin"], server.tags["/a.bin"] = BODY[::-1], tags[1]
    get(server, tmp_path)
    assert (tmp_path/"a.bin").read_bytes() == BODY[::-1] and server.ranges_asked() == []


def test_a_part_that_is_whole_is_only_named(server, tmp_path):
    get_broken(server, tmp_path)
    part, = tmp_path.glob(".a.bin.*.part")
    part.write_bytes(BODY)
    get(server, tmp_path, digest=digest_of(BODY))
    assert server.ranges_asked() == [] and left(tmp_path) == ["a.bin"]


def test_a_file_stopped_while_its_checksum_is_read_is_not_fetched_again(server, tmp_path, monkeypatch):
    def stop(*args, **more): raise KeyboardInterrupt
    with monkeypatch.context() as patched:
        patched.setattr(downloads.pooch.core, "hash_matches", stop)
        with pytest.raises(KeyboardInterrupt): get(server, tmp_path, digest=digest_of(BODY))
    get(server, tmp_path, digest=digest_of(BODY))
    assert server.ranges_asked() == [] and left(tmp_path) == ["a.bin"] and len(server.asked) == 2


def test_tries_are_counted_without_progress_only(server, tmp_path):
    server.breaks = [70_000]*20                                        # of them 65,536 are written
    get(server, tmp_path, tries=2, digest=digest_of(BODY))
    server.statuses = [503]*4
    (tmp_path/"a.bin").unlink()
    with pytest.raises(ConnectionError, match="4 tries without a byte"): get(server, tmp_path, tries=4)


@pytest.mark.parametrize("settings", [{"ranges": False}, {"early": 777}])
def test_a_server_that_does_not_know_ranges_sends_all_of_it(server, tmp_path, settings):
    vars(server).update(settings)
    server.breaks = [100_000]
    get(server, tmp_path, digest=digest_of(BODY))
    assert left(tmp_path) == ["a.bin"]


def test_a_moved_file_is_followed_and_gone_on_with(server, tmp_path):
    server.moved["/old"], server.breaks = "/a.bin", [100_000]
    get(server, tmp_path, "/old", digest=digest_of(BODY))
    assert re.fullmatch(RESUMED, server.ranges_asked()[-1])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(breaks=st.lists(st.integers(0, 200_000), max_size=5), ranges=st.booleans(),
       early=st.sampled_from([0, 0, 1, 5000]), tag=st.sampled_from(["", '"x"']))
def test_whatever_breaks_the_bytes_are_right(server, tmp_path_factory, breaks, ranges, early, tag):
    server.breaks, server.ranges, server.early, server.tags["/a.bin"] = list(breaks), ranges, early, tag
    folder = tmp_path_factory.mktemp("x")
    get(server, folder, tries=12)
    assert (folder/"a.bin").read_bytes() == BODY and left(folder) == ["a.bin"]


@pytest.mark.parametrize("digest", [digest_of(b"other"), "md5:" + "0"*32])
def test_a_wrong_checksum_is_not_kept(server, tmp_path, digest):
    with pytest.raises(ValueError, match=f"expected {digest} but got .*Deleted.*--unverified"):
        get(server, tmp_path, digest=digest)
    assert left(tmp_path) == []


def test_a_file_that_was_there_is_left_alone(server, tmp_path):
    (tmp_path/"a.bin").write_text("mine")
    for wrong in ({"size": len(BODY)}, {"digest": digest_of(BODY)}):
        with pytest.raises(ValueError, match=r"a.bin was there before.*Move it away"): get(server, tmp_path, **wrong)
    assert (tmp_path/"a.bin").read_text() == "mine" and server.asked == []


@pytest.mark.parametrize("status", [404, 403, 410])
def test_a_file_that_is_not_there_is_told_at_once(server, tmp_path, status):
    server.statuses = [status]
    with pytest.raises(ConnectionError, match=f"/a.bin: the server answers {status} .*by hand"): get(server, tmp_path)
    assert len(server.asked) == 1 and left(tmp_path) == []


def test_a_server_in_trouble_is_asked_again(server, tmp_path):
    server.statuses = [503, 429, 500]
    get(server, tmp_path, digest=digest_of(BODY))


def test_a_server_that_is_away(server, tmp_path):
    server.close()
    with pytest.raises(ConnectionError, match="cannot be fetched .*2 tries"): get(server, tmp_path, tries=2)
    assert left(tmp_path) == []


def test_a_wrong_length_is_noticed(server, tmp_path):
    server.claim, server.ranges = len(BODY) + 10, False
    with pytest.raises(ConnectionError): get(server, tmp_path, tries=2)
    assert "a.bin" not in left(tmp_path)
    server.claim, server.asked[:] = None, []
    with pytest.raises(ValueError, match="offers 300,000 bytes, 5 are published.*--unverified"):
        get(server, tmp_path/"new", size=5)
    assert len(server.asked) == 1 and left(tmp_path/"new") == []


def test_a_full_disk_is_told_before(server, tmp_path, no_room):
    with pytest.raises(OSError, match=r"a\.bin needs 300kB, but .* has 1\.00kB free"): get(server, tmp_path)
    assert left(tmp_path) == []


# ---- archives

def a_zip(path, *members):
    with zipfile.ZipFile(path, "w") as archive:
        for member in members: archive.writestr(member, b"content of it")
    return path


def a_tar(path, *members, mode="w:gz"):
    with tarfile.open(path, mode) as archive:
        for member in members:
            info = member if isinstance(member, tarfile.TarInfo) else tarfile.TarInfo(member)
            if info.isreg(): info.size = 13
            archive.addfile(info, io.BytesIO(b"content of it"))
    return path


def zipped_link():
    info = zipfile.ZipInfo("link")
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    return info


def special(name, kind, link=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


KINDS = [(a_zip, "x.zip"), (a_tar, "x.tar.gz"), (partial(a_tar, mode="w:xz"), "x.tar.xz"),
         (partial(a_tar, mode="w"), "x.tar")]


@pytest.mark.parametrize("make,name", KINDS)
def test_an_archive_lands_in_its_folder(tmp_path, make, name):
    archive, to = make(tmp_path/name, "image/1.jpg", "caption/1.txt", "image/2.jpg"), tmp_path/"to"
    assert unpack(archive, to) == 3
    assert left(to) == ["caption/1.txt", "image/1.jpg", "image/2.jpg"]
    (to/"image/1.jpg").write_bytes(b"older")
    (to/"image/mine.jpg").touch()
    assert unpack(archive, to, only=("image/*",)) == 2
    assert (to/"image/1.jpg").read_bytes() == b"content of it" and (to/"image/mine.jpg").exists()
    with pytest.raises(ValueError, match="holds nothing like video"):
        unpack(archive, to, only=("video/*",))


BAD_NAMES = ["../x.jpg", "a/../../x.jpg", "/x.jpg", "..", "C:/x.jpg", "C:\\x.jpg", "a\\..\\..\\x.jpg", "\\x.jpg"]
LINKS = [special("link", kind, to) for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE) for to in ("/etc", "../..", "a.jpg")]
DEVICES = [special("dev", tarfile.CHRTYPE), special("pipe", tarfile.FIFOTYPE)]
BAD = [*((a_zip, name) for name in [*BAD_NAMES, zipped_link()]),
       *((a_tar, name) for name in [*BAD_NAMES, *LINKS, *DEVICES])]


def id_of(value):
    "The same in every process, so that tests can be shared among several."
    return value if isinstance(value, str) else getattr(value, "__name__", None)


@pytest.mark.parametrize("make,bad", BAD, ids=id_of)
def test_an_archive_that_leads_elsewhere_is_refused_whole(tmp_path, make, bad):
    archive = make(tmp_path/"archive", "image/1.jpg", bad, "image/2.jpg")
    with pytest.raises(ValueError, match="is refused: its member .*Nothing was unpacked"):
        unpack(archive, tmp_path/"in/to")
    assert left(tmp_path) == ["archive"]


def damage(whole, name):
    "Ways in which an archive may have suffered."
    if name == "x.zip": hurt = whole.replace(b"content", b"CONTENT")
    else: hurt = whole[:200] + bytes(60) + whole[260:]
    return [whole[:len(whole)//2], b"<html>404</html>", b"", hurt]


@pytest.mark.parametrize("make,name", KINDS[:3])                       # a plain tar has no checksum
def test_a_damaged_archive_leaves_nothing(tmp_path, make, name):
    archive = make(tmp_path/name, *[f"image/{i}.jpg" for i in range(50)])
    for raw in damage(archive.read_bytes(), name):
        archive.write_bytes(raw)
        with pytest.raises(ValueError, match=f"{name} is damaged"): unpack(archive, tmp_path/"to")
        assert left(tmp_path/"to") == []


def test_a_locked_zip_is_refused(tmp_path):
    raw = bytearray(a_zip(tmp_path/"x.zip", "a.txt").read_bytes())
    for mark, at in ((b"PK\1\2", 8), (b"PK\3\4", 6)): raw[raw.index(mark) + at] |= 1
    (tmp_path/"x.zip").write_bytes(raw)
    with pytest.raises(ValueError, match="encrypted"): unpack(tmp_path/"x.zip", tmp_path/"to")


@pytest.mark.parametrize("make,name", KINDS[:2])
def test_interrupted_unpacking_leaves_nothing_that_looks_whole(tmp_path, monkeypatch, make, name):
    archive, to, copied = make(tmp_path/name, *[f"image/{i}.jpg" for i in range(9)]), tmp_path/"to", []

    def stop(*args):
        copied.append(1)
        if len(copied) == 5: raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(downloads.tqdm, "update", stop)
        with pytest.raises(KeyboardInterrupt): unpack(archive, to)
    assert left(to) == []
    killed = to/f".{name}.unpacking"/"image"                           # what a kill would leave
    killed.mkdir(parents=True)
    (killed/"junk.jpg").touch()
    assert unpack(archive, to) == 9
    assert left(to) == [f"image/{i}.jpg" for i in range(9)]


# ---- data sets as they are published

def test_the_table_of_data_sets():
    lines = data_table().splitlines()
    assert max(map(len, lines)) <= 100 and len(lines) <= 45
    for name, row in DATASETS.items():
        if row.reader is None: continue
        assert files_of(name).sources == row.sources and name in protocols_of(row.home)
        assert any(line.startswith(f"  {name} ") for line in lines), name
        assert row.where.split("://")[1] in data_table()
    assert {row.home for row in DATASETS.values() if row.get == "by hand"} >= {"flickr30k"}
    with pytest.raises(ValueError, match="did you mean urban1k"): files_of("urban-1k")


def test_every_source_can_be_trusted():
    "Without TLS a checksum is a must, and an archive says what it holds."
    for source in {source for row in DATASETS.values() for source in row.sources}:
        assert re.fullmatch(r"https?://\S+", source.url)
        assert re.fullmatch(r"|sha256:[0-9a-f]{64}|md5:[0-9a-f]{32}", source.digest)
        assert source.url.startswith("https") or source.digest, source
        assert (source.unpack is None) == (not source.holds) == (not source.place.endswith((".zip", ".gz")))


def packed(folder, kind, starts=("",), inside=""):
    "An archive of the files of a folder whose paths start with one of `starts`; inside: a folder put before them."
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    names = {path: path.relative_to(folder).as_posix() for path in files}
    buffer = io.BytesIO()
    if kind == "zip": archive, add = (made := zipfile.ZipFile(buffer, "w")), made.write
    else: archive, add = (made := tarfile.open(fileobj=buffer, mode="w:gz")), made.add
    with archive:
        for path, name in names.items():
            if name.startswith(tuple(starts)): add(path, inside + name)
    return buffer.getvalue()


def published(home, folder):
    "A whole copy as its owner would pack it: place of each source -> bytes."
    if home == "urban1k": return {"Urban1k.zip": packed(folder, "zip")}
    if home == "dci": return {"dci.tar.gz": packed(folder, "tar", ["densely_captioned_images/annotations"])}
    if home == "docci":
        return {"docci_descriptions.jsonlines": (folder/"docci_descriptions.jsonlines").read_bytes(),
                "docci_images.tar.gz": packed(folder, "tar", ["images"])}
    if home == "iiw":
        return {f"{part}/data.jsonl": (folder/part/"data.jsonl").read_bytes()
                for part in ("IIW-400", "DCI_Test", "DOCCI_Test")}
    if home == "coco":
        return {"annotations_trainval2017.zip": packed(folder, "zip", ["annotations"]),
                "val2017.zip": packed(folder, "zip", ["val2017"])}
    if home == "coco-karpathy":
        return {"caption_datasets.zip": packed(folder, "zip", ["dataset"]),
                "val2014.zip": packed(folder, "zip", ["val2014"])}
    captions = "share-captioner_coco_lcs_sam_1246k_1107.json"
    return {captions: (folder/captions).read_bytes(), "train2017.zip": packed(folder/"data/coco", "zip")}


def serve(server, monkeypatch, name, contents):
    "Has a server hand out a copy of one's own making in place of the real one."
    def here(source):
        body = contents[source.place]
        server.files[f"/{source.place}"] = body
        digest = source.digest and digest_of(body, source.digest.split(":")[0])
        size = len(body) if source.bytes else None
        address = f"{server.url}/{source.place}"
        return replace(source, url=address, to=source.place, bytes=size, digest=digest, disk=None)

    row = DATASETS[name]
    row = replace(row, sources=tuple(map(here, row.sources)), images=16, texts=80 if LAYOUTS[name].several else 16)
    monkeypatch.setitem(DATASETS, name, row)


NAMES = ["urban1k", "docci", "coco", "coco-karpathy", "dci", "iiw", "sharegpt4v-val"]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_fetched_is_what_the_reader_reads(server, tmp_path, monkeypatch, name):
    home, origin, root, said = DATASETS[name].home, tmp_path/"origin", tmp_path/"to", []
    layout = LAYOUTS[name](origin)
    layout.write()
    if name == "coco": (origin/"annotations/instances_val2017.json").write_text("large, and not wanted")
    if home != name: monkeypatch.delitem(DATASETS, home)
    serve(server, monkeypatch, name, published(home, origin))

    whole = get_data(name, root, say=said.append)
    assert whole == (not DATASETS[name].by_hand) and "annotations/instances_val2017.json" not in left(root)
    assert not [file for file in left(root) if file.endswith((".zip", ".gz", ".part", ".tmp"))]
    if not whole: add_pictures_by_hand(layout, root, "\n".join(said), name)

    asked = len(server.asked)
    assert get_data(home, root, say=said.append) and len(server.asked) == asked
    assert "there already" in said[-2]
    assert check_data(name, root).faults == {}
    assert len(load_records(name, root)) == 16


def add_pictures_by_hand(layout, root, said, name):
    "What nobody may hand out."
    assert "put them into" in said and all(what in said for _, what in DATASETS[name].by_hand)
    for row in layout.rows:
        target = root/layout.folder/row.image
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(layout.path(row).read_bytes())


@pytest.fixture
def docci(server, tmp_path, monkeypatch):
    layout = LAYOUTS["docci"](tmp_path/"origin")
    layout.write()
    serve(server, monkeypatch, "docci", published("docci", tmp_path/"origin"))
    return layout


def fetch_docci(tmp_path, **more):
    said = []
    get_data("docci", tmp_path/"to", **{"say": said.append, **more})
    return "\n".join(said)


def test_captions_can_be_fetched_alone(server, docci, tmp_path):
    fetch_docci(tmp_path, captions_only=True)
    assert left(tmp_path/"to") == ["docci_descriptions.jsonlines"] and len(server.asked) == 1


def test_a_file_that_its_owner_has_changed_is_taken_when_told(server, docci, tmp_path):
    server.files["/docci_descriptions.jsonlines"] += b"\n"
    with pytest.raises(ValueError, match="--unverified"): fetch_docci(tmp_path, captions_only=True)
    fetch_docci(tmp_path, captions_only=True, unverified=True)
    assert left(tmp_path/"to") == ["docci_descriptions.jsonlines"]


def test_interrupted_moving_is_made_good_without_another_download(server, docci, tmp_path, monkeypatch):
    def stop(source, folder):
        os.renames(source/"images/test_00003.jpg", folder/"images/test_00003.jpg")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(downloads, "move_files", stop)
        with pytest.raises(KeyboardInterrupt): fetch_docci(tmp_path)
    fetch_docci(tmp_path)
    assert len(server.asked) == 2 and len(load_records("docci", tmp_path/"to")) == 16
    fetch_docci(tmp_path, keep_archives=True)
    assert len(server.asked) == 2 and "docci_images.tar.gz" not in left(tmp_path/"to")


def test_a_damaged_archive_is_fetched_again_when_deleted(server, docci, tmp_path):
    whole = server.files["/docci_images.tar.gz"]
    server.files["/docci_images.tar.gz"] = whole[:len(whole)//2] + bytes(len(whole) - len(whole)//2)
    with pytest.raises(ValueError, match="docci_images.tar.gz is damaged.*delete it and fetch it again"):
        fetch_docci(tmp_path)
    (tmp_path/"to/docci_images.tar.gz").unlink()
    server.files["/docci_images.tar.gz"] = whole
    fetch_docci(tmp_path)
    assert len(load_records("docci", tmp_path/"to")) == 16


def test_archives_put_there_by_hand_are_used_and_kept_when_told(server, docci, tmp_path):
    root = tmp_path/"to"
    root.mkdir()
    (root/"docci_images.tar.gz").write_bytes(server.files["/docci_images.tar.gz"])
    fetch_docci(tmp_path, keep_archives=True)
    assert [path for path, _ in server.asked] == ["/docci_descriptions.jsonlines"]
    assert "docci_images.tar.gz" in left(root)


def test_lost_pictures_are_fetched_again(server, docci, tmp_path):
    fetch_docci(tmp_path)
    for picture in (tmp_path/"to/images").iterdir(): picture.unlink()
    fetch_docci(tmp_path)
    assert len(left(tmp_path/"to/images")) == 16


def test_a_small_disk_is_said_before(server, docci, tmp_path, no_room):
    with pytest.raises(OSError, match="docci needs .*make room"): fetch_docci(tmp_path)
    assert not server.asked


def test_another_layout_is_said(server, docci, tmp_path, monkeypatch):
    row = DATASETS["docci"]
    other = tuple(replace(source, holds=("photos",) if source.holds else ()) for source in row.sources)
    monkeypatch.setitem(DATASETS, "docci", replace(row, sources=other))
    with pytest.raises(ValueError, match="there is no photos .*another than known"): fetch_docci(tmp_path)


def test_one_process_fetches_at_a_time(server, docci, tmp_path):
    (tmp_path/"to").mkdir()
    with FileLock(tmp_path/"to/.get.lock"):
        with pytest.raises(ValueError, match="filled by another process"): fetch_docci(tmp_path)
    fetch_docci(tmp_path)


def test_what_may_not_be_fetched_is_refused_with_where_to_ask(tmp_path):
    with pytest.raises(ValueError, match="may not be fetched") as e: get_data("flickr30k-1k", tmp_path/"f")
    for told in ("shannon.cs.illinois.edu", "flickr30k-images", "results_20130124.token", "dataset_flickr30k.json"):
        assert told in str(e.value)
    assert not (tmp_path/"f").exists()
