"""The same samples whatever the workers, ranks and restarts, pictures that are augmented included."""
import os
import random
import signal
import time

import numpy as np
import pytest
import torch
from files import pictures, rgb, write_sharegpt4v
from hypothesis import given, settings
from hypothesis import strategies as st
from open_clip.transform import AugmentationCfg, image_transform
from PIL import Image

from debias_clip.benchmarks import load_records
from debias_clip.captions import DEBIAS, LONG_CLIP, RECIPES, SAMPLED, Recipe, sample_rng
from debias_clip.pairs import GlobalBatches, Normalize, PairDataset, drawing_by, make_loader
from debias_clip.records import ImageError, Records, load_image
from debias_clip.store import TextStore, text_store
from debias_clip.tokens import get_tokenizer

TEXTS = [["A red box.", "It is on a table.", "The light is dim.", "A cat sleeps behind it."], ["One sentence only."],
         ["A blue ball.", "It rolls."],
         ["Five birds.", "One sings.", "Two fly.", "One is red.", "The last one is asleep, 2.5 m away."]]*4


@pytest.fixture(scope="module")
def tok(): return get_tokenizer("ViT-B-16-quickgelu")


@pytest.fixture(scope="module")
def pairs(tok):
    images = np.random.default_rng(0).integers(0, 256, (len(TEXTS), 6, 6, 3), dtype=np.uint8)
    records = Records("test", images, TEXTS)
    return PairDataset(records, TextStore(TEXTS, tok), DEBIAS, Normalize((.4, .5, .6), (.2, .3, .4)), seed=3)


def assert_same(a, b):
    assert a.keys() == b.keys()
    for k in a: assert torch.equal(a[k], b[k]), k


def to_tensor(image): return torch.from_numpy(np.array(image)).permute(2, 0, 1).float()


# texts

def test_a_batch_is_its_samples(pairs):
    keys = [(0, 3), (5, 3), (0, 1), (2, 0)]
    batch = pairs.__getitems__(keys)
    for row, key in enumerate(keys): assert_same({k: v[row] for k, v in batch.items()}, pairs[key])
    assert batch["long"].dtype == batch["short"].dtype == batch["index"].dtype == torch.int64
    assert not torch.equal(batch["short"][0], batch["short"][1])
    assert_same(pairs[3], pairs[0, 3])


def words_and_pads(row, tok):
    "(pads before the words, words) of a row of ids."
    row = row.tolist()
    end = row.index(tok.eot)
    start = next(k for k in range(1, end + 1) if row[k] != tok.pad)
    return start - 1, row[start:end]


@pytest.mark.parametrize("name", RECIPES)
def test_short_captions_are_what_the_recipe_draws(pairs, tok, name):
    "The draws are those that the first trained models saw: places, then one number for the pads."
    recipe = RECIPES[name]
    dataset = PairDataset(pairs.records, pairs.store, recipe, None, seed=3)
    for epoch in range(5):
        for i in (0, 1, 3):
            rng = sample_rng(3, epoch, i)
            text = tok.encode(" ".join(recipe(TEXTS[i], rng)))
            n_pre = int(rng.random()*(tok.free(len(text)) + 1)) if recipe.prefix_pad else 0
            assert words_and_pads(dataset[epoch, i]["short"], tok) == (n_pre, text)
            assert words_and_pads(dataset[epoch, i]["long"], tok) == (0, tok.encode(" ".join(TEXTS[i])))


def test_padding_spreads_over_the_free_places_and_draws_after_the_sentences(pairs, tok):
    sampled, padded = (PairDataset(pairs.records, pairs.store, recipe, None) for recipe in (SAMPLED, DEBIAS))
    shares = []
    for epoch in range(200):
        pads, words = words_and_pads(padded[epoch, 3]["short"], tok)
        assert words == words_and_pads(sampled[epoch, 3]["short"], tok)[1]
        shares.append(pads/tok.free(len(words)))
    assert 0.4 < np.mean(shares) < 0.6 and max(shares) > .95 and max(shares) <= 1


