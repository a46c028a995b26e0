"""Contracts of the data: the same samples whatever the workers, ranks and restarts; every picture read or named."""
import csv, http.server, io, json, os, pickle, re, shutil, signal, tarfile, threading, time, warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from PIL import Image

import debias_clip.data as data_module
from debias_clip.captions import DEBIAS, LONG_CLIP, SAMPLED, split_sentences
from debias_clip.data import (PROTOCOLS, GlobalBatches, ImageError, Member, Normalize, PairDataset, Records, TextStore, TextTable, caption_statistics, load_image,
                              is_own, load_records, make_loader, read_records, read_shards, readable, select, stream_json, text_store, write_tables)
from debias_clip.tokens import get_tokenizer

SHARED = Path(__file__).parents[2]/"shared"
TEXTS = [["A red box.", "It is on a table.", "The light is dim.", "A cat sleeps behind it."], ["One sentence only."], ["A blue ball.", "It rolls."],
         ["Five birds.", "One sings.", "Two fly.", "One is red.", "The last one is asleep, 2.5 m away."]]*4


@pytest.fixture(scope="module")
def tok(): return get_tokenizer("ViT-B-16-quickgelu")


@pytest.fixture(scope="module")
def pairs(tok):
    images = np.random.default_rng(0).integers(0, 256, (len(TEXTS), 6, 6, 3), dtype=np.uint8)
    return PairDataset(Records("test", images, TEXTS), TextStore(TEXTS, tok), DEBIAS, Normalize((.4, .5, .6), (.2, .3, .4)), seed=3)


def assert_same(a, b):
    assert a.keys() == b.keys()
    for k in a: assert torch.equal(a[k], b[k]), k


# records

@pytest.mark.parametrize("captions,message", [
    ([["A."], []], r"1 of 2 samples have no caption.*sample 1 \(b.jpg\)"), ([["A."], ["B.", "  \n"]], "blank sentence.*b.jpg"),
    ([["A."]], "2 images, but 1 captions"), (["A.", "B."], "lists of sentences")])
def test_records_name_what_is_wrong(captions, message):
    with pytest.raises(ValueError, match=message): Records("x", ["a.jpg", "b.jpg"], captions)


def test_records_check_short_captions_and_arrays():
    with pytest.raises(ValueError, match="`short`: sample 0"): Records("x", ["a.jpg"], [["A."]], short=[[]])
    with pytest.raises(ValueError, match="uint8"): Records("x", np.zeros((1, 2, 2, 3)), [["A."]])
    with pytest.raises(ValueError, match="uint8"): Records("x", np.zeros((1, 2, 2), np.uint8), [["A."]])
    with pytest.raises(ValueError, match="empty"): Records("x", [], [])


def test_select_keeps_pairs_together():
    r = Records("x", ["a", "b", "c"], [["A."], ["B."], ["C."]], short=[["a"], ["b"], ["c"]], splitter="period")
    s = select(r, np.array([2, 0]))
    assert (s.images, s.captions, s.short, s.splitter) == (["c", "a"], [["C."], ["A."]], [["c"], ["a"]], "period")


# text

def test_store_gives_the_ids_of_the_text(tok):
    store = TextStore(TEXTS, tok)
    for i, text in enumerate(TEXTS):
        assert store.whole(i).tolist() == tok.encode(" ".join(text))
        assert [s.tolist() for s in store.ids(i)] == [tok.encode(s) for s in text]
        assert store.join(i, range(len(text))[::-1]).tolist() == tok.encode(" ".join(text[::-1]))


class TwoForms:
    "A tokeniser whose first word differs, as SigLIP2's does."
    family, sot, eot = "siglip", None, 1
    def encode(self, text): return [ord(c) for c in text.strip(".")]
    def encode_sentence(self, text): return [1000 + i if k == 0 else i for k, i in enumerate(self.encode(text))]


def test_store_writes_the_first_sentence_as_a_beginning():
    store = TextStore([["...", "ab", "c"]], TwoForms())
    assert store.whole(0).tolist() == [97, 98, 1099]          # the first sentence has no ids: the second begins the text
    assert store.join(0, [2, 1]).tolist() == [99, 1097, 98]
    assert store.join(0, [0]).tolist() == []


def test_store_pickles_small(tok):
    store = TextStore(TEXTS*50, tok)
    again = pickle.loads(pickle.dumps(store))
    assert again.whole(3).tolist() == store.whole(3).tolist()
    ids, _ = store.tables[0]
    assert len(store.tables) == 1 and ids.dtype == np.int32 and ids.nbytes == 4*sum(len(tok.encode(" ".join(t))) for t in TEXTS)*50


def test_a_batch_is_its_samples(pairs):
    keys = [(0, 3), (5, 3), (0, 1), (2, 0)]
    batch = pairs.__getitems__(keys)
    for row, key in enumerate(keys): assert_same({k: v[row] for k, v in batch.items()}, pairs[key])
    assert batch["long"].dtype == batch["short"].dtype == batch["index"].dtype == torch.int64
    assert not torch.equal(batch["short"][0], batch["short"][1])


def test_short_captions_follow_the_recipe(pairs, tok):
    images = pairs.records.images
    summary = PairDataset(pairs.records, pairs.store, LONG_CLIP, None)
    assert torch.equal(summary[4, 0]["short"], tok(TEXTS[0][0])[0])
    assert torch.equal(summary[0]["image"], torch.from_numpy(images[0]).permute(2, 0, 1))
    sampled, padded = (PairDataset(pairs.records, pairs.store, r, None) for r in (SAMPLED, DEBIAS))
    starts = []
    for epoch in range(200):
        plain, row = sampled[epoch, 3]["short"], padded[epoch, 3]["short"]
        words = plain[1:plain.argmax() + 1]
        start = 1 + int((row[1:] != tok.pad).nonzero()[0])
        assert torch.equal(row[start:start + len(words)], words) and (row[1:start] == tok.pad).all()     # padding draws after the sentences
        starts.append((start - 1)/(tok.context_length - 1 - len(words)))
    assert 0.4 < np.mean(starts) < 0.6 and max(starts) > .95 and max(starts) <= 1
    assert "short" not in PairDataset(pairs.records, pairs.store, None, None)[0]


def test_dataset_refuses_what_does_not_fit(pairs, tok):
    with pytest.raises(ValueError, match="16 samples, but the token store has 1"): PairDataset(pairs.records, TextStore(TEXTS[:1], tok), DEBIAS, None)
    with pytest.raises(ValueError, match="transform"): PairDataset(Records("x", ["a.jpg"], [["A."]]), TextStore([["A."]], tok), None, None)


def test_period_captions_are_read_as_they_were(tok):
    text = "A dog. It has 2.5 legs. “No.” it says..  It\nleft!\n"
    r = Records("x", np.zeros((1, 2, 2, 3), np.uint8), [split_sentences(text.strip(), "period")], splitter="period")
    assert (r.joiner, r.text(r.captions[0])) == (". ", "A dog. It has 2.5 legs. “No.” it says..  It left!") and Records("y", r.images, [["A.", "B."]]).text(["A.", "B."]) == "A. B."
    with pytest.raises(ValueError, match=r"joiner=records\.joiner"): PairDataset(r, TextStore(r.captions, tok), None, None)
    pairs = PairDataset(r, TextStore(r.captions, tok, r.joiner), LONG_CLIP, None)
    assert torch.equal(pairs[0]["long"], tok(text)[0]) and torch.equal(pairs[0]["short"], tok("A dog")[0])     # Long-CLIP's short caption has no full stop
    found = caption_statistics(pairs.store)
    assert found["tokens"] == len(tok.encode(text)) + 2 and found["in sentence 1 %"] == pytest.approx(100*len(tok.encode("A dog."))/len(tok.encode(text)))


