"""Retrieval against a slow count over the full matrix, with ties, copies and blocks of every size."""
import math
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode

from debias_clip import retrieval
from debias_clip.authors import scene_records
from debias_clip.models import create_model, create_model_and_transforms, encode_texts
from debias_clip.pairs import Normalize
from debias_clip.records import ImageError, Records
from debias_clip.retrieval import (
    encode_captions,
    encode_images,
    encode_rows,
    image_features,
    protocol_card,
    ranks,
    recall_at_k,
)
from debias_clip.tokens import get_tokenizer

NORMALIZE = Normalize((.5, .5, .5), (.25, .25, .25))


@contextmanager
def blocks_of(memory):
    "Scores a few at a time: `memory` in bytes."
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retrieval, "BLOCK_BYTES", memory)
        yield


def slow_ranks(images, texts, of):
    "Every pair by itself."
    def dot(a, b): return sum(x*y for x, y in zip(a, b, strict=True))
    score = [[dot(text, image) for image in images] for text in texts]
    own = [score[j][of[j]] for j in range(len(texts))]
    t2i = [sum(s >= own[j] for i, s in enumerate(score[j]) if i != of[j]) for j in range(len(texts))]
    best = [max(own[j] for j in range(len(texts)) if of[j] == i) for i in range(len(images))]
    rivals = [[score[j][i] for j in range(len(texts)) if of[j] != i] for i in range(len(images))]
    return t2i, [sum(s >= best[i] for s in rivals[i]) for i in range(len(images))]


@st.composite
def pairs(draw):
    "Small whole numbers, so that ties and copies are common and float32 is exact: (images, texts, image of each text)."
    n, more, d = draw(st.integers(1, 8)), draw(st.integers(0, 12)), draw(st.integers(1, 3))
    row = st.lists(st.integers(-2, 2), min_size=d, max_size=d)
    images = draw(st.lists(row, min_size=n, max_size=n))
    texts = draw(st.lists(row, min_size=n + more, max_size=n + more))
    others = draw(st.lists(st.integers(0, n - 1), min_size=more, max_size=more))
    return images, texts, draw(st.permutations([*range(n), *others]))


@given(pairs(), st.integers(1, 400))
@settings(max_examples=150, deadline=None)
def test_ranks_are_the_slow_ones(pair, memory):
    images, texts, of = pair
    with blocks_of(memory): got = ranks(torch.tensor(images), np.array(texts), of)
    assert (got["t2i"].tolist(), got["i2t"].tolist()) == slow_ranks(images, texts, of)
    assert got["t2i"].dtype == got["i2t"].dtype == torch.int64


@given(st.integers(0, 2**31), st.integers(1, 5000))
@settings(max_examples=40, deadline=None)
def test_copies_tie_in_every_block(seed, memory):
    "Random floats, never the same by chance: copies score the same, whatever the shapes they are multiplied in."
    g = np.random.default_rng(seed)
    images, texts = g.standard_normal((12, 7)), g.standard_normal((15, 7))
    image_kind, text_kind = np.concatenate([np.arange(12), g.integers(0, 12, 18)]), g.integers(0, 15, 60)
    of = g.permutation(np.concatenate([np.arange(30), g.integers(0, 30, 30)]))
    score = texts.astype(np.float32).astype(float) @ images.astype(np.float32).astype(float).T
    score = score[text_kind][:, image_kind]                         # [60 texts, 30 images]
    own = score[np.arange(60), of]
    t2i = (score >= own[:, None]).sum(1) - 1
    i2t = [(score[of != i, i] >= own[of == i].max()).sum() for i in range(30)]
    with blocks_of(memory): got = ranks(images[image_kind], texts[text_kind], of)
    assert got["t2i"].tolist() == t2i.tolist() and got["i2t"].tolist() == i2t


def test_zeros_of_either_sign_are_equal():
    images = torch.tensor([[0., 1.], [-0., 1.], [0., 2.]])
    for memory in (1, 10**6):
        with blocks_of(memory): assert ranks(images, images, [0, 1, 2])["t2i"].tolist() == [2, 2, 0]


def test_collapsed_features_score_nothing():
    same = torch.ones(20, 4)
    assert set(recall_at_k(same, same, range(20)).values()) == {0.}
    last = recall_at_k(same, same, range(20), ks=[19, 20])
    assert last == {"t2i_R@19": 0, "t2i_R@20": 100, "i2t_R@19": 0, "i2t_R@20": 100}
    alone = recall_at_k(same[:1], same[:1], [0], ks=[1])            # nothing to confuse it with
    assert alone == {"t2i_R@1": 100, "i2t_R@1": 100}


