"""The index on readers whose sight is known, the exchanges it rests on, and what it refuses to say."""
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from debias_clip.captions import split_sentences
from debias_clip.families import SIGLIP
from debias_clip.models import create_model
from debias_clip.pairs import Normalize
from debias_clip.records import Records
from debias_clip.scenes import scene_records
from debias_clip.shortsight import REASONS, by_place, exchanges, falls, shortsight, shortsight_difference
from debias_clip.tokens import get_tokenizer

TRANSFORM = Normalize((.5, .5, .5), (.25, .25, .25))
ONE_SENTENCE, SHORT_CONTEXT, NO_FOIL, TOO_LONG = REASONS


class Reader(nn.Module):
    """Sums the vectors of words, weighed by position; an image is the number of a caption, all of whose words it shows.

    weight: from positions to weights; blind: whether images show anything else
    """
    family, transformer = SIGLIP, None

    def __init__(self, tok, captions, weight, blind=False):
        super().__init__()
        self.vectors = nn.Parameter(torch.randn(49408, 64, generator=torch.Generator().manual_seed(0)))
        self.context_length, self.pad, self.weight = tok.context_length, tok.pad, weight
        self.look_at(tok, captions)
        if blind: self.shown = torch.randn(self.shown.shape, generator=torch.Generator().manual_seed(1))

    def look_at(self, tok, captions):
        self.shown = torch.stack([self.vectors[tok.encode(" ".join(c))].sum(0) for c in captions]).detach()

    def encode_image(self, images): return self.shown[images[:, 0, 0, 0].long()]

    def encode_text(self, rows, normalize=False):
        weights = ((rows != self.pad) & (rows < 49406))*self.weight(torch.arange(rows.shape[1]))
        x = torch.einsum("nl,nld->nd", weights, self.vectors[rows])
        return nn.functional.normalize(x, dim=-1) if normalize else x


def decay(n): return lambda at: .5**(at/n)

SIGHTS = {"even": lambda at: torch.ones(len(at)), **{n: decay(n) for n in (80, 40, 20, 10, 5)}}
SIGHTS |= {"eight": lambda at: (at <= 8).float(), "end": lambda at: 2.**(at/10)}


@pytest.fixture(scope="module")
def tok(): return get_tokenizer("scenes-clip", 88)


@pytest.fixture(scope="module")
def numbers():
    captions = [list(c) for c in scene_records("val", n=100).captions]
    return Records("numbers", np.arange(100, dtype=np.uint8).reshape(-1, 1, 1, 1).repeat(3, 3), captions)


def falls_of(reader, tok, records): return falls(reader, torch.from_numpy, tok, records)[0]


def index(tok, records, weight, **more):
    return shortsight(falls_of(Reader(tok, records.captions, weight, **more), tok, records))


# Readers whose sight is known

def expected(tok, records, weight, asked):
    "The index by the weights alone: what falls at a place is what its words weigh, in a text feature of unit length."
    weighed = whole = 0
    w = weight(torch.arange(tok.context_length)).double().numpy()
    for e in asked:
        lengths = [len(tok.encode(records.captions[e.sample][j])) for j in e.order]
        ends = 1 + np.cumsum([0, *lengths])                             # the start token is 0
        there = [w[i:j].sum()/np.linalg.norm(w[1:ends[-1]]) for i, j in zip(ends, ends[1:], strict=False)]
        weighed += np.mean(there*np.linspace(1, -1, len(there)))
        whole += np.mean(there)
    return weighed/whole


def test_known_sights_have_their_index(tok, numbers):
    asked, of_sight = exchanges(tok, numbers)[0], {}
    for name, weight in SIGHTS.items():
        of_sight[name] = r = index(tok, numbers, weight)
        assert r["low"] <= r["value"] <= r["high"], name
        assert abs(r["value"] - expected(tok, numbers, weight, asked)) < .03, name
    shorter = [of_sight[n] for n in ("even", 80, 40, 20, 10, 5, "eight")]
    assert all(a["high"] < b["low"] for a, b in zip(shorter, shorter[1:], strict=False))
    assert abs(of_sight["even"]["value"]) < .02 and of_sight["end"]["high"] < -.4


