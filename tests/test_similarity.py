"""Cosines are those of the texts they name; shares, growth and slopes by hand."""
import numpy as np
import pandas as pd
import pytest
import torch

from debias_clip import retrieval
from debias_clip.authors import scene_records
from debias_clip.captions import split_sentences
from debias_clip.models import create_model
from debias_clip.pairs import Normalize
from debias_clip.records import Records
from debias_clip.retrieval import encode_captions, encode_images
from debias_clip.similarity import PAPER_COSINE, added, alone, by_length, cosines, first_and_whole, growth, slope
from debias_clip.tokens import get_tokenizer

pytestmark = pytest.mark.filterwarnings("error::UserWarning")
TRANSFORM = Normalize((.5, .5, .5), (.25, .25, .25))


def small_tower(backbone, context_length):
    torch.manual_seed(0)
    return create_model(backbone, context_length=context_length).eval(), get_tokenizer(backbone, context_length)


@pytest.fixture(scope="module", params=["scenes-clip", "scenes-siglip"])
def backbone(request): return request.param


@pytest.fixture(scope="module")
def tower(backbone): return small_tower(backbone, 88)


@pytest.fixture(scope="module")
def short_tower(backbone): return small_tower(backbone, 28)


@pytest.fixture(scope="module")
def world():
    records = scene_records("val", n=24)
    return Records("mixed", records.images, [list(c[:1 + i % 5]) for i, c in enumerate(records.captions)])


@pytest.fixture(scope="module")
def table(tower, world): return cosines(tower[0], TRANSFORM, tower[1], world)


def texts_of(caption, joiner=" "):
    yield "whole caption", 0, joiner.join(caption)
    for j, s in enumerate(caption, 1):
        yield "sentence", j, s
        yield "first sentences", j, joiner.join(caption[:j])
        if len(caption) > 1: yield "without sentence", j, joiner.join(caption[:j - 1] + caption[j:])


def whole_captions(table): return table[table.what == "whole caption"]


# The cosines

def test_every_cosine_is_of_its_text(tower, world, table):
    model, tok = tower
    want = [(i, *t) for i, c in enumerate(world.captions) for t in texts_of(c)]
    names = table[["sample", "what", "sentence"]]
    assert [tuple(r) for r in names.itertuples(index=False)] == [w[:3] for w in want]
    score = encode_captions(model, tok, [w[3] for w in want]) @ encode_images(model, world, TRANSFORM).T
    own = np.array([score[k, w[0]] for k, w in enumerate(want)])
    assert np.abs(table.cosine - own).max() < 1e-5
    assert np.abs(table.others - (score.sum(1).numpy() - own)/23).max() < 1e-5
    assert table.tokens.tolist() == [len(tok.encode(w[3])) for w in want] and not table.cut.any()
    assert table.sentences.tolist() == [len(world.captions[w[0]]) for w in want]


def test_every_text_is_tokenised_and_encoded_once(tower, world, monkeypatch):
    model, tok = tower
    read, encoded, encode = [], [], retrieval.encode_texts
    class Counting:
        def __getattr__(self, name): return getattr(tok, name)
        def encode(self, text):
            read.append(text)
            return tok.encode(text)
    def counting(model, rows, **more):
        encoded.extend(map(tuple, rows.tolist()))
        return encode(model, rows, **more)
    monkeypatch.setattr(retrieval, "encode_texts", counting)
    cosines(model, TRANSFORM, Counting(), world, torch.zeros(24, 128))
    assert sorted(read) == sorted({w[2] for c in world.captions for w in texts_of(c)})
    assert len(set(encoded)) == len(encoded) == len({tuple(tok.encode(t)) for t in read})


def test_period_captions_keep_their_full_stops(tower, world):
    model, tok = tower
    captions = [split_sentences(" ".join(c), "period") for c in world.captions]
    got = cosines(model, TRANSFORM, tok, Records("mixed", world.images, captions, splitter="period"))
    assert got.tokens.tolist() == [len(tok.encode(t)) for c in captions for _, _, t in texts_of(c, ". ")]


# Captions that the context cuts