def test_recall_keys_and_values():
    images = torch.eye(4)
    texts = torch.tensor([[9., 0, 0, 0], [5, 4, 0, 0], [0, 0, 9, 0], [7, 6, 5, 4], [0, 9., 0, 0]])
    of = [0, 1, 2, 3, 1]
    got = ranks(images, texts, of)
    assert got["t2i"].tolist() == [0, 1, 0, 3, 0] and got["i2t"].tolist() == [0, 0, 0, 0]
    recall = recall_at_k(images, texts, of, ks=(1, 2, 4))
    assert recall == {"t2i_R@1": 60, "t2i_R@2": 80, "t2i_R@4": 100, "i2t_R@1": 100, "i2t_R@2": 100, "i2t_R@4": 100}
    assert list(recall_at_k(images, texts, of)) == [f"{way}_R@{k}" for way in ("t2i", "i2t") for k in (1, 5, 10)]
    assert all(type(v) is float for v in recall.values())


def test_arrays_and_tensors_of_any_float():
    g = torch.Generator().manual_seed(0)
    images, texts, of = torch.randn(30, 16, generator=g), torch.randn(70, 16, generator=g), torch.arange(70) % 30
    want = recall_at_k(images, texts, of)
    assert recall_at_k(images.numpy(), texts.numpy(), of.numpy()) == want
    assert recall_at_k(images.double(), texts.numpy().astype(float), of.tolist()) == want
    assert recall_at_k(images.clone().requires_grad_(), texts, of.int()) == want
    assert recall_at_k(images, texts, of.numpy().astype(np.uint8)) == want


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_scored_in_float32(dtype):
    "What it has lost is lost, and no more."
    g = torch.Generator().manual_seed(0)
    images, texts = (torch.randn(n, 16, generator=g).to(dtype) for n in (30, 70))
    of = torch.arange(70) % 30
    assert recall_at_k(images, texts, of) == recall_at_k(images.float(), texts.float(), of)
    long = 1000*torch.ones(3, 16).to(dtype)                         # products beyond float16
    assert ranks(long*torch.tensor([[1.], [2], [3]]).to(dtype), long, [0, 1, 2])["t2i"].tolist() == [2, 1, 0]


def nan_at(rows, n=15):
    x = torch.ones(n, 3)
    x[rows, 0] = float("nan")
    return x


def ones(*shape): return torch.ones(*shape)


BAD = [
    (nan_at([2, 5]), ones(15, 3), range(15), "image features of 2 rows are not finite: rows 2, 5. "),
    (ones(15, 3), nan_at(range(12)), range(15), "of 12 rows are not finite: rows 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 …"),
    (torch.full((2, 3), math.inf), ones(2, 3), [0, 1], "image features of 2 rows"),
    (ones(4, 3), ones(3, 3), [0, 2, 2], "2 images have no text: rows 1, 3. "),
    (ones(2, 3), ones(2, 3), [0, 2], "image_of_text holds 0 to 2; the 2 images are rows 0 to 1"),
    (ones(2, 3), ones(2, 3), [-1, 0], "holds -1 to 0"),
    (ones(2, 3), ones(2, 4), [0, 1], "image features have 3 dimensions and text features 4"),
    (ones(2, 3), ones(3, 3), [0, 1], "one image for each of the 3 texts, not be of shape [2]"),
    (ones(2, 3), ones(2, 3), [[0, 1]], "not be of shape [1, 2]"),
    (ones(2, 3), ones(2, 3), [], "not be of shape [0]"),
    (ones(0, 3), ones(2, 3), [0, 1], "image features must be a matrix [n, d] with at least one row, not of"),
    (ones(2, 3), ones(0, 3), [], "text features must be a matrix"),
    (ones(3), ones(3), [0], "not of shape [3]"),
    (ones(2, 3), ones(2, 3), [0.5, 1.], "whole numbers"),
]

@pytest.mark.parametrize("images, texts, of, message", BAD)
def test_bad_input(images, texts, of, message):
    with pytest.raises(ValueError) as e: recall_at_k(images, texts, of)
    assert message in str(e.value)


class Largest(TorchDispatchMode):
    "The bytes of the largest tensor that any operation makes."
    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, torch.Tensor): self.bytes = max(self.bytes, t.untyped_storage().nbytes())
        return out


def rows(kind, n): return torch.ones(n, 8) if kind == "equal" else torch.randn(n, 8)


@pytest.mark.parametrize("images", ["different", "equal"])
@pytest.mark.parametrize("texts", ["different", "equal"])
def test_the_full_matrix_is_never_made(images, texts):
    "1,000 images and 5,000 texts, 20 MB of scores, in blocks of 256 KiB: nothing larger than these is made."
    n, m, memory = 1000, 5000, 2**18
    a, b = rows(images, n), rows(texts, m)
    with blocks_of(memory), Largest() as largest: got = ranks(a, b, torch.arange(m) % n)
    assert largest.bytes <= memory
    if texts == images == "equal": assert got["t2i"].eq(n - 1).all() and got["i2t"].eq(m - 5).all()