def test_period_captions_in_files_keep_their_white_space(tmp_path, tok):
    texts = ["A dog. It runs", "One! . Two .  3.\tFour", "A line\n. Another. \n"]*3
    (tmp_path/"captions.jsonl").write_text("".join(json.dumps(dict(image="a.png", caption=t + f" {i}")) + "\n" for i, t in enumerate(texts)))
    rgb().save(tmp_path/"a.png")
    with pytest.warns(UserWarning, match="name an image"): r = read_records(tmp_path, splitter="period")
    write_tables(tmp_path, ((c,) for c in r.captions), ["caption"])
    table = TextTable(tmp_path, "caption")
    assert list(table) == r.captions
    store = text_store(table, tok, workers=1, part=2, joiner=r.joiner)
    for i, t in enumerate(texts):
        assert r.text(table[i]) == f"{t} {i}".strip().replace("\n", " ") and store.whole(i).tolist() == tok.encode(f"{t} {i}")
    assert same_store(store, TextStore(r.captions, tok, ". ")) and not same_store(text_store(table, tok, workers=1), store)
    assert same_store(pickle.loads(pickle.dumps(store)), store) and len(list(tmp_path.glob("tokens-*"))) == 2


def test_one_frozen_tower_needs_no_pictures(tmp_path, tok):
    np.save(tmp_path/"f.npy", np.random.default_rng(0).standard_normal((4, 5)).astype(np.float32))
    features, r = np.load(tmp_path/"f.npy", mmap_mode="r"), Records("x", [f"nowhere/{i}.jpg" for i in range(4)], TEXTS[:4])
    data = PairDataset(r, TextStore(TEXTS[:4], tok), DEBIAS, None, features=features)
    batch = data.__getitems__([(0, 3), (0, 1)])
    assert torch.equal(batch["image"], torch.from_numpy(features[[3, 1]].copy())) and batch["image"].dtype == torch.float32
    with_pictures = PairDataset(Records("x", np.zeros((4, 2, 2, 3), np.uint8), TEXTS[:4]), data.store, DEBIAS, None)
    for k in ("long", "short", "index"): assert torch.equal(batch[k], with_pictures.__getitems__([(0, 3), (0, 1)])[k])
    a, b = (list(make_loader(data, GlobalBatches(4, 2), workers)) for workers in (0, 1))
    for x, y in zip(a, b): assert_same(x, y)
    batch["image"].zero_()
    assert data[3]["image"].abs().sum() > 0                              # a batch is a copy
    for bad in (features[:3], features.astype(np.float64), features[:, 0], torch.from_numpy(features.copy())):
        with pytest.raises(ValueError, match=r"float32 array \[4, d\]"): PairDataset(r, data.store, DEBIAS, None, features=bad)


def test_normalize():
    x = np.random.default_rng(0).integers(0, 256, (2, 3, 4, 3), dtype=np.uint8)
    want = (torch.from_numpy(x).permute(0, 3, 1, 2)/255 - torch.tensor([.4, .5, .6])[:, None, None])/torch.tensor([.2, .3, .4])[:, None, None]
    torch.testing.assert_close(Normalize((.4, .5, .6), (.2, .3, .4))(x), want)


# batches

@settings(max_examples=60, deadline=None)
@given(st.data())
def test_ranks_share_one_global_order(data):
    world, share = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
    batch = world*share
    n, epoch, seed = data.draw(st.integers(batch, 5*batch)), data.draw(st.integers(0, 1000)), data.draw(st.integers(0, 2**32))
    whole = GlobalBatches(n, batch, seed=seed)
    whole.set_epoch(epoch)
    steps = list(whole)
    assert len(steps) == len(whole) == n//batch
    keys = [k for step in steps for k in step]
    assert len(set(keys)) == len(keys) and all(e == epoch and 0 <= i < n for e, i in keys)
    ranks = [GlobalBatches(n, batch, r, world, seed) for r in range(world)]
    for r in ranks: r.set_epoch(epoch)
    assert [sum(parts, []) for parts in zip(*ranks)] == steps
    start = data.draw(st.integers(0, len(whole)))
    for r, sampler in enumerate(ranks):
        sampler.set_epoch(epoch, start)
        assert list(sampler) == [s[r*share:(r + 1)*share] for s in steps[start:]] and len(sampler) == len(whole)


def test_epochs_and_seeds_reorder():
    orders = [[i for b in _batches(64, 8, seed, epoch) for _, i in b] for seed, epoch in [(0, 0), (0, 1), (1, 0)]]
    assert len({tuple(o) for o in orders}) == 3 and all(sorted(o) == list(range(64)) for o in orders)


def _batches(n, batch, seed, epoch):
    sampler = GlobalBatches(n, batch, seed=seed)
    sampler.set_epoch(epoch)
    return list(sampler)


@pytest.mark.parametrize("args,message", [((10, 11), "from 10 samples"), ((10, 0), "from 10 samples"), ((10, 4, 0, 3), "multiple of 3"), ((10, 4, 2, 2), "rank 2"), ((10, 4, -1, 2), "rank -1")])
def test_impossible_batches_are_refused(args, message):
    with pytest.raises(ValueError, match=message): GlobalBatches(*args)


def test_an_epoch_cannot_be_entered_behind_its_end():
    with pytest.raises(ValueError, match="has 2 batches"): GlobalBatches(10, 4).set_epoch(0, 3)


def test_workers_change_nothing(pairs):
    batches = []
    state = torch.get_rng_state()
    for workers in (0, 2):
        sampler = GlobalBatches(len(pairs), 4, seed=1)
        loader = make_loader(pairs, sampler, workers)
        batches.append([])
        for epoch in range(2):
            sampler.set_epoch(epoch)
            batches[-1] += list(loader)
    assert len(batches[0]) == len(batches[1]) == 8
    for a, b in zip(*batches): assert_same(a, b)
    assert torch.equal(state, torch.get_rng_state())      # a restart in mid-epoch finds torch's generator as it was


class Dying(PairDataset):
    def __getitems__(self, keys): os.kill(os.getpid(), signal.SIGKILL)


def test_a_dead_worker_is_an_error_soon(pairs):
    dying = Dying(pairs.records, pairs.store, None, None)
    begin = time.perf_counter()
    with pytest.raises(RuntimeError, match="worker"): next(iter(make_loader(dying, GlobalBatches(len(pairs), 4), workers=1)))
    assert time.perf_counter() - begin < 30


# pictures

def rgb(h=6, w=9): return Image.fromarray(np.random.default_rng(0).integers(0, 256, (h, w, 3), dtype=np.uint8))


@pytest.mark.parametrize("mode,suffix", [("L", "png"), ("1", "png"), ("P", "png"), ("P", "gif"), ("RGBA", "png"), ("LA", "png"), ("CMYK", "jpg"), ("CMYK", "tif"), ("L", "jpg"), ("YCbCr", "jpg"),
                                         ("I;16", "png"), ("I;16", "tif"), ("I", "tif"), ("RGBA", "webp")])
def test_every_mode_becomes_rgb(tmp_path, mode, suffix):
    path = tmp_path/f"x.{suffix}"
    image = Image.fromarray(np.full((6, 9), 65535, np.uint16)) if mode == "I;16" else Image.fromarray(np.full((6, 9), 65535, np.int32)) if mode == "I" else rgb().convert(mode)
    image.save(path)
    out = load_image(path)
    assert out.mode == "RGB" and out.size == (9, 6)
    if mode.startswith("I"): assert out.getpixel((0, 0)) == (255, 255, 255)
    if mode == "RGBA" and suffix == "png": assert np.array_equal(np.asarray(out), np.asarray(rgb()))


def test_see_through_is_white(tmp_path):
    for name, image in dict(rgba=Image.new("RGBA", (2, 2), (0, 0, 0, 0)), la=Image.new("LA", (2, 2), (0, 0)), half=Image.new("RGBA", (2, 2), (0, 0, 0, 128))).items(): image.save(tmp_path/f"{name}.png")
    palette = Image.new("P", (2, 2), 1)
    palette.putpalette([0, 0, 0, 9, 9, 9])
    palette.save(tmp_path/"p.png", transparency=1)
    Image.new("RGB", (2, 2), (1, 2, 3)).save(tmp_path/"key.png", transparency=(1, 2, 3))
    seen = {n: load_image(tmp_path/f"{n}.png").getpixel((0, 0)) for n in ("rgba", "la", "half", "p", "key")}
    assert seen == dict(rgba=(255,)*3, la=(255,)*3, half=(127,)*3, p=(255,)*3, key=(255,)*3)