def test_long_captions_may_be_drawn_and_padded_too(pairs, tok):
    recipe = Recipe.parse(dict(short=["drop_summary", "draw", "in_order"], short_pads="random_pads", long=["shuffle"],
                               long_pads={"random_pads": {"share": 0.5}}))
    dataset, seen = PairDataset(pairs.records, pairs.store, recipe, None), set()
    for epoch in range(50):
        rng = sample_rng(0, epoch, 0)
        short = tok.encode(" ".join(TEXTS[0][p] for p in recipe.short_places(4, rng)))
        short_pads = recipe.pads("short", int(tok.free(len(short))), rng)
        long = tok.encode(" ".join(TEXTS[0][p] for p in recipe.long_places(4, rng)))
        long_pads = recipe.pads("long", int(tok.free(len(long))), rng)
        assert words_and_pads(dataset[epoch, 0]["short"], tok) == (short_pads, short)
        assert words_and_pads(dataset[epoch, 0]["long"], tok) == (long_pads, long)
        assert long_pads <= .5*tok.free(len(long))
        seen.add(tuple(long))
    assert len(seen) > 10


def test_without_a_recipe_there_is_no_short_caption(pairs, tok):
    dataset = PairDataset(pairs.records, pairs.store, None, None)
    assert "short" not in dataset[0] and torch.equal(dataset[0]["long"], tok(" ".join(TEXTS[0]))[0])
    summary = PairDataset(pairs.records, pairs.store, LONG_CLIP, None)
    assert torch.equal(summary[4, 0]["short"], tok(TEXTS[0][0])[0])


def test_a_dataset_refuses_what_does_not_fit(pairs, tok):
    with pytest.raises(ValueError, match="16 samples, but the token store has 1"):
        PairDataset(pairs.records, TextStore(TEXTS[:1], tok), DEBIAS, None)
    files = Records("x", ["a.jpg"], [["A."]])
    with pytest.raises(ValueError, match="transform"): PairDataset(files, TextStore([["A."]], tok), None, None)
    period = Records("x", ["a.jpg"], [["A", "B"]], splitter="period")
    with pytest.raises(ValueError, match=r"joiner=records\.joiner"):
        PairDataset(period, TextStore(period.captions, tok), None, to_tensor)


# pictures

def test_normalize():
    x = np.random.default_rng(0).integers(0, 256, (2, 3, 4, 3), dtype=np.uint8)
    mean, std = (torch.tensor(v)[:, None, None] for v in ((.4, .5, .6), (.2, .3, .4)))
    want = (torch.from_numpy(x).permute(0, 3, 1, 2)/255 - mean)/std
    torch.testing.assert_close(Normalize((.4, .5, .6), (.2, .3, .4))(x), want)


def test_arrays_are_batched_at_once(pairs):
    images = pairs.records.images
    batch = PairDataset(pairs.records, pairs.store, None, None).__getitems__([(0, 2), (0, 0)])["image"]
    assert torch.equal(batch, torch.from_numpy(images[[2, 0]]).permute(0, 3, 1, 2))


def test_a_frozen_tower_needs_no_pictures(tmp_path, tok):
    np.save(tmp_path/"f.npy", np.random.default_rng(0).standard_normal((4, 5)).astype(np.float32))
    features = np.load(tmp_path/"f.npy", mmap_mode="r")
    r = Records("x", [f"nowhere/{i}.jpg" for i in range(4)], TEXTS[:4])
    data = PairDataset(r, TextStore(TEXTS[:4], tok), DEBIAS, None, features=features)
    keys = [(0, 3), (0, 1)]
    batch = data.__getitems__(keys)
    assert torch.equal(batch["image"], torch.from_numpy(features[[3, 1]].copy()))
    arrays = Records("x", np.zeros((4, 2, 2, 3), np.uint8), TEXTS[:4])
    seen = PairDataset(arrays, data.store, DEBIAS, None).__getitems__(keys)
    for k in ("long", "short", "index"): assert torch.equal(batch[k], seen[k])
    for x, y in zip(*[make_loader(data, GlobalBatches(4, 2), workers) for workers in (0, 1)], strict=True):
        assert_same(x, y)
    batch["image"].zero_()
    assert data[3]["image"].abs().sum() > 0                              # a batch is a copy
    for bad in (features[:3], features.astype(np.float64), features[:, 0], torch.from_numpy(features.copy())):
        with pytest.raises(ValueError, match=r"float32 array \[4, d\]"):
            PairDataset(r, data.store, DEBIAS, None, features=bad)


