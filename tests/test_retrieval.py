"""Retrieval against a slow count over the full matrix, with ties, copies and blocks of every size; intervals against simulated worlds."""
import math
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode

import debias_clip.retrieval as retrieval
from debias_clip.data import ImageError, Normalize, Records
from debias_clip.models import create_model, create_model_and_transforms, encode_texts
from debias_clip.retrieval import encode_captions, encode_images, encode_rows, paired_difference, protocol_card, ranks, recall_at_k, recall_interval, recall_of_ranks, seed_interval
from debias_clip.scenes import scene_records
from debias_clip.tokens import get_tokenizer


@contextmanager
def blocks_of(memory):
    "Scores a few at a time: `memory` in bytes."
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retrieval, '_Blocks', partial(retrieval._Blocks, memory=memory))
        yield


def slow_ranks(images, texts, of):
    "Every pair by itself."
    score = [[sum(a*b for a, b in zip(t, i)) for i in images] for t in texts]
    t2i = [sum(score[j][i] >= score[j][of[j]] for i in range(len(images)) if i != of[j]) for j in range(len(texts))]
    best = [max(score[j][i] for j in range(len(texts)) if of[j] == i) for i in range(len(images))]
    return t2i, [sum(score[j][i] >= best[i] for j in range(len(texts)) if of[j] != i) for i in range(len(images))]


@st.composite
def pairs(draw):
    "Small whole numbers, so that ties and copies are common and float32 is exact: (images, texts, image of each text)."
    n, more, d = draw(st.integers(1, 8)), draw(st.integers(0, 12)), draw(st.integers(1, 3))
    rows = lambda k: draw(st.lists(st.lists(st.integers(-2, 2), min_size=d, max_size=d), min_size=k, max_size=k))
    of = draw(st.permutations([*range(n), *draw(st.lists(st.integers(0, n - 1), min_size=more, max_size=more))]))
    return rows(n), rows(n + more), of


@given(pairs(), st.integers(1, 400))
@settings(max_examples=150, deadline=None)
def test_ranks_are_the_slow_ones(pair, memory):
    images, texts, of = pair
    with blocks_of(memory): found = ranks(torch.tensor(images), np.array(texts), of)
    assert (found['t2i'].tolist(), found['i2t'].tolist()) == slow_ranks(images, texts, of)
    assert found['t2i'].dtype == found['i2t'].dtype == torch.int64


@given(st.integers(0, 2**31), st.integers(1, 5000))
@settings(max_examples=40, deadline=None)
def test_copies_tie_in_every_block(seed, memory):
    "Random floats, whose products are never the same by chance: copies are, whatever the shapes they are multiplied in."
    g = np.random.default_rng(seed)
    base_images, base_texts = g.standard_normal((12, 7)), g.standard_normal((15, 7))
    which, said = np.concatenate([np.arange(12), g.integers(0, 12, 18)]), g.integers(0, 15, 60)
    of = g.permutation(np.concatenate([np.arange(30), g.integers(0, 30, 30)]))
    score = base_texts.astype(np.float32).astype(float) @ base_images.astype(np.float32).astype(float).T
    own = score[said, which[of]]
    t2i = (score[said][:, which] >= own[:, None]).sum(1) - 1
    best = np.array([own[of == i].max() for i in range(30)])
    i2t = [(score[said[of != i], which[i]] >= best[i]).sum() for i in range(30)]
    with blocks_of(memory): found = ranks(base_images[which], base_texts[said], of)
    assert found['t2i'].tolist() == t2i.tolist() and found['i2t'].tolist() == i2t


def test_zeros_of_either_sign_are_equal():
    images = torch.tensor([[0., 1.], [-0., 1.], [0., 2.]])
    for memory in (1, 10**6):
        with blocks_of(memory): assert ranks(images, images, [0, 1, 2])['t2i'].tolist() == [2, 2, 0]