def test_captions_longer_than_the_context_are_marked(short_tower, world):
    model, tok = short_tower
    got = cosines(model, TRANSFORM, tok, world)
    whole, first = whole_captions(got), got[(got.what == "sentence") & (got.sentence == 1)]
    assert whole.cut.tolist() == [len(tok.encode(" ".join(c))) > tok.room for c in world.captions]
    assert whole.cut.any() and got.tokens.max() == tok.room
    assert sum(r["cut"] for r in by_length(got)) == whole.cut.sum()
    assert [r["cut"] for r in first_and_whole(got)] == [first.cut.sum(), whole.cut.sum(), whole.cut.sum()]
    assert {r["cut"] for r in growth(got) + added(got) + alone(got) + [slope(got)]} == {whole.cut.sum()}
    assert growth(got)[0]["n"] + growth(got)[0]["left_out"] == 24 == added(got)[0]["n"] + added(got)[0]["left_out"]


MEASURES = [growth, lambda table: added(table, 3), lambda table: alone(table, 3), lambda table: [slope(table)]]

@pytest.mark.parametrize("measure", MEASURES)
def test_captions_that_are_cut_change_nothing_of_the_others(short_tower, world, measure):
    "What is told of sentences and of length is what the captions that fit tell by themselves."
    model, tok = short_tower
    fit = [i for i, c in enumerate(world.captions) if len(tok.encode(" ".join(c))) <= tok.room]
    assert 2 < len(fit) < 20 and any(len(world.captions[i]) > 1 for i in fit)
    only = Records("fit", world.images[fit], [world.captions[i] for i in fit])
    of_all, of_fit = (measure(cosines(model, TRANSFORM, tok, records)) for records in (world, only))
    for a, b in zip(of_all, of_fit, strict=True):
        assert a["n"] == b["n"] and a["left_out"] - b["left_out"] == a["cut"] == 24 - len(fit) and b["cut"] == 0
        numbers = [k for k in ("value", "low", "high", "share", "words", "tokens") if a.get(k) is not None]
        assert all(np.isclose(a[k], b[k], atol=1e-6) for k in numbers)


def made(*captions, room=10**6):
    """The table of captions given as lists of (words, what a sentence adds).

    A reader who sees the first `room` words has of each text the share that it sees.
    """
    rows = []
    for i, caption in enumerate(captions):
        parts = [("whole caption", 0, caption)]
        for j in range(1, len(caption) + 1):
            parts += [("sentence", j, caption[j - 1:j]), ("first sentences", j, caption[:j])]
            if len(caption) > 1: parts.append(("without sentence", j, caption[:j - 1] + caption[j:]))
        for what, j, part in parts:
            words = sum(w for w, _ in part)
            seen = min(words, room)
            rows.append((i, len(caption), what, j, seen, words > room, sum(a for _, a in part)*seen/words))
    columns = ["sample", "sentences", "what", "sentence", "tokens", "cut", "cosine"]
    return pd.DataFrame(rows, columns=columns).assign(others=0.)


def even(*words): return [(w, .01*w) for w in words]


def test_what_is_cut_is_not_taken_for_short_sight():
    "An even reader of captions of which half are cut is even."
    table = made(*[even(*[5]*4)]*10, *[even(4, 4)]*10, *[even(*[5]*12)]*20, room=30)
    rows = added(table)
    counts = [(r["place"], r["n"], r["left_out"], r["cut"]) for r in rows]
    assert counts == [(1, 20, 20, 20), (2, 20, 20, 20), (3, 10, 20, 20), (4, 10, 20, 20)]
    assert np.allclose([r["value"] for r in rows], [.045, .045, .05, .05])
    assert np.allclose([r["value"] for r in growth(table)], [.05, .1, .15, .2])
    assert all(np.isclose(r["share"], r["words"]) for r in rows)
    assert np.isclose(slope(table)["value"], .1) and (slope(table)["n"], slope(table)["left_out"]) == (20, 20)


def test_where_no_caption_fits_nothing_is_told():
    table = made(*[even(*[5]*12)]*20, room=30)
    assert growth(table) == [] and slope(table)["value"] is None and slope(table)["n"] == 0
    assert slope(table)["why"] == "no caption fits the context whole (20 do not fit)"
    for ask in (added, alone):
        with pytest.raises(ValueError, match=r"no caption of two sentences fits the context whole \(20 of 20"):
            ask(table)
    assert [(r["n"], r["cut"], r["shortest"], r["longest"]) for r in by_length(table)] == [(20, 20, 30, 30)]