def test_content_is_no_place(tok, numbers):
    "An even reader for whom summaries say ten times as much has an index of zero, where Remove calls it short-sighted."
    summaries = {t for c in numbers.captions for t in tok.encode(c[0])}
    details = {t for c in numbers.captions for s in c[1:] for t in tok.encode(s)}
    reader = Reader(tok, numbers.captions, SIGHTS["even"])
    with torch.no_grad(): reader.vectors[sorted(summaries - details)] *= 10
    reader.look_at(tok, numbers.captions)
    table = falls_of(reader, tok, numbers)
    by = {r["sentence"]: r["value"] for r in by_place(table, "sentence")}
    assert by[1] > 1.5*by[2] and abs(shortsight(table)["value"]) < .03


def test_a_reader_of_nothing_has_no_index(tok, numbers):
    r = index(tok, numbers, SIGHTS["even"], blind=True)
    assert r["value"] is r["low"] is r["high"] is None and "does not notice" in r["why"] and r["fall_low"] <= 0


def test_models_of_other_contexts_are_compared_on_the_same_sentences(tok, numbers):
    "One reader has another index where it is asked about more sentences: that is no difference between models."
    toks = [get_tokenizer("scenes-clip", n) for n in (88, 36)]
    wide, narrow = (falls_of(Reader(t, numbers.captions, SIGHTS[20]), t, numbers) for t in toks)
    assert shortsight(wide)["value"] - shortsight(narrow)["value"] > .05
    in_wide, in_narrow = (t.groupby("sample").sentences.first() for t in (wide, narrow))
    same = (in_wide.reindex(in_narrow.index) == in_narrow).sum()
    d = shortsight_difference(wide, narrow)
    assert abs(d["value"]) < 1e-5 and d["why"] is None
    assert d["n"] == same > 2 and d["left_out"] == len(in_narrow) - same > 20


# The exchanges

def foils_of(records, exchange):
    "What was put in, by number of sentence; checks that nothing else was changed."
    true = [records.captions[exchange.sample][j] for j in exchange.order]
    assert exchange.texts[0] == " ".join(true) and len(exchange.texts) == len(true) + 1
    foils = {}
    for p, (j, text) in enumerate(zip(exchange.order, exchange.texts[1:], strict=True)):
        before, after = " ".join(true[:p]), " ".join(true[p + 1:])
        assert text.startswith(before) and text.endswith(after)
        foils[j] = text[len(before):len(text) - len(after)].strip()
    return foils


@pytest.mark.parametrize("backbone", ["scenes-clip", "scenes-siglip"])
def test_exchanges(backbone):
    world, tok = scene_records("val", n=60), get_tokenizer(backbone, 88)
    asked, left_out, share = exchanges(tok, world)
    everything = {s for c in world.captions for s in c}
    assert len(asked) + 2*sum(left_out.values()) == 120 and 0 < share <= 100
    assert len({e.sample for e in asked}) == len(asked)/2
    for e, back in zip(asked[::2], asked[1::2], strict=True):
        assert back.sample == e.sample and back.order == e.order[::-1]
        assert foils_of(world, e) == foils_of(world, back)               # the same sentences are put in
        assert sorted(e.order) == list(range(len(e.order)))
        assert set(foils_of(world, e).values()) <= everything - set(world.captions[e.sample])
    assert all(len(tok.encode(text)) <= tok.room for e in asked for text in e.texts)
    firsts = [e.order.index(0)/(len(e.order) - 1) for e in asked[::2]]
    assert .3 < np.mean(firsts) < .7                                     # the summary stands anywhere
    other = exchanges(tok, world, seed=1)[0]
    assert exchanges(tok, world)[0] == asked and [e.order for e in other] != [e.order for e in asked]


def test_only_what_fits_is_asked():
    world, tok = scene_records("val", n=60), get_tokenizer("scenes-clip", 40)
    def fits(sentences): return len(tok.encode(" ".join(sentences))) <= tok.room
    asked, _, share = exchanges(tok, world)
    assert share < 90 and all(fits([t]) for e in asked for t in e.texts)
    for e in asked:
        caption, k = list(world.captions[e.sample]), len(e.order)
        assert fits(caption[:k]) and (k == len(caption) or not fits(caption[:k + 1]))