def test_collapsed_features_score_nothing():
    same = torch.ones(20, 4)
    assert set(recall_at_k(same, same, range(20)).values()) == {0.}
    assert recall_at_k(same, same, range(20), ks=[19, 20]) == {'t2i_R@19': 0, 't2i_R@20': 100, 'i2t_R@19': 0, 'i2t_R@20': 100}
    assert recall_at_k(same[:1], same[:1], [0], ks=[1]) == {'t2i_R@1': 100, 'i2t_R@1': 100}        # nothing to confuse it with


def test_recall_keys_and_values():
    images = torch.eye(4)
    texts = torch.tensor([[9., 0, 0, 0], [5, 4, 0, 0], [0, 0, 9, 0], [7, 6, 5, 4], [0, 9., 0, 0]])
    of = [0, 1, 2, 3, 1]
    assert ranks(images, texts, of) | {} and ranks(images, texts, of)['t2i'].tolist() == [0, 1, 0, 3, 0] and ranks(images, texts, of)['i2t'].tolist() == [0, 0, 0, 0]
    found = recall_at_k(images, texts, of, ks=(1, 2, 4))
    assert found == {'t2i_R@1': 60, 't2i_R@2': 80, 't2i_R@4': 100, 'i2t_R@1': 100, 'i2t_R@2': 100, 'i2t_R@4': 100}
    assert list(recall_at_k(images, texts, of)) == ['t2i_R@1', 't2i_R@5', 't2i_R@10', 'i2t_R@1', 'i2t_R@5', 'i2t_R@10']
    assert all(type(v) is float for v in found.values()) and recall_of_ranks(ranks(images, texts, of), (1, 2, 4)) == found


def test_arrays_and_tensors_of_any_float():
    g = torch.Generator().manual_seed(0)
    images, texts, of = torch.randn(30, 16, generator=g), torch.randn(70, 16, generator=g), torch.arange(70) % 30
    want = recall_at_k(images, texts, of)
    for i, t, o in [(images.numpy(), texts.numpy(), of.numpy()), (images.double(), texts.numpy().astype(float), of.tolist()), (images.clone().requires_grad_(), texts, of.int()), (images, texts, of.numpy().astype(np.uint8))]:
        assert recall_at_k(i, t, o) == want
    for dtype in (torch.float16, torch.bfloat16):                   # the score is float32: what half precision has lost is lost, and no more
        assert recall_at_k(images.to(dtype), texts.to(dtype), of) == recall_at_k(images.to(dtype).float(), texts.to(dtype).float(), of)
    long = 1000*torch.ones(3, 16).half()                            # products beyond float16
    assert ranks(long*torch.tensor([[1.], [2], [3]]).half(), long, [0, 1, 2])['t2i'].tolist() == [2, 1, 0]


def nan_at(rows, n=15):
    x = torch.ones(n, 3)
    x[rows, 0] = float('nan')
    return x


@pytest.mark.parametrize('images, texts, of, message', [
    (nan_at([2, 5]), torch.ones(15, 3), range(15), 'image features of 2 rows are not finite: rows [2, 5]. '), (torch.ones(15, 3), nan_at(range(12)), range(15), 'text features of 12 rows are not finite: rows [0, 1, 2, 3, 4, 5, 6, 7, 8, 9] …'),
    (torch.full((2, 3), math.inf), torch.ones(2, 3), [0, 1], 'image features of 2 rows'), (torch.ones(4, 3), torch.ones(3, 3), [0, 2, 2], '2 images have no text: rows [1, 3]. '),
    (torch.ones(2, 3), torch.ones(2, 3), [0, 2], 'image_of_text holds 0 to 2; the 2 images are rows 0 to 1'), (torch.ones(2, 3), torch.ones(2, 3), [-1, 0], 'holds -1 to 0'),
    (torch.ones(2, 3), torch.ones(2, 4), [0, 1], 'Image features have 3 dimensions and text features 4'), (torch.ones(2, 3), torch.ones(3, 3), [0, 1], 'one image for each of the 3 texts, not be of shape [2]'),
    (torch.ones(2, 3), torch.ones(2, 3), [[0, 1]], 'not be of shape [1, 2]'), (torch.ones(2, 3), torch.ones(2, 3), [], 'not be of shape [0]'),
    (torch.ones(0, 3), torch.ones(2, 3), [0, 1], 'image features must be a matrix [n, d] with at least one row, not of shape [0, 3]'),
    (torch.ones(2, 3), torch.ones(0, 3), [], 'text features must be a matrix'), (torch.ones(3), torch.ones(3), [0], 'not of shape [3]'), (torch.ones(2, 3), torch.ones(2, 3), [0.5, 1.], 'whole numbers')])
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


