"""Contracts of the data: the same samples whatever the workers, ranks and restarts; every picture read or named."""
import os, pickle, signal, time, warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from PIL import Image

from debias_clip.captions import DEBIAS, LONG_CLIP, SAMPLED
from debias_clip.data import (GlobalBatches, ImageError, Normalize, PairDataset, Records, TextStore, load_image, make_loader,
                              readable, select)
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
    assert store.inner.dtype == np.int32 and store.inner.nbytes == 4*sum(len(tok.encode(" ".join(t))) for t in TEXTS)*50


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