def test_period_captions(tok):
    world = scene_records("val", n=20)
    captions = [split_sentences(" ".join(c), "period") for c in world.captions]
    period = Records("period", world.images, captions, splitter="period")
    for e in exchanges(tok, period)[0]: assert e.texts[0] == ". ".join(captions[e.sample][j] for j in e.order)


def records_of(captions, images=None):
    return Records("few", np.zeros((len(captions), 4, 4, 3), np.uint8) if images is None else images, captions)


def test_a_sentence_to_put_in_is_as_long_as_can_be(tok):
    "Of as many tokens, else of fewer, else of more."
    captions = [["A red ring.", "It is blue."], ["A very small blue cross.", "Here.", "It is a red one."]]
    captions.append(["One.", "Two three four five."])
    few = records_of(captions)
    asked, left_out, _ = exchanges(tok, few)
    def length(sentence): return len(tok.encode(sentence))
    for e in asked:
        others = [length(s) for i, c in enumerate(captions) if i != e.sample for s in c]
        for j, foil in foils_of(few, e).items():
            shorter = [n for n in others if n <= length(captions[e.sample][j])]
            assert length(foil) == (max(shorter) if shorter else min(others))
    assert not sum(left_out.values())


def test_what_an_exchange_makes_too_long_is_not_asked():
    tok = get_tokenizer("scenes-clip", 10)                               # eight words fit, as the first caption has
    first = ["A red ring.", "It is blue."]
    longer = records_of([first, ["A very small blue cross.", "A very large red cross."]])
    assert exchanges(tok, longer)[1] == {ONE_SENTENCE: 0, SHORT_CONTEXT: 1, NO_FOIL: 0, TOO_LONG: 1}


def test_foils_are_of_another_image(tok):
    "Where a table has several rows an image, what the other row says of it is no foreign sentence."
    own = [["A red ring.", "It is blue."], ["A red cross.", "It is grey."]]
    foreign = [["A green bar is here now.", "One white box is there."], ["Two black moons are up.", "All are small."]]
    records = records_of(own + foreign, ["a.png", "a.png", "b.png", "b.png"])
    asked, _, _ = exchanges(tok, records)
    assert len(asked) == 8
    for e in asked:
        kin = {s for c in (own if e.sample < 2 else foreign) for s in c}
        assert not set(foils_of(records, e).values()) & kin
    assert exchanges(tok, records_of(own, ["a.png", "a.png"]))[1][NO_FOIL] == 2


# The arithmetic

def test_falls_and_index_are_those_of_a_loop(numbers, tok):
    captions = [c[:2 + i % 4] for i, c in enumerate(numbers.captions[:12])]
    few = Records("few", numbers.images[:12], captions)
    reader, rows = Reader(tok, captions, SIGHTS[20]), []
    def cosine(text, sample):
        text, image = reader.encode_text(tok([text])), reader.shown[[sample]]
        return nn.functional.cosine_similarity(text, image).item()
    for e in exchanges(tok, few)[0]:
        for p, j in enumerate(e.order):
            fall = cosine(e.texts[0], e.sample) - cosine(e.texts[p + 1], e.sample)
            rows.append((e.sample, len(e.order), p + 1, j + 1, fall))
    table = falls_of(reader, tok, few)
    assert [r[:4] for r in table.itertuples(index=False, name=None)] == [r[:4] for r in rows]
    assert np.allclose(table.fall, [r[4] for r in rows], atol=1e-6)
    weighed, whole, there = {}, {}, {}
    for sample, n, place, _, fall in rows:
        weighed.setdefault(sample, []).append(fall*(1 - 2*(place - 1)/(n - 1)))
        whole.setdefault(sample, []).append(fall)
        there.setdefault(place, {}).setdefault(sample, []).append(fall)
    r = shortsight(table)
    assert np.isclose(r["value"], sum(map(np.mean, weighed.values()))/sum(map(np.mean, whole.values())))
    assert r["n"] == len(whole) and np.isclose(r["fall"], np.mean([np.mean(v) for v in whole.values()]))
    for r in by_place(table, least=3):
        here = there[r["place"]]
        want = sum(map(np.mean, here.values()))/sum(np.mean(whole[i]) for i in here)
        assert r["n"] == len(here) and np.isclose(r["value"], want)