@pytest.mark.parametrize('images', ['all different', 'all equal'])
@pytest.mark.parametrize('texts', ['all different', 'all equal'])
def test_the_full_matrix_is_never_made(images, texts):
    "1,000 images and 5,000 texts, 20 MB of scores, in blocks of 256 KiB: nothing larger than the features or twice a block is made."
    n, m, memory = 1000, 5000, 2**18
    features = {'all different': lambda k: torch.randn(k, 8, generator=torch.Generator().manual_seed(k)), 'all equal': lambda k: torch.ones(k, 8)}
    a, b = features[images](n), features[texts](m)
    with blocks_of(memory), Largest() as largest: found = ranks(a, b, torch.arange(m) % n)
    assert largest.bytes <= memory
    if texts == images == 'all equal': assert found['t2i'].eq(n - 1).all() and found['i2t'].eq(m - 5).all()


# Features

@pytest.fixture(scope='module')
def tower(): return create_model('scenes-clip', context_length=88, keep=8), get_tokenizer('scenes-clip', 88)


def test_repeated_captions_have_equal_features(tower):
    "Or equal texts would not tie, whatever the ranks do about it."
    model, tok = tower
    words = "a small red circle at the top left of a grey picture with nothing else in it".split()
    texts = [" ".join(words[:2 + i % 13]) for i in range(169)]
    features = encode_captions(model, tok, texts, batch_size=16)
    assert all(torch.equal(features[i], features[i % 13]) for i in range(169)) and len(features.unique(dim=0)) == 13


def test_texts_come_back_in_order(tower):
    model, tok = tower
    texts = [' '.join(c) for c in scene_records('val', n=30).captions] + ['', 'A red disc.'*40]
    features = encode_captions(model, tok, texts, batch_size=7)
    with torch.inference_mode(): alone = torch.cat([encode_texts(model.eval(), tok([t]), normalize=True) for t in texts])
    torch.testing.assert_close(features, alone, rtol=0, atol=2e-6)
    torch.testing.assert_close(encode_rows(model, tok, tok(texts)), features, rtol=0, atol=2e-6)
    assert features.dtype == torch.float32 and features.shape == (32, 128)


def test_files_and_arrays_give_the_same_features(tower, tmp_path):
    model = tower[0].train()
    _, _, transform = create_model_and_transforms('scenes-clip', context_length=88, keep=8)
    world = scene_records('val', n=5)
    for i, image in enumerate(world.images): Image.fromarray(image).save(tmp_path/f'{i}.png')
    files = Records('files', [tmp_path/f'{i}.png' for i in range(5)], world.captions)
    cfg = model.visual.preprocess_cfg
    from_files, from_array = encode_images(model, files, transform, batch_size=2), encode_images(model, world, Normalize(cfg['mean'], cfg['std']), batch_size=3)
    torch.testing.assert_close(from_files, from_array, rtol=0, atol=1e-5)
    torch.testing.assert_close(from_files.norm(dim=1), torch.ones(5))
    assert model.training                                           # left as it was
    (tmp_path/'3.png').write_bytes(b'no picture')
    with pytest.raises(ImageError, match='3.png'): encode_images(model, files, transform)


def test_protocol_card(tower):
    world, tok = scene_records('val', n=4), tower[1]
    card = protocol_card(world, tok, ['short', 'word '*86, 'word '*87])
    assert (card['images'], card['texts'], card['truncated texts'], card['context length'], card['data']) == (4, 3, 1, 88, 'scenes, val')


# Intervals

def slow_bootstrap(values, image_of, n_boot, seed):
    "The same draws, the texts of every drawn image put in one list."
    g, n, out = np.random.default_rng(seed), len(set(image_of)), []
    of_image = [[v for v, i in zip(values, image_of) if i == k] for k in range(n)]
    for _ in range(n_boot): out.append(np.mean([v for k in g.integers(0, n, n) for v in of_image[k]]))
    return np.percentile(out, [2.5, 97.5])*100


