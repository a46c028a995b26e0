"""The index on readers whose sight is known, the exchanges it rests on, and what it refuses to say."""

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from debias_clip.authors import scene_records
from debias_clip.captions import split_sentences
from debias_clip.families import SIGLIP
from debias_clip.models import create_model
from debias_clip.pairs import Normalize
from debias_clip.records import Records
from debias_clip.shortsight import by_place, exchanges, falls, shortsight, shortsight_difference
from debias_clip.tokens import get_tokenizer

TRANSFORM = Normalize((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))


class Reader(nn.Module):
    "Sums word vectors, weighed by position; an image is the number of a caption. `seed`: of the vectors."

    family = SIGLIP  # whose rows are read as they are

    def __init__(self, tok, captions, weight, seed=0, noise=0.0):
        super().__init__()
        self.context_length = tok.context_length
        self.vectors, self.pad, self.weight = (
            nn.Parameter(torch.randn(49408, 64, generator=torch.Generator().manual_seed(seed))),
            tok.pad,
            weight,
        )
        self.shown = torch.stack([self.vectors[tok.encode(" ".join(c))].sum(0) for c in captions]).detach()
        if noise:
            self.shown = torch.randn(self.shown.shape, generator=torch.Generator().manual_seed(1))

    def encode_image(self, images):
        return self.shown[images[:, 0, 0, 0].long()]

    def encode_text(self, rows, normalize=False):
        words = (rows != self.pad) & (rows < 49406)
        x = torch.einsum("nl,nld->nd", words * self.weight(torch.arange(rows.shape[1])), self.vectors[rows])
        return nn.functional.normalize(x, dim=-1) if normalize else x


@pytest.fixture(scope="module")
def tok():
    return get_tokenizer("scenes-clip", 88)


@pytest.fixture(scope="module")
def numbers():
    captions = [list(c) for c in scene_records("val", n=100).captions]
    return Records("numbers", np.arange(100, dtype=np.uint8).reshape(-1, 1, 1, 1).repeat(3, 3), captions)


def index(tok, records, weight, **more):
    return shortsight(falls(Reader(tok, records.captions, weight, **more), torch.from_numpy, tok, records)[0])


def expected(tok, records, weight, asked):
    "The index of a reader by its weights alone: a drop at a place is what the words there weigh, at unit length."
    a = b = 0
    for e in asked:
        ends = 1 + np.cumsum(
            [0, *(len(tok.encode(records.captions[e.sample][j])) for j in e.order)]
        )  # the start token is 0
        w = weight(torch.arange(tok.context_length)).double().numpy()
        there = [w[i:j].sum() / np.linalg.norm(w[1 : ends[-1]]) for i, j in zip(ends, ends[1:], strict=False)]
        a, b = a + np.mean(there * np.linspace(1, -1, len(there))), b + np.mean(there)
    return a / b


SIGHTS = {
    "even": lambda at: torch.ones(len(at)),
    **{n: lambda at, n=n: 0.5 ** (at / n) for n in (80, 40, 20, 10, 5)},
    "eight": lambda at: (at <= 8).float(),
    "end": lambda at: 2.0 ** (at / 10),
}


def test_known_sights_have_their_index(tok, numbers):
    found, asked = {name: index(tok, numbers, weight) for name, weight in SIGHTS.items()}, exchanges(tok, numbers)[0]
    for name, r in found.items():
        assert (
            r["low"] <= r["value"] <= r["high"] and abs(r["value"] - expected(tok, numbers, SIGHTS[name], asked)) < 0.03
        ), name
    decay = [found[n] for n in ("even", 80, 40, 20, 10, 5, "eight")]
    assert (
        all(a["high"] < b["low"] for a, b in zip(decay, decay[1:], strict=False))
        and abs(found["even"]["value"]) < 0.02
        and found["end"]["high"] < -0.4
    )