# First sentence and whole

def test_first_and_whole(table):
    rows = {r["text"]: r for r in first_and_whole(table)}
    assert list(rows) == ["first sentence", "whole caption", "whole − first"]
    assert all(r["n"] == 24 and r["low"] <= r["value"] <= r["high"] for r in rows.values())
    first = table[(table.what == "sentence") & (table.sentence == 1)].cosine.to_numpy()
    gain = whole_captions(table).cosine.to_numpy() - first
    last = rows["whole − first"]
    assert np.allclose(last["scores"], gain) and np.isclose(last["value"], gain.mean())
    again = first_and_whole(table.sample(frac=1, random_state=0))
    assert np.allclose(again[2]["scores"], gain)                        # whatever the order of the rows
    assert set(PAPER_COSINE) == {("Long-CLIP recipe", text) for text in ("first sentence", "whole caption")}


# What each sentence is worth

def test_added_by_hand():
    rows = added(made([(10, .3), (30, .1)], [(20, .1), (20, .1)], [(5, .2)]), least=1)
    assert [(r["place"], r["last"], r["left_out"], r["n"]) for r in rows] == [(1, False, 1, 2), (2, False, 1, 2)]
    assert np.allclose([r["value"] for r in rows], [.2, .1])
    assert np.allclose([r["share"] for r in rows], [100*.4/.6, 100*.2/.6])
    assert np.allclose([r["words"] for r in rows], [37.5, 62.5])
    assert all(r["share_low"] <= r["share"] <= r["share_high"] for r in rows)


def test_added_is_that_of_a_loop():
    g, places = np.random.default_rng(0), {}
    lengths = [1 + int(g.integers(7)) for _ in range(60)]
    captions = [[(int(g.integers(1, 20)), float(g.normal(.1, .05))) for _ in range(n)] for n in lengths]
    several = [c for c in captions if len(c) > 1]
    last = max(p for p in range(1, 8) if sum(len(c) >= p for c in several) >= 15)
    for c in several:
        for p in range(1, min(len(c), last) + 1):
            places.setdefault(p, []).append(c[p - 1:] if p == last else c[p - 1:p])
    words, adds = (sum(x[k] for c in several for x in c) for k in (0, 1))
    rows = added(made(*captions), least=15)
    assert [r["place"] for r in rows] == sorted(places) and rows[-1]["last"]
    for r in rows:
        here = places[r["place"]]
        assert r["n"] == len(here) and r["left_out"] == 60 - len(several)
        assert np.isclose(r["value"], np.mean([np.mean([a for _, a in x]) for x in here]))
        assert np.isclose(r["share"], 100*sum(a for x in here for _, a in x)/adds)
        assert np.isclose(r["words"], 100*sum(w for x in here for w, _ in x)/words)


def test_late_places_are_joined():
    rows = added(made(*[[(10, .1)]*6]*3, *[[(10, .1)]*2]*20), least=10)
    assert [(r["place"], r["last"]) for r in rows] == [(1, False), (2, True)]
    assert np.isclose(sum(r["share"] for r in rows), 100) and np.isclose(sum(r["words"] for r in rows), 100)
    assert np.isclose(rows[1]["share"], 100*(15 + 20)/58)


@pytest.mark.parametrize("adds", [0., -.1])
def test_a_share_of_nothing_is_none(adds):
    rows = added(made(*[[(10, adds)]*3]*12))
    assert all(r["share"] is r["share_low"] is r["share_high"] is None for r in rows)
    assert np.allclose([r["value"] for r in rows], adds)


def test_a_share_of_noise_is_none():
    noise = np.random.default_rng(0).normal(0, 1, (40, 2))
    assert added(made(*[[(10, a), (10, b)] for a, b in noise]))[0]["share"] is None


