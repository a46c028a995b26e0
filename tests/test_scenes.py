"The offline world against slow readers: every phrase looked up in its scene, every cell of a picture looked at."
import hashlib
import json
import random
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from debias_clip import scenes as world
from debias_clip.captions import split_sentences
from debias_clip.scenes import (
    AUTHORS,
    COLOURS,
    GROUNDS,
    PLACES,
    SCENES_VERSION,
    SHAPES,
    SIZES,
    SPLITS,
    draw_scenes,
    long_caption,
    render,
    scene_records,
    short_caption,
)

RGB = dict(red=(214, 39, 40), green=(44, 160, 44), blue=(31, 90, 220), yellow=(240, 220, 40),
           purple=(130, 50, 170), orange=(255, 140, 20), white=(245, 245, 245), black=(15, 15, 15))
GROUND_RGB = dict(grey=(150, 150, 150), brown=(150, 115, 80), teal=(95, 160, 160), pink=(225, 170, 185))


# A reader of captions: words to numbers, synonyms too, then everything said is looked up.

def number(table): return {word: k for k, pair in enumerate(table.items()) for word in pair}


SIZE, COLOUR, SHAPE, GROUND, PLACE = map(number, (SIZES, COLOURS, SHAPES, GROUNDS, PLACES))
AT = '|'.join(sorted(PLACE, key=len, reverse=True))


def one(table): return '|'.join(table)

NOUN = rf'\b(an?) (?:({one(SIZE)}) )?(?:({one(COLOUR)}) )?({one(SHAPE)}|shape)\b'
PHRASE = re.compile(rf'{NOUN}(?: (?:is |sits |can be found )?({AT})\b)?', re.I)
FRONT = re.compile(rf"({AT})(?: is|,) ", re.I)   # "At the top is ", "In the upper left, "


def told(sentence):
    "What a sentence says of objects: list of (size, colour, shape, cell), None where it is silent."
    out = []
    for m in PHRASE.finditer(sentence):
        article, size, colour, shape, at = (g and g.lower() for g in m.groups())
        if not at and (front := FRONT.fullmatch(sentence[:m.start()])): at = front[1].lower()
        word = next(w for w in (size, colour, shape) if w)
        assert article == ('an' if word[0] in 'aeiou' else 'a'), sentence
        out.append((SIZE.get(size), COLOUR.get(colour), SHAPE.get(shape), PLACE.get(at)))
    return out


def matching(scenes, i, said):
    "Cells of scene i whose object is as `said`."
    size, colour, shape, at = said
    return [c for c in range(9) if scenes.present[i, c] and at in (None, c) and size in (None, scenes.large[i, c])
            and colour in (None, scenes.colour[i, c]) and shape in (None, scenes.shape[i, c])]


def check_sentence(scenes, i, sentence):
    assert sentence.endswith('.') and sentence[0].isupper(), sentence
    assert '  ' not in sentence and sentence.count('.') == 1, sentence
    assert not re.search(r'[{}]', sentence)
    for said in told(sentence): assert matching(scenes, i, said), (sentence, said)
    for ground in re.findall(rf'\b({one(GROUND)})\b', sentence.lower()):
        assert GROUND[ground] == scenes.ground[i], sentence
    return told(sentence)


def units(sentences):
    "The details, the two sentences of a split one put together: 'I notice a shape at the top.' 'It is a red disc.'"
    for k, s in enumerate(sentences):
        if s.startswith('It is a'):
            ((*_, at),), ((size, colour, shape, _),) = told(sentences[k - 1]), told(s)
            yield size, colour, shape, at
        elif k + 1 == len(sentences) or not sentences[k + 1].startswith('It is a'):
            yield from told(s)


@pytest.fixture(scope='module')
def some(): return draw_scenes(400, 7)


def test_the_reader_reads():
    assert told('A crimson moon sits at the top left.') == [(None, 0, 7, 0)]
    assert told('In the upper middle, an azure hoop.') == [(None, 2, 4, 1)]
    two = 'A tiny shape is to the right, and a plus is at the centre.'
    assert told(two) == [(0, None, None, 5), (None, None, 5, 4)]
    assert told('A little noise, as in an old print.') == []
    assert told('Seen straight from above, as if the shapes lay on a table.') == []
    scenes = draw_scenes(1, 0)
    absent = int(np.flatnonzero(~scenes.present[0])[0])
    assert not matching(scenes, 0, (None, None, None, absent))