def test_content_is_no_place(tok, numbers):
    "For an even reader summaries say ten times as much: its index is zero, where Remove would call it short-sighted."
    first = {t for c in numbers.captions for t in tok.encode(c[0])} - {
        t for c in numbers.captions for s in c[1:] for t in tok.encode(s)
    }
    reader = Reader(tok, numbers.captions, lambda at: torch.ones(len(at)))
    with torch.no_grad():
        reader.vectors[sorted(first)] *= 10
    reader.shown = torch.stack([reader.vectors[tok.encode(" ".join(c))].sum(0) for c in numbers.captions]).detach()
    table, _ = falls(reader, torch.from_numpy, tok, numbers)
    by = {r["sentence"]: r["value"] for r in by_place(table, "sentence")}
    assert by[1] > 1.5 * by[2] and abs(shortsight(table)["value"]) < 0.03


def test_a_reader_of_nothing_has_no_index(tok, numbers):
    found = index(tok, numbers, lambda at: torch.ones(len(at)), noise=1.0)
    assert (
        found["value"] is found["low"] is found["high"] is None
        and "does not notice" in found["why"]
        and found["fall_low"] <= 0
    )


@pytest.mark.parametrize("backbone", ["scenes-clip", "scenes-siglip"])
def test_exchanges(backbone):
    world, tok = scene_records("val", n=60), get_tokenizer(backbone, 88)
    asked, why, share = exchanges(tok, world)
    everything = {s for c in world.captions for s in c}
    assert (
        len(asked) + 2 * sum(why.values()) == 120
        and 0 < share <= 100
        and len({e.sample for e in asked}) == len(asked) / 2
    )
    for e, back in zip(asked[::2], asked[1::2], strict=False):
        assert back.sample == e.sample and back.order == e.order[::-1]
        foils = [
            {
                j: (t.removeprefix(" ".join(true[:p])).removesuffix(" ".join(true[p + 1 :])).strip())
                for p, (j, t) in enumerate(zip(x.order, x.texts[1:], strict=False))
            }
            for x in (e, back)
            for true in [[world.captions[x.sample][j] for j in x.order]]
        ]
        assert foils[0] == foils[1]  # the same sentences are put in
    for e in asked:
        caption = list(world.captions[e.sample])
        true = [caption[j] for j in e.order]
        assert (
            sorted(e.order) == list(range(len(e.order)))
            and e.texts[0] == " ".join(true)
            and len(e.texts) == len(true) + 1
        )
        for p, text in enumerate(e.texts[1:]):
            before, after = " ".join(true[:p]), " ".join(true[p + 1 :])
            foil = text[len(before) : len(text) - len(after)].strip()
            assert text.startswith(before) and text.endswith(after) and foil in everything - set(caption)
            assert len(tok.encode(text)) <= tok.room
    again, other = exchanges(tok, world)[0], exchanges(tok, world, seed=1)[0]
    assert again == asked and [e.order for e in other] != [e.order for e in asked]
    firsts = np.array([e.order.index(0) / (len(e.order) - 1) for e in asked[::2]])
    assert 0.3 < firsts.mean() < 0.7  # the summary stands anywhere


def test_only_what_fits_is_asked():
    world, tok = scene_records("val", n=60), get_tokenizer("scenes-clip", 40)
    asked, why, share = exchanges(tok, world)
    assert share < 90 and all(len(tok.encode(t)) <= tok.room for e in asked for t in e.texts)
    for e in asked:
        caption, k = list(world.captions[e.sample]), len(e.order)
        assert len(tok.encode(" ".join(caption[:k]))) <= tok.room and (
            k == len(caption) or len(tok.encode(" ".join(caption[: k + 1]))) > tok.room
        )


def test_period_captions():
    world, tok = scene_records("val", n=20), get_tokenizer("scenes-clip", 88)
    period = Records(
        "period", world.images, [split_sentences(" ".join(c), "period") for c in world.captions], splitter="period"
    )
    for e in exchanges(tok, period)[0]:
        assert e.texts[0] == ". ".join(period.captions[e.sample][j] for j in e.order)