def table(*rows):
    "Falls of captions, given place by place."
    cells = [(i, len(row), p, p, fall) for i, row in enumerate(rows) for p, fall in enumerate(row, 1)]
    return pd.DataFrame(cells, columns=["sample", "sentences", "place", "sentence", "fall"])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(.01, 1), min_size=2, max_size=7), st.integers(2, 12))
def test_bounds_and_mirror(row, n):
    forth, back = (shortsight(table(*[r]*n)) for r in (row, row[::-1]))
    assert -1 <= forth["value"] <= 1 and np.isclose(forth["value"], -back["value"], atol=1e-9)
    assert np.isclose(forth["low"], forth["value"])
    higher = shortsight(table(*[[5*fall for fall in row]]*n))            # the height of cosines does not matter
    assert np.isclose(higher["value"], forth["value"])


def test_index_by_hand():
    even, first = table(*[[.1]*4]*12), table(*[[.4, 0, 0, 0]]*12)
    assert np.isclose(shortsight(even)["value"], 0) and np.isclose(shortsight(first)["value"], 1)
    mixed = shortsight(table(*[[.1]*2]*6, *[[.2, 0.]]*6))                # half of the captions even, half first only
    assert np.isclose(mixed["value"], .5) and mixed["low"] < .5 < mixed["high"]
    assert [r["value"] for r in by_place(first)] == [4, 0, 0, 0]
    assert all(r["value"] is r["low"] is None for r in by_place(table(*[[0., 0.]]*12)))


def test_differences_by_hand():
    even, first = table(*[[.1]*4]*12), table(*[[.4, 0, 0, 0]]*12)
    d = shortsight_difference(first, even)
    assert np.isclose(d["value"], 1) and d["n"] == 12 and np.isclose(d["low"], 1)
    assert shortsight_difference(first[first["sample"] < 5], even[even["sample"] > 2])["n"] == 2
    apart = shortsight_difference(first[first["sample"] < 2], even[even["sample"] > 2])
    assert "fewer than two captions in common" in apart["why"]
    nothing = shortsight_difference(table(*[[0.]*4]*5), even)
    assert nothing["value"] is None and "for the one model" in nothing["why"] and "does not notice" in nothing["why"]
    other = shortsight_difference(table(*[[.3, .2]]*12), table(*[[.3, .2, .1, 0, 0, 0, 0, 0]]*12))
    assert other["value"] is other["low"] is other["high"] is None and (other["n"], other["left_out"]) == (0, 12)
    assert "12 with more or fewer" in other["why"]


def test_places_that_few_captions_have_are_left_out():
    falls = table(*[[.1]*2]*20, *[[.1]*5]*3)
    assert [r["place"] for r in by_place(falls)] == [1, 2] and len(by_place(falls, least=3)) == 5


def test_errors(tok):
    world = scene_records("val", n=12)
    model = create_model("scenes-clip", context_length=88, keep=8)
    def ask(captions, tok=tok, **more):
        return falls(model, TRANSFORM, tok, Records("some", world.images, captions), **more)
    with pytest.raises(ValueError, match=f"0 of 12 captions can be asked.*Left out are 12 captions {ONE_SENTENCE}"):
        ask([list(c[:1]) for c in world.captions])
    with pytest.raises(ValueError, match=f"captions {SHORT_CONTEXT}"):
        ask(world.captions, get_tokenizer("scenes-clip", 14))
    with pytest.raises(ValueError, match=f"12 captions {NO_FOIL}"): ask([["A red ring.", "It is red."]]*12)
    with pytest.raises(ValueError, match="3 image features for 12 records"):
        ask(world.captions, images=torch.zeros(3, 128))
