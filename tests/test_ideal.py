"The ideal reader against a slow one that counts the scenes each caption fits."
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from debias_clip.authors import SPLITS, scene_records
from debias_clip.captions import permute
from debias_clip.ideal import DIMENSIONS, facts, image_features, load_ideal, see, text_features
from debias_clip.pairs import Normalize
from debias_clip.retrieval import encode_captions, encode_images, ranks
from debias_clip.scenes import draw_scenes, render

N = 150


@pytest.fixture(scope='module')
def reader(): return load_ideal()


@pytest.fixture(scope='module', params=['own', 'other'])
def records(request): return scene_records('val', N, author=request.param)


def fits(scenes, told):
    "bool [n]: the scenes in which every fact is true, looked up one by one."
    out = np.ones(len(scenes), bool)
    for i in range(len(scenes)):
        for kind, *what in told:
            if kind == 'ground': out[i] &= scenes.ground[i] == what[0]
            elif kind == 'count': out[i] &= scenes.present[i].sum() == what[0]
            else:
                size, colour, shape, place = what
                out[i] &= any(
                    scenes.present[i, c] and place in (None, c) and size in (None, scenes.large[i, c])
                    and colour in (None, scenes.colour[i, c]) and shape in (None, scenes.shape[i, c]) for c in range(9))
    return out


@pytest.mark.parametrize('order', ['full', 'move', 'remove', 'first'])
def test_two_towers_find_what_counting_finds(reader, records, order):
    "Text→image: the rank of a caption's own picture is the number of other pictures that it fits."
    model, _, tok = reader
    scenes = draw_scenes(N, SPLITS['val'][1])
    long = [i for i, caption in enumerate(records.captions) if len(caption) >= 4]
    texts = [' '.join(permute(records.captions[i], order)) for i in long]
    images = encode_images(model, records, Normalize((0, 0, 0), (1, 1, 1)))
    scores = encode_captions(model, tok, texts) @ images.T
    for row, i, text in zip(scores, long, texts, strict=True):
        fitting = fits(scenes, facts(text))
        assert fitting[i], text
        assert (row >= row[i]).tolist() == fitting.tolist()


def test_scores_are_whole_numbers(reader, records):
    "So ties are exact, and count against the reader as against any model."
    model, _, tok = reader
    images = encode_images(model, records, Normalize((0, 0, 0), (1, 1, 1)))
    texts = encode_captions(model, tok, [' '.join(c) for c in records.captions])
    assert images.shape == texts.shape == (N, DIMENSIONS)
    assert (images.norm(dim=1) == 1).all() and (texts.norm(dim=1) == 1).all()
    scores = images @ texts.T*16*2048
    assert (scores == scores.round()).all()
    told = [len(facts(' '.join(c))) for c in records.captions]
    assert scores.diagonal().tolist() == told                       # its own picture: the number of facts


@given(st.integers(0, 2**31))
@settings(max_examples=15, deadline=None)
def test_no_picture_is_read_wrong(seed):
    scenes = draw_scenes(8, seed)
    objects, ground = see(torch.from_numpy(render(scenes)))
    truth = np.stack([scenes.shape, scenes.colour, scenes.large], -1)
    assert (objects.numpy() == np.where(scenes.present[..., None], truth, -1)).all()
    assert (ground.numpy() == scenes.ground).all()


@pytest.mark.parametrize('text, told', [
    ('The image shows a red ring and an azure shape on a tan background.',
     {('object', None, 0, 4, None), ('object', None, 2, None, None), ('ground', 1)}),
    ('At the top is a small crimson hoop.', {('object', 0, 0, 4, 1)}),
    ('In the upper left, a big moon.', {('object', 1, None, 7, 0)}),
    ('A tiny plus can be found at the centre.', {('object', 0, None, 5, 4)}),
    ('Someone put a bar on the left and a disc to the right.',
     {('object', None, None, 6, 3), ('object', None, None, 0, 5)}),
    ('Six things on rose, a dark box among them.', {('count', 6), ('ground', 3), ('object', None, 7, 1, None)}),
    ('I notice a shape at the top. It is a red disc.',
     {('object', None, None, None, 1), ('object', None, 0, 0, 1)}),
    ('A red ring at the top. It is a red disc.', {('object', None, 0, 4, 1), ('object', None, 0, 0, None)}),
    ('It is a red disc. I notice a shape at the top.',
     {('object', None, None, None, 1), ('object', None, 0, 0, None)}),
    ('A red disc to the right side of a red ring.',
     {('object', None, 0, 0, None), ('object', None, 0, 4, None)}),
    ('A red disc to the right.', {('object', None, 0, 0, 5)}),
    ('A little noise, as in an old print. No people. This is a photo.', set()),
    ('Seen straight from above, as if the shapes lay on a table.', set()),
])
def test_facts(text, told): assert facts(text) == told


def test_pads_and_filler_mean_nothing(reader, records):
    model, _, tok = reader
    texts = [' '.join(caption) for caption in records.captions[:40]]
    plain = model.encode_text(tok(texts))
    assert torch.equal(model.encode_text(tok(texts, n_pre=7)), plain)
    assert torch.equal(model.encode_text(tok([f'This is a photo. {text}' for text in texts])), plain)


def test_a_text_that_says_more_wins():
    "Image→text: of two true texts the one with more facts scores higher, and a false one lower than any."
    scenes = draw_scenes(1, 0)
    objects, ground = see(torch.from_numpy(render(scenes)))
    image, cell = image_features(objects[0], ground[0]), int(np.flatnonzero(scenes.present[0])[0])
    true = ('object', None, int(scenes.colour[0, cell]), int(scenes.shape[0, cell]), cell)
    texts = [{true}, {true, ('ground', int(scenes.ground[0]))}, {true, ('ground', (int(scenes.ground[0]) + 1) % 4)}]
    one, two, wrong = (float(image @ text_features(told)) for told in texts)
    assert (one, two) == (1, 2) and wrong < 0


@pytest.mark.parametrize('split', ['val', 'test'])
@pytest.mark.parametrize('author', ['own', 'other'])
def test_the_ceiling_is_near_100(reader, split, author):
    model, _, tok = reader
    records = scene_records(split, author=author)
    long = [i for i, caption in enumerate(records.captions) if len(caption) >= 4]
    images = encode_images(model, records, Normalize((0, 0, 0), (1, 1, 1)))[long]
    for order in ('full', 'move', 'remove'):
        texts = [' '.join(permute(records.captions[i], order)) for i in long]
        rank = ranks(images, encode_captions(model, tok, texts), np.arange(len(long)))['t2i']
        assert (rank < 1).double().mean() >= .99, order