def detailed(height, width):
    "A picture with edges and grain of every size, as photographs have."
    rng, out = np.random.default_rng(0), np.zeros((height, width, 3))
    for cells in (4, 16, 64, 256):
        grid = Image.fromarray(rng.integers(0, 256, (cells*height//width + 1, cells, 3), dtype=np.uint8))
        how = Image.Resampling.NEAREST if cells < 64 else Image.Resampling.BICUBIC
        out += np.asarray(grid.resize((width, height), how))*.25
    return Image.fromarray(out.clip(0, 255).astype(np.uint8))


def test_draft_mode_changes_little(tmp_path, tok):
    files = [tmp_path/name for name in ("x.jpg", "x.png", "x.webp")]
    for file in files: detailed(1200, 1600).save(file, quality=90)
    def small(image): return to_tensor(image.resize((224, 224), Image.Resampling.BICUBIC))
    r = Records("x", files, [["A."]]*3)
    whole, draft = (PairDataset(r, TextStore(r.captions, tok), None, small, at_least=n) for n in (None, 448))
    whole, draft = (data.images([(0, 0), (0, 1), (0, 2)]) for data in (whole, draft))
    assert torch.equal(whole[1:], draft[1:])                             # only JPEGs have a draft mode
    assert load_image(files[0], 448).size == (800, 600) and 0 < (whole[0] - draft[0]).abs().mean() < 1


def test_an_unreadable_picture_stops_by_name_in_workers_too(tmp_path, tok):
    pictures(tmp_path, *[f"{i}.png" for i in range(4)])
    (tmp_path/"2.png").write_bytes(b"")
    r = Records("mine", [tmp_path/f"{i}.png" for i in range(4)], [[f"Number {i}."] for i in range(4)])
    data = PairDataset(r, TextStore(r.captions, tok), None, to_tensor)
    assert data.__getitems__([(0, 0), (0, 3)])["image"].shape == (2, 3, 6, 9)
    for workers in (0, 1):
        with pytest.raises(ImageError, match=r"2\.png"): next(iter(make_loader(data, GlobalBatches(4, 4), workers)))


# augmented pictures

AUGMENTATIONS = {
    "crop": AugmentationCfg(scale=(0.3, 1.0)),
    "timm": AugmentationCfg(use_timm=True, scale=(0.3, 1.0), color_jitter=0.4, re_prob=0.5),
}


@pytest.fixture(scope="module", params=AUGMENTATIONS)
def augmented(request, pairs, tmp_path_factory):
    "The same pictures as an array and as files, transformed at random."
    transform = image_transform((32, 32), is_train=True, aug_cfg=AUGMENTATIONS[request.param])
    folder = tmp_path_factory.mktemp("pictures")
    images = np.random.default_rng(1).integers(0, 256, (len(TEXTS), 48, 48, 3), dtype=np.uint8)
    files = [folder/f"{i}.png" for i in range(len(TEXTS))]
    for file, image in zip(files, images, strict=True): Image.fromarray(image).save(file)
    return [PairDataset(Records("x", kind, TEXTS), pairs.store, DEBIAS, transform, seed=3, augment=True)
            for kind in (images, files)]


def test_augmentations_depend_on_seed_epoch_and_sample_alone(augmented):
    array, files = augmented
    keys = [(0, 3), (1, 3), (0, 2), (0, 3)]
    batch = array.images(keys)
    random.seed(5), np.random.seed(6), torch.manual_seed(7)              # whatever was drawn before
    assert torch.equal(array.images(keys[::-1]), batch.flip(0)) and torch.equal(files.images(keys), batch)
    assert torch.equal(batch[0], batch[3]) and not torch.equal(batch[0], batch[1])
    other = PairDataset(array.records, array.store, DEBIAS, array.transform, seed=4, augment=True)
    assert not torch.equal(other.images(keys)[0], batch[0])


def test_augmenting_leaves_every_generator_as_it_was(augmented, pairs):
    def draws(): return random.random(), np.random.random(), torch.rand(1).item()
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    want = [draws(), draws()]
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    found = [draws()]
    augmented[0].images([(0, 0), (0, 1)])
    assert [*found, draws()] == want
    with pytest.raises(KeyError), drawing_by(0, 0, 0): raise KeyError
    for k in ("long", "short"): assert torch.equal(augmented[0][2, 3][k], pairs[2, 3][k])   # nor do texts differ


def test_workers_augment_alike(augmented):
    _, files = augmented
    for a, b in zip(*[make_loader(files, GlobalBatches(len(files), 4), workers) for workers in (0, 2)], strict=True):
        assert_same(a, b)


# batches

@settings(max_examples=60, deadline=None)
@given(st.data())
def test_ranks_share_one_global_order(data):
    world, share = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
    batch = world*share
    n = data.draw(st.integers(batch, 5*batch))
    epoch, seed = data.draw(st.integers(0, 1000)), data.draw(st.integers(0, 2**32))
    whole = GlobalBatches(n, batch, seed=seed)
    whole.set_epoch(epoch)
    steps = list(whole)
    assert len(steps) == len(whole) == n//batch
    keys = [k for step in steps for k in step]
    assert len(set(keys)) == len(keys) and all(e == epoch and 0 <= i < n for e, i in keys)
    ranks = [GlobalBatches(n, batch, r, world, seed) for r in range(world)]
    for r in ranks: r.set_epoch(epoch)
    assert [sum(parts, []) for parts in zip(*ranks, strict=True)] == steps
    start = data.draw(st.integers(0, len(whole)))
    for r, sampler in enumerate(ranks):
        sampler.set_epoch(epoch, start)
        assert list(sampler) == [s[r*share:(r + 1)*share] for s in steps[start:]] and len(sampler) == len(whole)


def test_epochs_and_seeds_reorder():
    orders = []
    for seed, epoch in [(0, 0), (0, 1), (1, 0)]:
        sampler = GlobalBatches(64, 8, seed=seed)
        sampler.set_epoch(epoch)
        orders.append(tuple(i for batch in sampler for _, i in batch))
    assert len(set(orders)) == 3 and all(sorted(order) == list(range(64)) for order in orders)


@pytest.mark.parametrize("args,message", [
    ((10, 11), "from 10 samples"), ((10, 0), "from 10 samples"), ((10, 4, 0, 3), "multiple of 3"),
    ((10, 4, 2, 2), "rank 2"), ((10, 4, -1, 2), "rank -1")])
def test_impossible_batches_are_refused(args, message):
    with pytest.raises(ValueError, match=message): GlobalBatches(*args)


def test_an_epoch_cannot_be_entered_behind_its_end():
    with pytest.raises(ValueError, match="has 2 batches"): GlobalBatches(10, 4).set_epoch(0, 3)


# loaders

@pytest.fixture(scope="module")
def on_disk(pairs, tmp_path_factory):
    "The pairs with their pictures in files."
    folder = tmp_path_factory.mktemp("files")
    files = [folder/f"{i}.png" for i in range(len(pairs))]
    for file, image in zip(files, pairs.records.images, strict=True): Image.fromarray(image).save(file)
    return PairDataset(Records("x", files, TEXTS), pairs.store, DEBIAS, to_tensor, seed=3)


def test_workers_change_nothing(on_disk):
    state, batches = torch.get_rng_state(), {0: [], 2: []}
    for workers, seen in batches.items():
        sampler = GlobalBatches(len(on_disk), 4, seed=1)
        loader = make_loader(on_disk, sampler, workers)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            seen += list(loader)
    assert len(batches[0]) == len(batches[2]) == 8
    for a, b in zip(*batches.values(), strict=True): assert_same(a, b)
    assert torch.equal(state, torch.get_rng_state())      # a restart in mid-epoch finds torch's generator as it was


def test_pictures_in_memory_need_no_worker(pairs, on_disk, augmented):
    datasets = (pairs, on_disk, *augmented)
    assert [make_loader(d, GlobalBatches(16, 4), 2).num_workers for d in datasets] == [0, 2, 2, 2]


class Telling(PairDataset):
    def __getitems__(self, keys): return {"threads": torch.tensor(torch.get_num_threads())}


def test_workers_use_one_thread(on_disk):
    telling = Telling(on_disk.records, on_disk.store, None, to_tensor)
    assert {int(b["threads"]) for b in make_loader(telling, GlobalBatches(16, 4), 2)} == {1}


class Dying(PairDataset):
    def __getitems__(self, keys): os.kill(os.getpid(), signal.SIGKILL)


def test_a_dead_worker_is_an_error_soon(on_disk):
    dying = Dying(on_disk.records, on_disk.store, None, to_tensor)
    begin = time.perf_counter()
    with pytest.raises(RuntimeError, match="worker"): next(iter(make_loader(dying, GlobalBatches(16, 4), workers=1)))
    assert time.perf_counter() - begin < 30


def test_sharegpt4v_trains_with_workers(tmp_path, tok):
    root = write_sharegpt4v(tmp_path, fill=lambda file: rgb().save(file))
    with pytest.warns(UserWarning, match="published"): r = load_records("sharegpt4v", root)
    data = PairDataset(r, text_store(r, tok), DEBIAS, to_tensor)
    a, b = (list(make_loader(data, GlobalBatches(len(r), 3), workers)) for workers in (0, 2))
    for x, y in zip(a, b, strict=True): assert_same(x, y)
    assert torch.equal(a[0]["long"][0], tok(" ".join(r.captions[a[0]["index"][0]]))[0])