# Features

@pytest.fixture(scope="module")
def tower(): return create_model("scenes-clip", context_length=88, keep=8), get_tokenizer("scenes-clip", 88)


def test_repeated_captions_have_equal_features(tower):
    "Or equal texts would not tie, whatever the ranks do about it."
    model, tok = tower
    words = "a small red circle at the top left of a grey picture with nothing else in it".split()
    texts = [" ".join(words[:2 + i % 13]) for i in range(169)]
    features = encode_captions(model, tok, texts, batch_size=16)
    assert all(torch.equal(features[i], features[i % 13]) for i in range(169)) and len(features.unique(dim=0)) == 13


def test_texts_come_back_in_order(tower):
    model, tok = tower
    texts = [" ".join(c) for c in scene_records("val", n=30).captions] + ["", "A red disc."*40]
    features = encode_captions(model, tok, texts, batch_size=7)
    with torch.inference_mode():
        alone = torch.cat([encode_texts(model.eval(), tok([t]), normalize=True) for t in texts])
    torch.testing.assert_close(features, alone, rtol=0, atol=2e-6)
    torch.testing.assert_close(encode_rows(model, tok, tok(texts)), features, rtol=0, atol=2e-6)
    assert features.dtype == torch.float32 and features.shape == (32, 128)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    "Five scenes as files."
    folder, world = tmp_path_factory.mktemp("pictures"), scene_records("val", n=5)
    for i, image in enumerate(world.images): Image.fromarray(image).save(folder/f"{i}.png")
    return Records("files", [folder/f"{i}.png" for i in range(5)], world.captions)


@pytest.fixture(scope="module")
def transform(): return create_model_and_transforms("scenes-clip", context_length=88, keep=8)[2]


@pytest.mark.parametrize("workers", [0, 2])
def test_files_and_arrays_give_the_same_features(tower, files, transform, workers):
    model = tower[0].train()
    settings = model.visual.preprocess_cfg
    from_files = encode_images(model, files, transform, batch_size=2, workers=workers)
    in_memory = Normalize(settings["mean"], settings["std"])
    from_array = encode_images(model, scene_records("val", n=5), in_memory, batch_size=3, workers=workers)
    torch.testing.assert_close(from_files, from_array, rtol=0, atol=1e-5)
    torch.testing.assert_close(from_files.norm(dim=1), torch.ones(5))
    assert model.training                                           # left as it was


@pytest.mark.parametrize("workers", [0, 2])
def test_a_picture_that_cannot_be_read_is_named(tower, files, transform, tmp_path, workers):
    "By one plain message, from a worker too."
    broken = tmp_path/"broken.png"
    broken.write_bytes(b"no picture")
    records = Records("broken", [*files.images[:3], broken, files.images[4]], files.captions)
    with pytest.raises(ImageError) as e: encode_images(tower[0], records, transform, batch_size=2, workers=workers)
    assert str(e.value).startswith(f"{broken}: cannot be read") and "Traceback" not in str(e.value)


def test_files_are_decoded_by_workers(tower, files):
    "Pictures in memory are not."
    import os
    def transform(picture): return torch.full((3, 48, 48), float(os.getpid()))
    class Model(torch.nn.Linear):
        def encode_image(self, x): return x[:, :2, 0, 0] - torch.tensor([0., os.getpid()])
    model = Model(1, 1)
    assert (encode_images(model, files, transform, workers=1)[:, 1] != 0).all()
    assert (encode_images(model, files, transform, workers=0)[:, 1] == 0).all()
    def batch(x): return torch.full((len(x), 3, 48, 48), float(os.getpid()))
    assert (encode_images(model, scene_records("val", n=5), batch, workers=1)[:, 1] == 0).all()


def test_features_that_are_there_are_taken(tower):
    world = scene_records("val", n=6)
    features = encode_images(tower[0], world, NORMALIZE)
    torch.testing.assert_close(image_features(tower[0], NORMALIZE, world, [4, 2]), features[[4, 2]])
    assert torch.equal(image_features(None, None, world, images=features), features)
    with pytest.raises(ValueError, match="5 image features for 6 records"):
        image_features(None, None, world, images=features[1:])


def test_protocol_card(tower):
    world, tok = scene_records("val", n=4), tower[1]
    card = protocol_card(world, tok, ["short", "word "*86, "word "*87])
    shown = [card[k] for k in ("images", "texts", "truncated texts", "context length", "data")]
    assert shown == [4, 3, 1, 88, "scenes, val"]