@pytest.mark.parametrize('name', AUTHORS)
def test_long_captions_are_true(some, name):
    author = AUTHORS[name]
    for i in range(len(some)):
        caption = long_caption(some, i, random.Random(f'{name} {i}'), author)
        assert len(caption) >= 2
        for sentence in caption: check_sentence(some, i, sentence)
        summary = told(caption[0])
        assert 2 <= len(summary) <= 3 and all(size is None and at is None for size, _, _, at in summary)
        details = list(units(caption[1:]))
        assert max(2, round(author.mention*some.present[i].sum())) <= len(details) <= some.present[i].sum()
        assert all(matching(some, i, said) for said in details), caption   # both halves of a split one: one object
        placed = [at for *_, at in details if at is not None]
        assert len(set(placed)) == len(placed), caption                         # no object is told twice


@pytest.mark.parametrize('name', AUTHORS)
def test_short_captions_are_true(some, name):
    counts = set()
    for i in range(len(some)):
        caption = short_caption(some, i, random.Random(i), AUTHORS[name])
        counts.add(len(check_sentence(some, i, caption)))
        assert split_sentences(caption) == [caption]
    assert counts == {1, 2, 3}


def test_summaries_name_the_largest(some):
    several = [i for i in range(len(some)) if some.large[i][some.present[i]].sum() >= 3]
    assert len(several) > 50
    for i in several:
        summary = long_caption(some, i, random.Random(i), AUTHORS['own'])[0]
        for said in told(summary): assert any(some.large[i, c] for c in matching(some, i, said))


@given(st.integers(0, 2**31), st.integers(0, 19), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.floats(0, 3))
@settings(max_examples=60, deadline=None)
def test_any_author_tells_the_truth(seed, i, synonym, split, pair, fillers):
    scenes = draw_scenes(20, 5)
    author = replace(AUTHORS['other'], synonym=synonym, split=split, pair=pair, fillers=fillers)
    caption = long_caption(scenes, i, random.Random(seed), author)
    for sentence in caption: check_sentence(scenes, i, sentence)
    assert all(matching(scenes, i, said) for said in units(caption[1:]))


def test_sentences_survive_the_splitter(some):
    "Captions joined by a space fall into the same sentences: nothing about them hangs on how they were made."
    for i in range(100):
        caption = long_caption(some, i, random.Random(i), AUTHORS['own'])
        assert split_sentences(' '.join(caption)) == caption


# Authors

def test_authors_write_differently():
    n, texts = 300, {}
    for name in AUTHORS: texts[name] = scene_records('val', n=n, author=name)
    own, other = (texts[a].captions for a in AUTHORS)
    assert (texts['own'].images == texts['other'].images).all()
    assert not any(a == b for a, b in zip(own, other, strict=True))
    def words_of(records): return [w for c in records.captions for w in re.findall('[a-z]+', ' '.join(c).lower())]
    words = {name: words_of(texts[name]) for name in AUTHORS}
    synonyms = {word for table in (SHAPES, COLOURS, SIZES) for word in table.values()}
    plain = {word for table in (SHAPES, COLOURS, SIZES) for word in table}
    share = {name: sum(w in synonyms for w in ws)/sum(w in synonyms | plain for w in ws) for name, ws in words.items()}
    for name in AUTHORS: assert abs(share[name] - AUTHORS[name].synonym) < .03
    assert np.mean([len(c) for c in other]) > np.mean([len(c) for c in own]) + 1
    for what in ('summary', 'detail', 'unplaced', 'filler'):
        assert not set(getattr(AUTHORS['own'], what)) & set(getattr(AUTHORS['other'], what))


# Pictures

def cells(image): return image.reshape(3, 16, 3, 16, 3).swapaxes(1, 2).reshape(9, 256, 3)


def test_every_object_is_drawn_and_nothing_else(some):
    images, areas = render(some, grain=0), {}
    assert images.shape == (400, 48, 48, 3) and images.dtype == np.uint8
    for i, image in enumerate(images):
        ground = np.array(list(GROUND_RGB.values())[some.ground[i]])
        for c, pixels in enumerate(cells(image)):
            empty = (pixels == ground).all(1)
            if not some.present[i, c]: assert empty.all(); continue
            assert (pixels[~empty] == list(RGB.values())[some.colour[i, c]]).all()
            assert 12 <= (~empty).sum() < 220
            areas.setdefault((some.shape[i, c], some.large[i, c]), set()).add(int((~empty).sum()))
    assert len(areas) == 16
    for shape in range(8): assert min(areas[shape, 1]) > max(areas[shape, 0])