def test_a_sentence_to_put_in_is_as_long_as_can_be(tok):
    "Of as many tokens, else of fewer, else of more; what then no longer fits is not asked about."
    captions = [
        ["A red ring.", "It is blue."],
        ["A very small blue cross.", "Here.", "It is a red one."],
        ["One.", "Two three four five."],
    ]
    records = Records("few", np.zeros((3, 4, 4, 3), np.uint8), captions)
    asked, why, _ = exchanges(tok, records)
    length = lambda s: len(tok.encode(s))
    for e in asked:
        true = [captions[e.sample][j] for j in e.order]
        others = [s for i, c in enumerate(captions) if i != e.sample for s in c]
        for p, text in enumerate(e.texts[1:]):
            foil = text.removeprefix(" ".join(true[:p])).removesuffix(" ".join(true[p + 1 :])).strip()
            n = length(true[p])
            assert length(foil) == (
                max((length(s) for s in others if length(s) <= n), default=None) or min(length(s) for s in others)
            )
    assert not sum(why.values())
    narrow = get_tokenizer("scenes-clip", 10)  # eight words fit, which is what the first caption has
    assert exchanges(narrow, records)[1]["that an order or an exchange makes too long for the context"] == 0
    longer = Records(
        "longer", records.images[:2], [captions[0], ["A very small blue cross.", "A very large red cross."]]
    )
    assert exchanges(narrow, longer)[1] == {
        "of one sentence": 0,
        "of which the context holds fewer than two sentences": 1,
        "without a sentence to exchange": 0,
        "that an order or an exchange makes too long for the context": 1,
    }


def test_falls_are_those_of_a_loop(numbers, tok):
    "And the index and the curves of them are, caption by caption."
    few = Records("few", numbers.images[:12], [c[: 2 + i % 4] for i, c in enumerate(numbers.captions[:12])])
    reader = Reader(tok, few.captions, SIGHTS[20])
    table, said = falls(reader, torch.from_numpy, tok, few)
    text = lambda t: nn.functional.normalize(reader.encode_text(tok([t])), dim=-1)[0]
    rows, weighed, whole, place = [], {}, {}, {}
    for e in exchanges(tok, few)[0]:
        image = nn.functional.normalize(reader.shown[e.sample], dim=0)
        for p, j in enumerate(e.order):
            fall = (text(e.texts[0]) @ image - text(e.texts[p + 1]) @ image).item()
            rows.append((e.sample, len(e.order), p + 1, j + 1, fall))
            weighed.setdefault(e.sample, []).append(fall * (1 - 2 * p / (len(e.order) - 1)))
            whole.setdefault(e.sample, []).append(fall)
            place.setdefault((p + 1, e.sample), []).append(fall)
    assert [tuple(r) for r in table[["sample", "sentences", "place", "sentence"]].itertuples(index=False)] == [
        r[:4] for r in rows
    ] and np.allclose(table.fall, [r[4] for r in rows], atol=1e-6)
    found = shortsight(table)
    assert (
        np.isclose(found["value"], sum(map(np.mean, weighed.values())) / sum(map(np.mean, whole.values())))
        and found["n"] == len(whole)
        and np.isclose(found["fall"], np.mean([np.mean(v) for v in whole.values()]))
    )
    for r in by_place(table, least=3):
        there = {i: np.mean(v) for (p, i), v in place.items() if p == r["place"]}
        assert r["n"] == len(there) and np.isclose(
            r["value"], sum(there.values()) / sum(np.mean(whole[i]) for i in there)
        )


def table(*rows):
    return pd.DataFrame(
        [(i, len(r), p + 1, p + 1, f) for i, r in enumerate(rows) for p, f in enumerate(r)],
        columns=["sample", "sentences", "place", "sentence", "fall"],
    )


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0.01, 1), min_size=2, max_size=7), st.integers(2, 12))
def test_bounds_and_mirror(row, n):
    forth, back = (shortsight(table(*[r] * n), n_boot=20) for r in (row, row[::-1]))
    assert (
        -1 <= forth["value"] <= 1
        and np.isclose(forth["value"], -back["value"], atol=1e-9)
        and np.isclose(forth["low"], forth["value"])
    )
    assert np.isclose(
        shortsight(table(*[[5 * f for f in row]] * n), n_boot=20)["value"], forth["value"]
    )  # the height of cosines does not matter