def test_alone_is_of_the_captions_and_places_of_added(table):
    rows, beside = alone(table, 5), added(table, 5)
    same = ("place", "last", "n", "left_out", "cut")
    assert [[r[k] for k in same] for r in rows] == [[r[k] for k in same] for r in beside] and rows[-1]["last"]
    each = table[(table.what == "sentence") & (table.sentences > 1)]
    for r in rows:
        here = each[each.sentence >= r["place"]] if r["last"] else each[each.sentence == r["place"]]
        means = here.groupby("sample")[["cosine", "others"]].mean().mean()
        assert np.isclose(r["value"], means.cosine) and np.isclose(r["others"], means.others)
        assert np.isclose(r["margin"], r["value"] - r["others"]) and r["low"] <= r["value"] <= r["high"]


# Length

def test_growth_is_of_the_same_captions(table):
    rows, lengths = growth(table), whole_captions(table).sentences
    k = rows[-1]["sentence"]
    assert (lengths >= k).sum() >= 8 and (lengths >= k + 1).sum() < 8       # a third of 24
    assert [r["sentence"] for r in rows] == list(range(1, k + 1)) and {r["n"] for r in rows} == {(lengths >= k).sum()}
    assert {(r["left_out"], r["cut"]) for r in rows} == {((lengths < k).sum(), 0)}
    few = table[table["sample"].isin([0, 1, 4])]    # one, two, five sentences: a third has five, but one is too few
    assert [(r["sentence"], r["n"]) for r in growth(few)] == [(1, 2), (2, 2)]
    assert [r["n"] for r in growth(table[table["sample"] == 1])] == [1, 1]


def test_by_length(table):
    rows = by_length(table, 5)
    assert sum(r["n"] for r in rows) == 24
    assert all(a["longest"] <= b["shortest"] for a, b in zip(rows, rows[1:], strict=False))
    assert len(by_length(table[table["sample"] < 3], 5)) == 3
    first = whole_captions(table).sort_values(["tokens", "sample"]).iloc[:rows[0]["n"]]
    assert np.isclose(rows[0]["margin"], (first.cosine - first.others).mean())
    assert np.isclose(rows[0]["margin"], rows[0]["value"] - rows[0]["others"])
    assert rows[0]["margin_low"] < rows[0]["margin"] < rows[0]["margin_high"]


LENGTHS = [[7]*24, [3]*20 + [9]*4, [3] + [26]*23, list(range(24)), [5]*7 + [6]*7 + [8]*10]

@pytest.mark.parametrize("tokens", LENGTHS)
def test_groups_of_length_are_told_apart(table, tokens):
    "Of distinct lengths, each caption in one, however many are of one length or cut to it."
    rows = by_length(whole_captions(table).assign(tokens=tokens))
    groups = [range(r["shortest"], r["longest"] + 1) for r in rows]
    assert 1 <= len(rows) <= min(4, len(set(tokens))) and all(sum(t in g for g in groups) == 1 for t in tokens)
    assert [r["n"] for r in rows] == [sum(t in g for t in tokens) for g in groups]
    if len(set(tokens)) == 24: assert [r["n"] for r in rows] == [6]*4


def test_slope():
    line = slope(made(*[[(n, .001*n)] for n in range(10, 60)]))
    assert np.allclose([line[k] for k in ("value", "low", "high")], .01)
    why = "all captions that fit the context are of one length"
    assert slope(made(*[[(10, .1)]]*5)) == dict(value=None, low=None, high=None, n=5, left_out=0, cut=0, why=why)
    g = np.random.default_rng(2)
    some = [(int(n), float(c)) for n, c in g.normal((40, .3), (12, .1), (80, 2)) if n >= 1]
    assert np.isclose(slope(made(*[[x] for x in some]))["value"], 10*np.polyfit(*zip(*some, strict=True), 1)[0])
    noise = slope(made(*[[(n + 1, x)] for n, x in enumerate(g.normal(size=100))]))
    assert noise["low"] < 0 < noise["high"]


def test_errors(tower, world):
    model, tok = tower
    with pytest.raises(ValueError, match="3 image features for 24 records"):
        cosines(model, TRANSFORM, tok, world, torch.zeros(3, 128))
    with pytest.raises(ValueError, match="no caption has two sentences"): added(made([(10, .1)], [(5, .1)]))
    lone = cosines(model, TRANSFORM, tok, Records("one", world.images[:1], world.captions[:1]))
    assert lone.others.isna().all()