def test_intervals_are_the_slow_ones():
    g = np.random.default_rng(1)
    a, b, of = g.integers(0, 4, 40), g.integers(0, 4, 40), g.permutation(np.concatenate([np.arange(12), g.integers(0, 12, 28)]))
    np.testing.assert_allclose(recall_interval(a, 2, of, 50, 3), slow_bootstrap((a < 2)*1., of, 50, 3))
    np.testing.assert_allclose(recall_interval(torch.tensor(a), 1, n_boot=50), slow_bootstrap((a < 1)*1., range(40), 50, 0))
    np.testing.assert_allclose(paired_difference(a, b, 2, of, 50, 3)[1:], slow_bootstrap((a < 2)*1. - (b < 2), of, 50, 3))
    assert recall_interval(a, 2, of) == recall_interval(a, 2, of) == recall_interval(a, 2, [f'{i:02d}.jpg' for i in of])     # seeded; any names
    assert recall_interval(a, 2, of) != recall_interval(a, 2, of, seed=1)


def test_the_interval_covers_the_truth():
    g, truth, hits = np.random.default_rng(0), 60, 0
    for seed in range(300):
        low, high = recall_interval((g.random(150) > truth/100).astype(int), n_boot=300, seed=seed)
        hits += low <= truth <= high
    assert .91 <= hits/300 <= .98


def test_texts_of_an_image_are_drawn_together():
    "Images are easy or hard for all of their five texts: the interval that takes texts for independent is too narrow."
    g, of, widths, hits = np.random.default_rng(0), np.repeat(np.arange(100), 5), [], np.zeros(2)
    for seed in range(200):
        easy = np.repeat(g.random(100) < .5, 5)
        found = (g.random(500) > np.where(easy, .9, .1)).astype(int)
        both = [recall_interval(found, n_boot=300, seed=seed, **kw) for kw in ({}, {'image_of': of})]
        widths.append([high - low for low, high in both])
        hits += [low <= 50 <= high for low, high in both]
    naive, together = np.mean(widths, 0)
    assert together > 1.6*naive and hits[0]/200 < .8 and .9 <= hits[1]/200 <= .985


def test_paired_differences():
    g = np.random.default_rng(0)
    b = g.integers(0, 3, 400)
    a = np.where(g.random(400) < .9, b, 0)                          # like b, but for queries that a has right
    difference, low, high = paired_difference(a, b)
    assert difference == pytest.approx(100*((a < 1).mean() - (b < 1).mean())) and 0 < low < difference < high
    assert paired_difference(b, a)[0] == -difference and paired_difference(b, a)[2] == pytest.approx(-low, abs=.5)
    assert high - low < np.subtract(*recall_interval(a)[::-1])      # narrower than either model's own
    assert paired_difference(a, a) == (0, 0, 0) and paired_difference(a, b, k=3) == (0, 0, 0)
    assert paired_difference(torch.tensor(a), torch.tensor(b)) == (difference, low, high)
    with pytest.raises(ValueError, match='400 ranks of one and 399 of the other'): paired_difference(a, b[1:])
    with pytest.raises(ValueError): recall_interval(a, image_of=range(399))


@pytest.mark.parametrize('values, mean, half', [([1, 2, 3], 2, 2.48414), ([10, 12, 11, 13, 14], 12, 1.96324), ([0., 1.], .5, 6.35310), ([7.5]*4, 7.5, 0)])
def test_seed_interval(values, mean, half):
    "Half-widths by hand: t of the table (12.7062, 4.3027, 3.1824, 2.7764) · standard deviation / √n."
    assert seed_interval(values) == pytest.approx((mean, mean - half, mean + half), abs=1e-4)
    assert seed_interval(values[:1]) == (values[0], None, None)


@pytest.mark.parametrize('values', [[], [1., float('nan')]])
def test_no_interval_of_nothing(values):
    with pytest.raises(ValueError, match='one finite number a seed'): seed_interval(values)