def test_by_hand():
    even, first = table(*[[0.1] * 4] * 12), table(*[[0.4, 0, 0, 0]] * 12)
    assert np.isclose(shortsight(even)["value"], 0) and np.isclose(shortsight(first)["value"], 1)
    mixed = table(*[[0.1] * 2] * 6, *[[0.2, 0.0]] * 6)  # half of the captions even, half first only
    assert np.isclose(shortsight(mixed)["value"], 0.5) and shortsight(mixed)["low"] < 0.5 < shortsight(mixed)["high"]
    d = shortsight_difference(first, even)
    assert np.isclose(d["value"], 1) and d["n"] == 12 and np.isclose(d["low"], 1)
    assert [r["value"] for r in by_place(first)] == [4, 0, 0, 0]
    some = shortsight_difference(first[first["sample"] < 5], even[even["sample"] > 2])
    assert some["n"] == 2
    assert (
        "fewer than two captions in common"
        in shortsight_difference(first[first["sample"] < 2], even[even["sample"] > 2])["why"]
    )
    none = shortsight_difference(table(*[[0.0] * 4] * 5), even)
    assert none["value"] is None and "does not notice" in none["why"]
    assert all(r["value"] is r["low"] is None for r in by_place(table(*[[0.0, 0.0]] * 12)))


def test_models_of_other_contexts_are_compared_on_the_same_sentences(tok, numbers):
    "One reader has another index where it is asked about more sentences: that is no difference between models."

    def asked(n):
        tok = get_tokenizer("scenes-clip", n)
        return falls(Reader(tok, numbers.captions, SIGHTS[20]), torch.from_numpy, tok, numbers)[0]

    wide, narrow = asked(88), asked(36)
    assert shortsight(wide)["value"] - shortsight(narrow)["value"] > 0.05
    d, k = shortsight_difference(wide, narrow), [f.groupby("sample").sentences.first() for f in (wide, narrow)]
    same = (k[0].reindex(k[1].index) == k[1]).sum()
    assert abs(d["value"]) < 1e-5 and d["n"] == same > 2 and d["left_out"] == len(k[1]) - same > 20 and d["why"] is None
    short = shortsight_difference(table(*[[0.3, 0.2]] * 12), table(*[[0.3, 0.2, 0.1, 0, 0, 0, 0, 0]] * 12))
    assert (
        short["value"] is short["low"] is short["high"] is None
        and (short["n"], short["left_out"]) == (0, 12)
        and "12 with more or fewer" in short["why"]
    )


def test_foils_are_of_another_image(tok):
    "Where a table has several rows an image, what the other row says of it is no foreign sentence."
    own = [["A red ring.", "It is blue."], ["A red cross.", "It is grey."]]
    records = Records(
        "rows",
        ["a.png", "a.png", "b.png", "b.png"],
        own
        + [
            ["A green bar is here now.", "One white box is there."],
            ["Two black moons are up.", "They are all very small."],
        ],
    )
    asked, why, _ = exchanges(tok, records)
    for e in asked:
        kin = {s for i, c in enumerate(records.captions) if records.images[i] == records.images[e.sample] for s in c}
        true = [records.captions[e.sample][j] for j in e.order]
        foils = {
            t.removeprefix(" ".join(true[:p])).removesuffix(" ".join(true[p + 1 :])).strip()
            for p, t in enumerate(e.texts[1:])
        }
        assert not foils & kin
    assert len(asked) == 8
    alone = Records("one image", ["a.png"] * 2, own)
    assert exchanges(tok, alone)[1]["without a sentence to exchange"] == 2


def test_places_that_few_captions_have_are_left_out():
    found = table(*[[0.1] * 2] * 20, *[[0.1] * 5] * 3)
    assert [r["place"] for r in by_place(found)] == [1, 2] and len(by_place(found, least=3)) == 5


def test_errors(tok):
    world = scene_records("val", n=12)
    model = create_model("scenes-clip", context_length=88, keep=8)
    with pytest.raises(
        ValueError,
        match="0 of 12 captions can be asked, at least two are needed. Left out are 12 captions of one sentence",
    ):
        falls(model, TRANSFORM, tok, Records("one-liners", world.images, [list(c[:1]) for c in world.captions]))
    with pytest.raises(ValueError, match="captions of which the context holds fewer than two sentences"):
        falls(model, TRANSFORM, get_tokenizer("scenes-clip", 14), world)
    same = Records("same", world.images, [["A red ring.", "It is red."]] * 12)
    with pytest.raises(ValueError, match="12 captions without a sentence to exchange"):
        falls(model, TRANSFORM, tok, same)
    with pytest.raises(ValueError, match="3 image features for 12 records"):
        falls(model, TRANSFORM, tok, world, images=torch.zeros(3, 128))