@pytest.mark.parametrize("tag", range(1, 9))
def test_exif_turns_the_picture_upright(tmp_path, tag):
    turned = {1: [], 2: [Image.Transpose.FLIP_LEFT_RIGHT], 3: [Image.Transpose.ROTATE_180], 4: [Image.Transpose.FLIP_TOP_BOTTOM], 5: [Image.Transpose.TRANSPOSE],
              6: [Image.Transpose.ROTATE_90], 7: [Image.Transpose.TRANSVERSE], 8: [Image.Transpose.ROTATE_270]}[tag]
    image = rgb()
    for t in turned: image = image.transpose(t)
    exif = Image.Exif()
    exif[0x0112] = tag
    image.save(tmp_path/"x.png", exif=exif)
    assert np.array_equal(np.asarray(load_image(tmp_path/"x.png")), np.asarray(rgb()))


def test_damaged_exif_does_not_lose_the_picture(tmp_path):
    rgb().save(tmp_path/"x.jpg", exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff\x01")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert load_image(tmp_path/"x.jpg").size == (9, 6)


def test_animations_show_their_first_frame(tmp_path):
    frames = [Image.new("RGB", (4, 4), c) for c in ("red", "blue")]
    for suffix in ("gif", "webp", "png"): frames[0].save(tmp_path/f"x.{suffix}", save_all=True, append_images=frames[1:], duration=50, **(dict(lossless=True) if suffix == "webp" else {}))
    assert {load_image(p).getpixel((0, 0)) for p in tmp_path.iterdir()} == {(255, 0, 0)}


def test_what_cannot_be_read_is_named(tmp_path, monkeypatch):
    rgb(200, 200).save(tmp_path/"good.jpg")
    for suffix in ("jpg", "png", "gif", "webp", "tif", "bmp"):
        rgb(200, 200).save(tmp_path/f"cut.{suffix}")
        whole = (tmp_path/f"cut.{suffix}").read_bytes()
        (tmp_path/f"cut.{suffix}").write_bytes(whole[:len(whole)//2])
        for at_least in (None, 1):
            with pytest.raises(ImageError, match=rf"cut\.{suffix}: cannot be read"): load_image(tmp_path/f"cut.{suffix}", at_least)
    (tmp_path/"zero.png").touch()
    (tmp_path/"page.jpg").write_text("<html>404</html>")
    with pytest.raises(ImageError, match=r"zero\.png: the file is empty"): load_image(tmp_path/"zero.png")
    with pytest.raises(ImageError, match=r"page\.jpg: cannot be read"): load_image(tmp_path/"page.jpg")
    with pytest.raises(ImageError, match=r"no such file; 'good\.jpg' is there"): load_image(tmp_path/"GOOD.jpg")
    with pytest.raises(ImageError, match="no such file"): load_image(tmp_path/"nowhere"/"a.jpg")
    with pytest.raises(ImageError, match="cannot be read"): load_image(tmp_path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(ImageError, match=r"good\.jpg: more than 200 pixels"): load_image(tmp_path/"good.jpg")


def test_large_jpegs_are_decoded_small(tmp_path):
    Image.linear_gradient("L").resize((1024, 768)).convert("RGB").save(tmp_path/"x.jpg", quality=95)
    whole, quarter = load_image(tmp_path/"x.jpg"), load_image(tmp_path/"x.jpg", at_least=180)
    assert quarter.size == (256, 192) and load_image(tmp_path/"x.jpg", at_least=193).size == (512, 384)
    assert np.abs(np.asarray(whole.resize((64, 48)), float) - np.asarray(quarter.resize((64, 48)), float)).max() < 4


def test_a_picture_may_be_bytes_or_an_open_file(tmp_path):
    rgb().save(tmp_path/"x.png")
    raw = (tmp_path/"x.png").read_bytes()
    for file in (raw, io.BytesIO(raw), Member(str(tmp_path/"x.png"), "x", 0, len(raw))): assert np.array_equal(np.asarray(load_image(file)), np.asarray(rgb()))
    with open(tmp_path/"x.png", "rb") as f: assert load_image(f).size == (9, 6) and not f.closed
    with pytest.raises(ImageError, match="an image of 20 bytes: cannot be read"): load_image(raw[:20])
    with pytest.raises(ImageError, match="an image of 0 bytes: the file is empty"): load_image(b"")
    for size in (40, 0):
        (tmp_path/"cut.png").write_bytes(raw[:size])
        with open(tmp_path/"cut.png", "rb") as f, pytest.raises(ImageError, match=r"cut\.png: " + ("cannot be read" if size else "the file is empty")): load_image(f)
    with pytest.raises(ImageError, match="x.png: pics/7.png: cannot be read"): load_image(Member(str(tmp_path/"x.png"), "pics/7.png", 10, 50))
    with pytest.raises(ImageError, match="pics/7.png: the file is empty"): load_image(Member(str(tmp_path/"x.png"), "pics/7.png", 10, 0))
    with pytest.raises(ImageError, match="X.png: 7.png: there is no such file; 'x.png' is there"): load_image(Member(str(tmp_path/"X.png"), "7.png", 10, 50))


def photo(h, w):
    "A picture with edges and grain of every size, as photographs have."
    rng, out = np.random.default_rng(0), np.zeros((h, w, 3))
    for k in (4, 16, 64, 256): out += np.asarray(Image.fromarray(rng.integers(0, 256, (k*h//w + 1, k, 3), dtype=np.uint8)).resize((w, h), Image.Resampling.NEAREST if k < 64 else Image.Resampling.BICUBIC))*.25
    return Image.fromarray(out.clip(0, 255).astype(np.uint8))


def test_draft_mode_changes_little(tmp_path, tok):
    image = photo(1200, 1600)
    for name in ("x.jpg", "x.png", "x.webp"): image.save(tmp_path/name, quality=90)
    small = lambda im: torch.from_numpy(np.array(im.resize((224, 224), Image.Resampling.BICUBIC))).permute(2, 0, 1).float()
    r = Records("x", [tmp_path/n for n in ("x.jpg", "x.png", "x.webp")], [["A."]]*3)
    whole, draft = (PairDataset(r, TextStore(r.captions, tok), None, small, at_least=n).__getitems__([(0, 0), (0, 1), (0, 2)])["image"] for n in (None, 448))
    assert torch.equal(whole[1:], draft[1:])                             # only JPEGs have a draft mode
    off = (whole[0] - draft[0]).abs()
    assert load_image(tmp_path/"x.jpg", 448).size == (800, 600) and 0 < off.mean() < 1, off.mean()


def test_unreadable_pictures_stop_or_are_left_out_by_name(tmp_path, tok):
    for i in range(4): rgb().save(tmp_path/f"{i}.png")
    (tmp_path/"2.png").write_bytes(b"")
    r = Records("mine", [tmp_path/f"{i}.png" for i in range(4)], [[f"Number {i}."] for i in range(4)])
    with pytest.raises(ValueError, match=r"mine: 1 of 4 images cannot be read: .*2\.png.*max_share"): readable(r)
    with pytest.raises(ValueError, match="max_share"): readable(r, max_share=.2)
    with pytest.warns(UserWarning, match=r"1 of 4.*2\.png.*left out"): kept = readable(r, max_share=.25)
    assert kept.captions == [["Number 0."], ["Number 1."], ["Number 3."]] and [p.name for p in kept.images] == ["0.png", "1.png", "3.png"]
    to_tensor = lambda image: torch.from_numpy(np.array(image)).permute(2, 0, 1).float()
    data = PairDataset(r, TextStore(r.captions, tok), None, to_tensor)
    assert data.__getitems__([(0, 0), (0, 3)])["image"].shape == (2, 3, 6, 9)
    with pytest.raises(ImageError, match=r"2\.png"): next(iter(make_loader(data, GlobalBatches(4, 4))))
    with pytest.raises(ImageError, match=r"2\.png"): next(iter(make_loader(data, GlobalBatches(4, 4), workers=1)))


# captions of one's own

def pictures(folder, *names):
    for name in names:
        (folder/name).parent.mkdir(parents=True, exist_ok=True)
        rgb().save(folder/name)
    return folder


def write_csv(path, *rows):
    with open(path, "w", encoding="utf-8", newline="") as f: csv.writer(f).writerows(rows)
    return path


def test_own_csv_and_jsonl(tmp_path):
    pictures(tmp_path, "a.png", "deep/b.png")
    write_csv(tmp_path/"captions.csv", ["image", "caption"], ["a.png", 'A "red" box, open.\nIt is old.'], ["deep/b.png", "赤い箱。古い。"])
    r = read_records(tmp_path)
    assert r.captions[0][0] == 'A "red" box, open.' and len(r) == 2 and r.name == tmp_path.name and r.short is None
    assert [Path(p).relative_to(tmp_path).as_posix() for p in r.images] == ["a.png", "deep/b.png"]
    (tmp_path/"other.jsonl").write_text('\ufeff{"file": "a.png", "text": ["One box.", "A box. Red."]}\n\n{"file": "deep/b.png", "text": ["Two."]}\n', encoding="utf-8")
    r = read_records(tmp_path/"other.jsonl", image="file", caption="text")
    assert r.short == [["One box.", "A box. Red."], ["Two."]] and r.captions == [["One box."], ["Two."]]
    write_csv(tmp_path/"list.csv", ["image", "captions"], ["a.png", '["One.", "Two."]'])
    assert read_records(tmp_path/"list.csv").short == [["One.", "Two."]]
    (tmp_path/"away").mkdir()
    write_csv(tmp_path/"away"/"t.csv", ["image", "caption"], ["a.png", "A box"])
    assert read_records(tmp_path/"away"/"t.csv", root=tmp_path, splitter="period").splitter == "period"


@pytest.mark.parametrize("text,message", [
    ("image,caption\na.png,A.\na.png,  \n", r"captions.csv line 3: 'caption' is empty"), ("image,caption\na.png\n", "line 2: 'caption' is empty"), ("image,caption\n", "no rows"), ("", "no rows"),
    ("picture,caption\na.png,A.\n", "line 2 has no 'image', only picture, caption"), ("image,text\na.png,A.\n", "no 'captions', only image, text"), ("image,captions\na.png,[1\n", "starts as a JSON list"),
    ("image,captions\na.png,[]\n", "is empty or no text")])
def test_own_csv_faults_name_the_line(tmp_path, text, message):
    (pictures(tmp_path, "a.png")/"captions.csv").write_text(text)
    with pytest.raises(ValueError, match=message): read_records(tmp_path)


@pytest.mark.parametrize("raw,message", [
    (b'{"image": "a.png", "caption": "A."}\n{"image": "a.png", "cap', "line 2: cannot be read"), (b'["a.png", "A."]', "line 1 has no 'caption"), (b'{"image": "a.png", "caption": NaN}', r"no text \(nan\)"),
    (b'{"image": "a.png", "caption": ["A.", ""]}', "line 1: 'caption' is empty or no text"), ('{"image": "a.png", "caption": "é"}'.encode("latin-1"), "not UTF-8")])
def test_own_jsonl_faults_name_the_line(tmp_path, raw, message):
    (pictures(tmp_path, "a.png")/"captions.jsonl").write_bytes(raw)
    with pytest.raises(ValueError, match=message): read_records(tmp_path)


def test_own_tables_must_be_clear(tmp_path):
    with pytest.raises(ValueError, match="neither"): read_records(tmp_path)
    for suffix in ("csv", "jsonl"): (tmp_path/f"captions.{suffix}").touch()
    with pytest.raises(ValueError, match="both"): read_records(tmp_path)
    (tmp_path/"x.txt").touch()
    with pytest.raises(ValueError, match="end in .csv or .jsonl"): read_records(tmp_path/"x.txt")


def test_missing_pictures_are_counted_by_folder(tmp_path):
    pictures(tmp_path, "a/1.png", "b/1.png")
    write_csv(tmp_path/"captions.csv", ["image", "caption"], *[[f"{f}/{i}.png", f"Number {f}{i}."] for f in "ab" for i in (1, 2, 3, 4, 5)])
    with pytest.raises(ValueError, match=r"8 of 10 image files are missing: 4 in \S*a \(first: 2.png, 3.png, 4.png\); 4 in \S*b .*max_missing"): read_records(tmp_path)
    with pytest.warns(UserWarning, match="8 of 10.*left out"): r = read_records(tmp_path, max_missing=.8)
    assert r.captions == [["Number a1."], ["Number b1."]]
    write_csv(tmp_path/"captions.csv", ["image", "caption"], ["A/1.PNG", "A."], ["b/1.png", "B."])
    (tmp_path/"captions.csv").write_text("image,caption\na/1.PNG,A.\n")
    with pytest.raises(ValueError, match="'1.png' is there: the names differ in upper and lower case"): read_records(tmp_path)


def test_repeats_are_counted(tmp_path):
    write_csv(pictures(tmp_path, "a.png", "b.png")/"captions.csv", ["image", "caption"], ["a.png", "A."], ["a.png", "A."], ["a.png", "Another."], ["b.png", "A."])
    with pytest.warns(UserWarning) as said: r = read_records(tmp_path)
    assert len(r) == 3 and "1 of 4 rows repeat" in str(said[0].message) and "1 rows name an image" in str(said[1].message)


# the paper's data sets, in the layout they have on disk

def write_json(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")


def load(name, root, **options):
    with pytest.warns(UserWarning, match="published") if PROTOCOLS[name].images else nullcontext(): return load_records(name, root, **options)


def names(records): return [Path(p).name for p in records.images]


@pytest.fixture
def sharegpt4v_root(tmp_path):
    rows = [dict(id=str(i), image=f"{['sam/images/sa_', 'coco/train2017/', 'llava/llava_pretrain/images/0/'][i % 3]}{i}.jpg",
                 conversations=[{"from": "human", "value": "What do you see?\n<image>"}, {"from": "gpt", "value": f"The image shows item {i}. It is  grey.\n\nNothing else, 2.5 m wide."}]) for i in range(1007)]
    write_json(tmp_path/"share-captioner_coco_lcs_sam_1246k_1107.json", rows)
    for r in rows:
        (tmp_path/"data"/r["image"]).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path/"data"/r["image"]).touch()
    return tmp_path


def test_sharegpt4v(sharegpt4v_root, tok):
    r = load("sharegpt4v", sharegpt4v_root)
    assert len(r) == 7 and names(r)[:2] == ["1000.jpg", "1001.jpg"] and r.captions[0] == ["The image shows item 1000.", "It is  grey.", "Nothing else, 2.5 m wide."]
    assert load_records("sharegpt4v-val", sharegpt4v_root).captions[-1][0] == "The image shows item 999." and len(list(sharegpt4v_root.glob("*.index-*"))) == 1
    assert load("sharegpt4v", sharegpt4v_root, splitter="period").captions[0] == ["The image shows item 1000", "It is  grey", " Nothing else, 2.5 m wide."]
    again = pickle.loads(pickle.dumps(r))
    assert again.captions[6] == r.captions[6] and again.images[6] == r.images[6] and len(pickle.dumps(r)) < 2000
    assert list(r.captions) == [r.captions[i] for i in range(7)] and r.captions[-1] == r.captions[6]
    few = select(r, [5, 2])
    assert names(few) == ["sa_1005.jpg", "sa_1002.jpg"]
    assert few.captions[0][0] == "The image shows item 1005."
    store = TextStore(r.captions, tok)
    assert store.whole(3).tolist() == tok.encode(" ".join(r.captions[3]))


def test_sharegpt4v_names_missing_pictures_by_prefix(sharegpt4v_root):
    for i in (1001, 1004): (sharegpt4v_root/f"data/sam/images/sa_{i}.jpg").unlink(missing_ok=True)
    (sharegpt4v_root/"data/coco/train2017/1003.jpg").unlink()
    gone = [p for p in range(1000, 1007) if not any((sharegpt4v_root/"data").rglob(f"*{p}.jpg"))]
    with pytest.raises(ValueError, match=rf"{len(gone)} of 7 image files are missing: .*train2017 \(first: 1003.jpg\)"): load_records("sharegpt4v", sharegpt4v_root)
    with pytest.warns(UserWarning): r = load_records("sharegpt4v", sharegpt4v_root, max_missing=.5)
    assert len(r) == 7 - len(gone) and all(Path(p).exists() for p in r.images) and r.captions[0][0].split()[-1][:-1] in names(r)[0]


def test_sharegpt4v_faults(sharegpt4v_root):
    source = next(sharegpt4v_root.glob("*.json"))
    whole = source.read_text()
    source.write_text(whole[:len(whole)//2])
    with pytest.raises(ValueError, match="damaged or cut short"): load_records("sharegpt4v", sharegpt4v_root)
    assert not list(sharegpt4v_root.glob("*.index-*"))                    # nothing half made stays
    source.write_text(json.dumps([dict(image="a.jpg", conversations=[{"value": "x"}])]))
    with pytest.raises(ValueError, match="record 0 has no"): load_records("sharegpt4v", sharegpt4v_root)
    source.write_text(json.dumps([dict(image="a.jpg", conversations=[{}, {"value": " \n"}])]))
    with pytest.raises(ValueError, match=r"record 0 \(a.jpg\) is empty"): load_records("sharegpt4v", sharegpt4v_root)
    source.write_text(whole)
    with pytest.raises(ValueError, match=r"cannot be written.*cache="): load_records("sharegpt4v", sharegpt4v_root, cache=sharegpt4v_root/"no such folder")
    with pytest.raises(ValueError, match="no folder"): load_records("sharegpt4v", sharegpt4v_root/"nowhere")
    with pytest.raises(ValueError, match="has no share-captioner"): load_records("sharegpt4v", sharegpt4v_root/"data")


def test_a_stopped_index_of_sharegpt4v_goes_on(sharegpt4v_root, monkeypatch):
    whole = load("sharegpt4v", sharegpt4v_root)
    want, found = [(whole.captions[i], whole.images[i]) for i in range(len(whole))], next(sharegpt4v_root.glob("*.index-*"))
    shutil.rmtree(found)
    monkeypatch.setattr(data_module, "_index_parts", partial(data_module._index_parts, size=100))
    def stop(*args): raise KeyboardInterrupt
    with monkeypatch.context() as m:
        m.setattr(data_module, "_into_place", stop)                        # with only what was made before the first part
        with pytest.raises(KeyboardInterrupt): load("sharegpt4v", sharegpt4v_root)
    with monkeypatch.context() as m:
        m.setattr(data_module, "write_tables", lambda folder, *args: stop() if folder.parent == sharegpt4v_root else write_tables(folder, *args))
        with pytest.raises(KeyboardInterrupt): load("sharegpt4v", sharegpt4v_root)
    assert len(list(sharegpt4v_root.glob("*.parts/*"))) == 11
    with monkeypatch.context() as m:
        m.setattr(data_module, "_turns", stop)                             # nothing is split again
        again = load("sharegpt4v", sharegpt4v_root)
    assert [(again.captions[i], again.images[i]) for i in range(len(again))] == want and list(sharegpt4v_root.glob("*.index-*")) == [found]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.dictionaries(st.text(max_size=8), st.one_of(st.text(max_size=30), st.integers(), st.lists(st.none())), max_size=3), max_size=8), st.integers(50, 120), st.sampled_from([None, 1]))
def test_streaming_reads_what_json_reads(tmp_path_factory, items, chunk, indent):
    path = tmp_path_factory.mktemp("stream")/"x.json"
    path.write_text(json.dumps(items, indent=indent))
    assert list(stream_json(path, chunk)) == items


@pytest.mark.parametrize("text,message", [('{"a": 1}', "no JSON list"), ("[1, 2]", "record 0 is no object"), ('[{"a": 1}, {"b": ]', "record 1 is damaged"), ('[{"a": 1}', "record 1 is damaged or cut"), ("", "no JSON list")])
def test_streaming_names_the_record(tmp_path, text, message):
    (tmp_path/"x.json").write_text(text)
    with pytest.raises(ValueError, match=message): list(stream_json(tmp_path/"x.json"))


def test_tables_name_blank_rows(tmp_path):
    write_tables(tmp_path, [(["a", "b"],), ([],), (["c"],), (["d", " "],), (["e"],)], ["x"])
    table = TextTable(tmp_path, "x")
    assert list(table) == [["a", "b"], [], ["c"], ["d", ""], ["e"]] and table.blank() == [1, 3] and table.take([4, 3]).blank() == [1] and table.take([4, 3]).take([0])[0] == ["e"]
    with pytest.raises(IndexError): table[5]
    write_tables(tmp_path, [], ["none"])
    assert len(TextTable(tmp_path, "none")) == 0


def same_store(a, b):
    return len(a) == len(b) and all(np.array_equal(a.whole(i), b.whole(i)) and np.array_equal(a.join(i, [0]), b.join(i, [0])) for i in range(len(a)))


@pytest.mark.parametrize("two_forms", [False, True])
def test_tokens_in_files_are_those_in_memory(tmp_path, tok, two_forms):
    tokenizer = TwoForms() if two_forms else tok
    write_tables(tmp_path, ((t,) for t in TEXTS), ["caption"])
    table = TextTable(tmp_path, "caption")
    store = text_store(table, tokenizer, workers=2, part=3)
    assert same_store(store, TextStore(TEXTS, tokenizer)) and same_store(pickle.loads(pickle.dumps(store)), store)
    assert same_store(text_store(table.take([5, 3, 3]), tokenizer), TextStore([TEXTS[i] for i in (5, 3, 3)], tokenizer))
    assert len(list(tmp_path.glob("tokens-*"))) == 1 and isinstance(text_store(TEXTS, tokenizer), TextStore)
    assert len(pickle.dumps(store)) < len(pickle.dumps(tokenizer)) + 2000


def test_a_stopped_build_of_tokens_goes_on(tmp_path, tok, monkeypatch):
    write_tables(tmp_path, ((t,) for t in TEXTS), ["caption"])
    table, calls = TextTable(tmp_path, "caption"), []
    def counted(tokenizer, joiner):
        def form(s):
            calls.append(s)
            if len(calls) == 30 and stop: raise KeyboardInterrupt
            return tokenizer.encode(s)
        return [form], ([0, 0], [0, 0])
    monkeypatch.setattr("debias_clip.data._forms", counted)
    stop = True
    with pytest.raises(KeyboardInterrupt): text_store(table, tok, workers=1, part=2)
    assert not [p for p in tmp_path.glob("tokens-*") if "parts" not in p.name]
    stop, first = False, len(calls)
    store = text_store(table, tok, workers=1, part=2)
    assert same_store(store, TextStore(TEXTS, tok)) and len(calls) < first + sum(map(len, TEXTS))


def test_builds_at_the_same_time_do_no_harm(tmp_path, tok):
    write_tables(tmp_path, ((t,) for t in TEXTS), ["caption"])
    with ThreadPoolExecutor(4) as pool: stores = list(pool.map(lambda _: text_store(TextTable(tmp_path, "caption"), tok, workers=1, part=2), range(4)))
    assert all(same_store(s, TextStore(TEXTS, tok)) for s in stores) and len(list(tmp_path.glob("tokens-*"))) == 1


def test_sharegpt4v_trains_with_workers(sharegpt4v_root, tok):
    for p in (sharegpt4v_root/"data").rglob("*.jpg"):
        if int(re.search(r"\d+$", p.stem)[0]) >= 1000: rgb().save(p)
    r = load("sharegpt4v", sharegpt4v_root)
    data = PairDataset(r, text_store(r.captions, tok), DEBIAS, lambda image: torch.from_numpy(np.array(image)).permute(2, 0, 1).float())
    a, b = (list(make_loader(data, GlobalBatches(len(r), 3), workers)) for workers in (0, 2))
    for x, y in zip(a, b): assert_same(x, y)
    assert torch.equal(a[0]["long"][0], tok(" ".join(r.captions[a[0]["index"][0]]))[0])


# shards

def encoded(colour="red", kind="png", size=(8, 8)):
    Image.new("RGB", size, colour).save(f := io.BytesIO(), {"jpg": "jpeg"}.get(kind, kind))
    return f.getvalue()


def write_shard(path, files, mode="w"):
    "files: list of (name, bytes or str)."
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as tar:
        for name, data in files:
            data = data.encode() if isinstance(data, str) else data
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def sample(key, colour="red", kind="png", text=None): return [(f"{key}.{kind}", encoded(colour, kind)), (f"{key}.txt", text or f"Sample {key}. It is {colour}.")]


@pytest.fixture
def shards(tmp_path):
    for k, colours in enumerate([("red", "green", "blue"), ("white",), ("black", "yellow")]): write_shard(tmp_path/f"wds/shard-{k:03d}.tar", sum((sample(f"{k}{n}", c) for n, c in enumerate(colours)), []))
    return tmp_path/"wds"


COLOURS = [(255, 0, 0), (0, 128, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0), (255, 255, 0)]


def colours(r): return [load_image(r.images[i]).getpixel((0, 0)) for i in range(len(r))]


def test_shards_are_records(shards, tok):
    r = read_shards(shards)
    assert list(r.captions) == [[f"Sample {k}.", f"It is {c}."] for k, c in [("00", "red"), ("01", "green"), ("02", "blue"), ("10", "white"), ("20", "black"), ("21", "yellow")]]
    assert colours(r) == COLOURS and (r.name, r.short, r.protocol) == ("wds", None, "all samples of 3 shards")
    assert r.label(3) == f"sample 3 ({shards}/shard-001.tar: 10.png)" and r.images[-1] == r.images[5]
    with pytest.raises(IndexError): r.images[6]
    few = select(r, [4, 0])
    assert colours(few) == [COLOURS[4], COLOURS[0]] and few.captions[1] == ["Sample 00.", "It is red."] and colours(select(few, [1])) == [COLOURS[0]]
    assert len(pickle.dumps(r)) < 3000 and colours(pickle.loads(pickle.dumps(few))) == colours(few)
    to_tensor = lambda im: torch.from_numpy(np.array(im)).permute(2, 0, 1).float()
    data = PairDataset(r, text_store(r.captions, tok, workers=1), DEBIAS, to_tensor, at_least=4)
    a, b = (list(make_loader(data, GlobalBatches(6, 2), workers)) for workers in (0, 2))
    for x, y in zip(a, b): assert_same(x, y)
    assert [tuple(im[:, 0, 0].int().tolist()) for batch in a for im in batch["image"]] == [COLOURS[i] for batch in a for i in batch["index"]]


def test_shards_are_found_by_folder_pattern_and_file(shards, tmp_path):
    whole = read_records(shards)
    index = list(shards.glob("shards.index-*"))
    for pattern in (shards/"shard-{000..002}.tar", f"{shards}/shard-{{000,001,002}}.tar", f"{shards}/shard-0{{0..0}}{{0..2}}.tar"):
        assert list(read_records(pattern).captions) == list(whole.captions)
    assert len(list(shards.glob("shards.index-*"))) == 1 == len(index) and not list(shards.glob("*.parts"))
    assert list(read_records(shards/"shard-{002..002}.tar", cache=tmp_path).captions) == list(read_records(shards/"shard-002.tar", cache=tmp_path).captions) == list(whole.captions)[4:]
    assert read_records(shards, splitter="period").captions[0] == ["Sample 00", "It is red."]
    with pytest.raises(ValueError, match=r"2 of 4 shards are not there: .*shard-003.tar, .*shard-004.tar"): read_shards(shards/"shard-{001..004}.tar")
    for wrong in (shards/"shard-{x}.tar", shards/"shard-{5..3}.tar", "https://example.org/{5..3}.tar"):
        with pytest.raises(ValueError, match="neither a range"): read_shards(wrong, cache=tmp_path)
    with pytest.raises(ValueError, match="root="): read_records(shards, root=tmp_path)
    with pytest.raises(ValueError, match="no table and has neither"): read_records(tmp_path)
    (shards/"captions.csv").write_text("image,caption\nx.png,Hello.\n")
    with pytest.raises(ValueError, match="1 of 1 image files are missing"): read_records(shards)      # a table goes before shards that lie beside it
    for n in range(12): write_shard(tmp_path/f"many/s-{n}.tar", sample(str(n)))
    assert [c[0] for c in read_shards(tmp_path/"many").captions] == [f"Sample {n}." for n in range(12)]


def test_data_of_ones_own_is_told_from_names(tmp_path, shards):
    own = [tmp_path, shards/"shard-{000..002}.tar", "shard-{000..002}.tar", "https://example.org/{0..1}.tar?a=1", "s3://bucket/x.tar", "nowhere/captions.csv", "captions.jsonl"]
    assert [is_own(d) for d in own] == [is_own(str(d)) for d in own] == [True]*7 and not any(map(is_own, [*PROTOCOLS, "scenes", "docc"]))


def test_what_a_sample_is(tmp_path):
    files = [("./a/1.jpg", encoded("red", "jpg")), ("./a/1.json", json.dumps(dict(caption="From json.", other=1))), ("./a/1.seg.png", encoded()), ("b/1.JPEG", encoded("blue", "jpg")),
             ("b.x/1.webp", encoded("white", "webp")), ("b/1.txt", "\ufeffA blue one. Again."), ("b.x/1.txt", "White."), ("b.x/1.json", "{}"), ("__meta__/1.txt", "x"), ("README", "x"), ("c.cls", "3"),
             ("._b.png", "x"), ("d.txt", "Far apart."), ("ü/ä.png", encoded("green")), ("ü/ä.txt", "Grün."), ("n"*150 + "/e.png", encoded()), ("n"*150 + "/e.txt", "Long name."), ("d.png", encoded("black"))]
    path = write_shard(tmp_path/"x.tar", files)
    r = read_shards(path)
    assert list(r.captions) == [["From json."], ["A blue one.", "Again."], ["White."], ["Far apart."], ["Grün."], ["Long name."]]
    assert [m.name for m in map(r.images.__getitem__, range(6))] == ["./a/1.jpg", "b/1.JPEG", "b.x/1.webp", "d.png", "ü/ä.png", "n"*150 + "/e.png"]
    assert all(max(abs(a - b) for a, b in zip(x, y)) < 5 for x, y in zip(colours(r), [(255, 0, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0), (0, 128, 0), (255, 0, 0)]))
    write_shard(tmp_path/"y.tar", [("a.png", encoded()), ("a.txt", "Not this."), ("a.json", json.dumps(dict(about="A key of its own.", caption="No.")))])
    assert read_shards(tmp_path/"y.tar", caption="about").captions[0] == ["A key of its own."]
    write_shard(tmp_path/"z.tar", [("a.png", encoded()), ("a.json", json.dumps(dict(captions=["One. ", "Two."]))), *sample("b")])
    r = read_shards(tmp_path/"z.tar")
    assert list(r.short) == [["One.", "Two."], ["Sample b. It is red."]] and list(r.captions) == [["One."], ["Sample b.", "It is red."]]


FAULTY = {"pictures without a caption": [("x.png", encoded())], "captions without a picture": [("x.txt", "A.")], "blank captions": [("x.png", encoded()), ("x.txt", " \n")], "captions that are damaged": [("x.png", encoded()), ("x.json", "["*100_000)],
          "captions that are damaged or no UTF-8": [("x.png", encoded()), ("x.json", "{")], "repeated names": [*sample("x"), ("x.png", encoded("blue"))]}


@pytest.mark.parametrize("kind", FAULTY)
def test_faulty_samples_are_counted_and_named(tmp_path, kind):
    write_shard(tmp_path/"s-0.tar", sample("a") + FAULTY[kind] + sample("b", "blue"))
    write_shard(tmp_path/"s-1.tar", sample("c"))
    found = r"\(s-0\.tar: x(\.png)?\)"
    n = 5 if kind == "repeated names" else 4
    for _ in range(2):                                                     # the second time from the index
        with pytest.raises(ValueError, match=rf"1 of {n} samples are faulty: 1 {kind}.* {found}.*max_missing"): read_shards(tmp_path)
        with pytest.warns(UserWarning, match=rf"1 {kind}.* {found}\. They are left out"): r = read_shards(tmp_path, max_missing=.25)
    assert [c[0] for c in r.captions] == ["Sample a."] + ["Sample x."]*(n - 4) + ["Sample b.", "Sample c."] and colours(r)[-2:] == [(0, 0, 255), (255, 0, 0)]
    assert n == 4 or colours(r)[1] == (255, 0, 0)


@pytest.mark.parametrize("value", ["[]", '"x"', '{"caption": ""}', '{"caption": 3}', '{"captions": ["a", ""]}', '{"captions": []}', "{}"])
def test_json_without_a_caption(tmp_path, value):
    write_shard(tmp_path/"s.tar", [*sample("a"), ("b.png", encoded()), ("b.json", value)])
    with pytest.raises(ValueError, match=r"1 blank captions \(s.tar: b\)"): read_shards(tmp_path)


def test_damaged_shards_are_named(shards):
    path = shards/"shard-001.tar"
    whole = path.read_bytes()
    ends = [m.offset_data + m.size for m in tarfile.open(shards/"shard-000.tar")]
    for cut in (300, 512 + 20, 1024 + 100, 512 + 512, 2048, 2048 + 300):   # in a header, in data, at an end of data, without closing blocks
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=r"shard-001\.tar is (no tar file, or )?cut short or damaged behind \d samples"): read_shards(shards)
    assert not [p for p in shards.glob("*.index-*") if not p.name.endswith(".parts")] and not [p for p in shards.glob("*.parts/*") if "." in p.name]                # nothing that looks whole
    damaged = bytearray(whole)
    damaged[1024:1100] = b"x"*76                                           # the second header
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match="damaged behind 1 samples"): read_shards(shards)
    for text, message in [(b"", "no tar file"), (b"<html>404</html>"*100, "no tar file")]:
        path.write_bytes(text)
        with pytest.raises(ValueError, match=rf"shard-001\.tar is {message}"): read_shards(shards)
    for mode, kind in [("w:gz", "gzip"), ("w:bz2", "bzip2"), ("w:xz", "xz")]:
        write_shard(path, sample("a"), mode)
        with pytest.raises(ValueError, match=rf"shard-001\.tar is compressed \({kind}\); decompress"): read_shards(shards)
    path.write_bytes(whole)
    assert len(read_shards(shards)) == 6 and len(ends) == 6


def test_folders_without_shards(tmp_path):
    with pytest.raises(ValueError, match="no \\*.tar files"): read_shards(tmp_path)
    write_shard(tmp_path/"a.tar.gz", sample("a"), "w:gz")
    for read in (read_shards, read_records):
        with pytest.raises(ValueError, match="decompress"): read(tmp_path)
    write_shard(tmp_path/"b/a.tar", [("a.cls", "1")])
    with pytest.raises(ValueError, match="hold no samples"): read_shards(tmp_path/"b")
    write_shard(tmp_path/"c/a.tar", [("a.png", encoded())])
    with pytest.raises(ValueError, match="1 of 1 samples are faulty"): read_shards(tmp_path/"c", max_missing=1)
    with pytest.raises(ValueError, match=r"cannot be written.*cache="): read_shards(write_shard(tmp_path/"d/a.tar", sample("a")), cache=tmp_path/"nowhere")
    for far in ("s3://bucket/{000..012}.tar", "gs://bucket/x.tar", "pipe:cat x.tar"):
        with pytest.raises(ValueError, match="copy the shards to a folder, or mount the bucket"): read_shards(far)


def test_pictures_in_shards_can_be_checked(shards, tmp_path):
    write_shard(shards/"shard-003.tar", [("bad.png", encoded()[:40]), ("bad.txt", "Cut."), ("none.png", b""), ("none.txt", "Empty.")])
    r = read_shards(shards)
    with pytest.raises(ValueError, match=r"2 of 8 images cannot be read: .*shard-003\.tar: bad\.png: cannot be read.*shard-003\.tar: none\.png: the file is empty"): readable(r)
    with pytest.warns(UserWarning, match="left out"): assert colours(readable(r, max_share=.25)) == COLOURS
    from debias_clip.data import _present
    assert _present("x", r.images, 0).tolist() == list(range(8))
    (shards/"shard-001.tar").unlink()
    with pytest.raises(ValueError, match=r"1 of 8 image files are missing: 1 in .*shard-001.tar \(first: 10.png\)"): _present("x", r.images, 0)
    with pytest.raises(ImageError, match=r"shard-001\.tar: 10\.png: there is no such file"): load_image(r.images[3])


def test_a_changed_shard_is_read_anew_and_a_stopped_index_goes_on(shards, monkeypatch):
    import debias_clip.data as data
    whole, seen = data._members, []
    def stopping(shard):
        seen.append(shard.name)
        if len(seen) == 2: raise KeyboardInterrupt
        return whole(shard)
    monkeypatch.setattr(data, "_members", stopping)
    class Here:
        "A pool of this process."
        def __init__(self, n): pass
        def __enter__(self): return self
        def __exit__(self, *a): pass
        def map(self, f, *xs): return map(f, *xs)
    monkeypatch.setattr(data, "ProcessPoolExecutor", Here)
    with pytest.raises(KeyboardInterrupt): read_shards(shards)
    assert len(read_shards(shards)) == 6 and len(seen) == 4 and len(set(seen)) == 3    # the one that was done is not gone through again
    write_shard(shards/"shard-001.tar", sample("10", "white") + sample("11", "red"))
    assert len(read_shards(shards)) == 7


def test_indexing_at_the_same_time_does_no_harm(shards):
    with ThreadPoolExecutor(3) as pool: found = list(pool.map(lambda _: list(read_shards(shards).captions), range(3)))
    assert found[0] == found[1] == found[2] and len(found[0]) == 6 and len(list(shards.glob("shards.index-*"))) == 1


@pytest.fixture
def web(shards):
    "(address of the folder of shards, list of what was asked for, set of names whose connection breaks)"
    asked, broken = [], set()
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            name = self.path.rpartition("/")[2].partition("?")[0]
            asked.append(name)
            if not (shards/name).is_file(): return self.send_error(404)
            body = (shards/name).read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[:700] if name in broken else body)
        def log_message(self, *a): pass
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/data", asked, broken
    server.shutdown()
    server.server_close()


def test_shards_of_a_web_server_are_fetched_once(web, shards, tmp_path):
    url, asked, broken = web
    pattern, cache = url + "/shard-{000..002}.tar", tmp_path/"cache"
    with pytest.raises(ValueError, match="cache="): read_records(pattern)
    broken.add("shard-001.tar")
    with pytest.raises(ValueError, match=r"shard-001\.tar cannot be fetched \(the connection broke after 700 of [\d,]+ bytes\)\. Start again"): read_records(pattern, cache=cache)
    assert {p.name for p in cache.rglob("*") if p.is_file()} == {"shard-000.tar", "shard-002.tar"}
    broken.clear(); asked.clear()
    r = read_records(pattern, cache=cache)
    assert asked == ["shard-001.tar"] and colours(r) == COLOURS and list(r.captions) == list(read_shards(shards).captions)
    assert colours(read_records(pattern + "?key=1", cache=cache)) == COLOURS and asked == ["shard-001.tar"]
    with pytest.raises(ValueError, match="404"): read_records(url + "/other.tar", cache=cache)
    with pytest.raises(ValueError, match="same name"): read_records(url + "/x.tar?{0,1}", cache=cache)
    with pytest.raises(ValueError, match="cannot be fetched"): read_records("http://127.0.0.1:9/x.tar", cache=cache)
    for wrong in ("/", "/..", "/x.tar/", "/x.tgz"):
        with pytest.raises(ValueError, match="must end in .tar"): read_records(url + wrong, cache=cache)
    assert {p.name for p in cache.rglob("*.tar*")} == {f"shard-{k:03d}.tar" for k in range(3)}


def test_urban1k(tmp_path):
    for i in (1, 2, 10):
        pictures(tmp_path, f"image/{i}.jpg")
        (tmp_path/"caption").mkdir(exist_ok=True)
        (tmp_path/f"caption/{i}.txt").write_text(f"\n Street {i}.  It is wet.\nSecond line.\n" if i == 2 else f"Street {i}. It is wet.\nSecond line.")
    r = load("urban1k", tmp_path)
    assert names(r) == ["1.jpg", "2.jpg", "10.jpg"] and r.captions == [[f"Street {i}.", "It is wet."] for i in (1, 2, 10)]
    assert load("urban1k-whole", tmp_path).captions[1] == ["Street 2.", "It is wet.", "Second line."] and "whole" in load("urban1k-whole", tmp_path).protocol
    (tmp_path/"caption/10.txt").write_text("  \n")
    with pytest.raises(ValueError, match=r"no caption.*10\.jpg"): load_records("urban1k", tmp_path)
    (tmp_path/"image/10.jpg").unlink()
    with pytest.raises(ValueError, match=r"1 of 3 image files are missing"): load_records("urban1k", tmp_path)


@pytest.mark.parametrize("inside", ["", "densely_captioned_images/"])
def test_dci(tmp_path, inside):
    base = tmp_path/inside
    for i, (image, short, extra) in enumerate([("sa_7.jpg", "A dog", "It runs. It is old."), ("sa_5.jpg", "A cat.", ""), ("sa_6.jpg", "A cow.", "It eats.")]):
        write_json(base/f"annotations/{[2, 10, 30][i]}-data.json", dict(image=image, short_caption=short, extra_caption=extra, mask_data={}, mask_keys=[]))
        pictures(base, f"photos/{image}")
    r = load("dci", tmp_path)
    assert names(r) == ["sa_7.jpg", "sa_5.jpg", "sa_6.jpg"] and r.captions == [["A dog", "It runs.", "It is old."], ["A cat."], ["A cow.", "It eats."]]
    assert load("dci", tmp_path, splitter="period").captions[0] == ["A dog It runs", "It is old."]
    long = load("long-dci", tmp_path)
    assert names(long) == ["sa_7.jpg", "sa_6.jpg"] and "1 blank ones skipped" in long.protocol and long.captions[1] == ["It eats."]
    (base/"annotations/2-data.json").write_text("{")
    with pytest.raises(ValueError, match="2-data.json is damaged"): load_records("dci", tmp_path)


def test_docci(tmp_path):
    rows = [dict(example_id=f"{s}_0000{i}", split=s, image_file=f"{s}_0000{i}.jpg", description=f"Scene {i}. Red.") for s in ("train", "test", "qual_test") for i in range(2)]
    write_lines(tmp_path/"docci_descriptions.jsonlines", rows)
    pictures(tmp_path, *[f"images/{r['image_file']}" for r in rows])
    assert names(load("docci", tmp_path)) == ["test_00000.jpg", "test_00001.jpg"] and len(load("docci-5100", tmp_path)) == 4
    write_lines(tmp_path/"docci_descriptions.jsonlines", rows + [dict(example_id="x", split="test", image_file="x.jpg")])
    with pytest.raises(ValueError, match="line 7 has no 'description'"): load_records("docci", tmp_path)


def test_iiw(tmp_path):
    write_lines(tmp_path/"datasets/IIW-400/data.jsonl", [{"image/key": "aar_test_04600", "IIW": "A flower. Blue.", "IIW-P5B": "A bee."}])
    write_lines(tmp_path/"datasets/DCI_Test/data.jsonl", [{"image": "sa_1545038.jpg", "ex_id": "1", "IIW": "A balcony."}])
    write_lines(tmp_path/"datasets/DOCCI_Test/data.jsonl", [{"image": "test_00731", "DOCCI": "A toilet.", "IIW": "A white toilet."}])
    pictures(tmp_path, "images/aar_test_04600.jpg", "images/sa_1545038.jpg", "images/test_00731.jpg")
    assert load("iiw", tmp_path).captions == [["A flower.", "Blue."], ["A balcony."], ["A white toilet."]]


def test_coco_val2017(tmp_path):
    write_json(tmp_path/"annotations/captions_val2017.json", dict(images=[dict(id=7, file_name="000000000007.jpg"), dict(id=3, file_name="000000000003.jpg")],
               annotations=[dict(id=k, image_id=3 if k % 2 else 7, caption=f" Caption {k}.\n") for k in range(12)]))
    pictures(tmp_path, "val2017/000000000007.jpg", "val2017/000000000003.jpg")
    r = load("coco", tmp_path)
    assert names(r) == ["000000000007.jpg", "000000000003.jpg"] and r.short[1] == [f"Caption {k}." for k in range(1, 12, 2)] and r.captions[0] == ["Caption 0."]
    assert [len(s) for s in load("coco-first5", tmp_path).short] == [5, 5]


def karpathy_rows(filepath):
    row = lambda i, split: dict(filename=f"{i}.jpg", sentids=[0, 1], imgid=i, split=split, cocoid=i, sentences=[dict(tokens=["a"], raw=f"{i} {k}.", imgid=i, sentid=k) for k in range(2)]) | filepath
    return dict(dataset="x", images=[row(0, "train"), row(1, "test"), row(2, "val"), row(3, "restval")])


def test_karpathy(tmp_path):
    write_json(tmp_path/"dataset_coco.json", karpathy_rows(dict(filepath="val2014")))
    write_json(tmp_path/"dataset_flickr30k.json", karpathy_rows({}))
    pictures(tmp_path, "val2014/1.jpg", *[f"flickr30k-images/{i}.jpg" for i in range(4)])
    assert load("coco-karpathy", tmp_path).short == [["1 0.", "1 1."]]
    assert names(load("flickr30k-1k", tmp_path)) == ["1.jpg"] and names(load("flickr30k-karpathy-all", tmp_path)) == ["0.jpg", "1.jpg", "2.jpg"]


def test_flickr30k_token_file_and_csv(tmp_path):
    pictures(tmp_path, "flickr30k_images/10.jpg", "flickr30k_images/9.jpg")
    (tmp_path/"results.csv").write_text("image_name| comment_number| comment\n10.jpg| 0| Two men | talk .\n10.jpg| 1   A dog runs .\n9.jpg| 0| A tree .\n")
    r = load("flickr30k-full", tmp_path)
    assert r.short == [["Two men | talk .", "A dog runs ."], ["A tree ."]] and names(r) == ["10.jpg", "9.jpg"]      # the line whose second bar is missing keeps its text
    (tmp_path/"results_20130124.token").write_text("".join(f"{n}.jpg#{k}\tCaption {k} of {n} .\n" for n in (9, 10) for k in range(5)))
    r = load("flickr30k-full", tmp_path)
    assert [len(s) for s in r.short] == [5, 5] and names(r) == ["9.jpg", "10.jpg"] and "token" in r.protocol
    (tmp_path/"results_20130124.token").write_text("9.jpg#0 no tab\n")
    with pytest.raises(ValueError, match="token line 1 is not"): load_records("flickr30k-full", tmp_path)


def test_names_of_data_sets_are_not_ambiguous(tmp_path):
    with pytest.raises(ValueError, match="flickr30k-karpathy-all, flickr30k-full, flickr30k-1k"): load_records("flickr30k", tmp_path)
    with pytest.raises(ValueError, match="No data set is called 'cocoa': there are sharegpt4v"): load_records("cocoa", tmp_path)
    assert {n for n, p in PROTOCOLS.items() if p.paper} == {"sharegpt4v", "sharegpt4v-val", "urban1k", "dci", "docci", "coco", "flickr30k-karpathy-all"}


@pytest.mark.skipif(not (SHARED/"data"/"docci").is_dir(), reason="../shared/data is not beside this checkout")
def test_docci_statistics_are_the_published_ones(tok):
    texts = [json.loads(line)["caption"] for line in (SHARED/"data/docci/captions.jsonl").read_text().splitlines() if '"id": "test_' in line]
    found = caption_statistics(TextStore([split_sentences(t) for t in texts], tok))
    assert found["captions"] == 5000 and found["median"] == 132 and abs(found["tokens"] - 141.5) < .1 and abs(found["> 77 %"] - 94.4) < .05 and abs(found["> 248 %"] - 3.76) < .005
    assert 15 < found["in sentence 1 %"] < 22 and found["one sentence"] <= 2