def test_shapes_and_shifts_look_different():
    "One scene for each shape, size and shift, all in the middle cell: 144 different pictures, each moved by its shift."
    n = 8*2*9
    shape, large, shift = (a.ravel() for a in np.meshgrid(range(8), range(2), range(9)))
    def in_all_cells(values): return np.repeat(np.asarray(values)[:, None], 9, 1)
    shifts = np.stack([shift//3 - 1, shift % 3 - 1], 1)
    red, grey = np.zeros((n, 9), int), np.zeros(n, int)
    middle_only = np.arange(9) == np.full((n, 1), 4)
    scenes = world.Scenes(middle_only, in_all_cells(shape), red, in_all_cells(large), grey, in_all_cells(shifts), 0)
    middle = render(scenes, grain=0)[:, 16:32, 16:32]
    kinds = zip(shape.tolist(), large.tolist(), map(tuple, shifts.tolist()), strict=True)
    drawn = {kind: (m == RGB['red']).all(-1) for kind, m in zip(kinds, middle, strict=True)}
    assert len({d.tobytes() for d in drawn.values()}) == n
    for (which, size, moved), mask in drawn.items():
        assert (np.roll(drawn[which, size, (0, 0)], moved, (0, 1)) == mask).all(), (which, size, moved)


def test_grain_is_noise_around_the_scene(some):
    clean, noisy = (render(some, grain=g).astype(float) for g in (0, 8.))
    middling = (clean > 40) & (clean < 215)         # away from 0 and 255, where it is cut off
    difference = (noisy - clean)[middling]
    assert abs(difference.std() - 8) < .2 and abs(difference.mean()) < .6      # rounding down costs half a grey level
    assert noisy.min() >= 0 and noisy.max() <= 255


# The same bits; splits; names

GOLDEN = {   # of 50 scenes each: (captions, pixels)
    ('train', 'long', 'own'): ('1e68eae279091e48', '68d883cbe9fe7692'),
    ('web', 'short', 'own'): ('30dd54ac01aee567', 'edf18d379f0d3421'),
    ('test', 'short', 'other'): ('16280c6a21e9a23d', 'd7c498adb48bfbfc'),
    ('val', 'long', 'other'): ('892222ce2093ce54', '26900c148be2aff0'),
}


def digests(records):
    texts = json.dumps([records.captions, records.short]).encode()
    return tuple(hashlib.sha256(data).hexdigest()[:16] for data in (texts, records.images.tobytes()))


def test_the_worlds_bits():
    "Another machine and a refactor give them too: a model is known by the version of the world it was trained in."
    now = {(split, text, author): digests(scene_records(split, 50, text, author)) for split, text, author in GOLDEN}
    assert SCENES_VERSION == 1
    assert now == GOLDEN, 'captions or pixels of the offline world changed: raise SCENES_VERSION, and put these here'


def test_same_arguments_same_bits():
    a = scene_records('test', n=50)
    world._pictures.cache_clear()
    b = scene_records('test', n=50)
    assert a.images is not b.images and (a.images == b.images).all()
    assert (a.captions, a.short, a.protocol) == (b.captions, b.short, b.protocol)
    a, b = draw_scenes(9, 1), draw_scenes(9, 2)
    assert not (a.colour == b.colour).all() and a.seed != b.seed


def visible(scenes):
    "What can be seen of each scene, as bytes."
    hidden = ~scenes.present
    seen = [np.where(hidden, -1, a) for a in (scenes.shape, scenes.colour, scenes.large)]
    rows = np.concatenate([*seen, scenes.ground[:, None]], 1).astype(np.int8)
    return {row.tobytes() for row in rows}


def test_splits_share_no_scene():
    seen = {split: visible(draw_scenes(n, seed)) for split, (n, seed) in SPLITS.items()}
    sizes = {split: len(scenes) for split, scenes in seen.items()}
    assert sizes == {'web': 40_000, 'train': 16_000, 'val': 1_000, 'test': 1_000}   # nor one scene twice
    for a in seen:
        for b in seen: assert a == b or not seen[a] & seen[b]


@pytest.mark.parametrize('split', ['web', 'train', 'val', 'test'])
@pytest.mark.parametrize('text', ['long', 'short'])
def test_records_are_whole(split, text):
    records = scene_records(split, n=30, text=text)
    assert len(records) == 30 and records.images.shape == (30, 48, 48, 3) and records.images.dtype == np.uint8
    assert all((len(caption) == 1) == (text == 'short') for caption in records.captions)
    assert split in records.name and text in records.protocol and 'own' in records.protocol
    assert (records.short is None) == (split in ('web', 'train'))
    if records.short is None: return
    assert all(len(five) == 5 for five in records.short) and any(len(set(five)) > 1 for five in records.short)


def test_captions_belong_to_their_pictures():
    records, scenes = scene_records('val', n=60), draw_scenes(60, SPLITS['val'][1])
    assert (records.images == render(scenes)).all()
    for i in range(60):
        for sentence in [*records.captions[i], *records.short[i]]: check_sentence(scenes, i, sentence)


@pytest.mark.parametrize('wrong, message', [
    (dict(split='tset'), "no split 'tset'; did you mean test"),
    (dict(author='x'), "no author 'x'; known: other, own"),
    (dict(text='both'), "no text 'both'; known: long, short"),
])
def test_unknown_names(wrong, message):
    with pytest.raises(ValueError, match=message): scene_records(**wrong)
