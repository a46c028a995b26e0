"""Orders of sentences and pushed captions on a model of random weights: what is compared with what, not how well."""
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from debias_clip import order, retrieval
from debias_clip.authors import scene_records
from debias_clip.captions import permute, split_sentences
from debias_clip.models import create_model
from debias_clip.order import (
    drops,
    leave_out,
    order_matrix,
    order_ranks,
    place_summary,
    push_ranks,
    shuffle_hits,
    shuffled,
)
from debias_clip.pairs import Normalize
from debias_clip.records import Records
from debias_clip.retrieval import encode_captions, encode_images, ranks
from debias_clip.tokens import get_tokenizer

TRANSFORM, FILLER = Normalize((.5, .5, .5), (.25, .25, .25)), "This is a photo."
sentences = st.lists(st.text(min_size=1, max_size=4), min_size=1, max_size=9)


def small_tower(backbone, context_length):
    torch.manual_seed(0)
    model = create_model(backbone, context_length=context_length, keep=8).eval()
    return model, get_tokenizer(backbone, context_length)


@pytest.fixture(scope="module", params=["scenes-clip", "scenes-siglip"])
def tower(request): return small_tower(request.param, 88)


@pytest.fixture(scope="module")
def world():
    "Forty scenes with captions of 1 to 6 sentences."
    records = scene_records("val", n=40)
    return Records("mixed", records.images, [list(c[:1 + i % 6]) for i, c in enumerate(records.captions)])


@pytest.fixture
def seen(monkeypatch):
    "What is encoded: image arrays, and (texts, pads before them), in the order of the calls."
    seen = dict(images=[], texts=[])
    encode, rank = retrieval.encode_images, order.ranks_of_texts
    def watch_images(model, records, *args, **more):
        seen["images"].append(records.images)
        return encode(model, records, *args, **more)
    def watch_texts(model, tok, images, texts, n_pre=None):
        seen["texts"].append((texts, n_pre))
        return rank(model, tok, images, texts, n_pre)
    monkeypatch.setattr(retrieval, "encode_images", watch_images)
    monkeypatch.setattr(order, "ranks_of_texts", watch_texts)
    return seen


def equal(a, b): return all((a[d] == b[d]).all() for d in ("t2i", "i2t"))

def of_length(records, least): return [i for i, c in enumerate(records.captions) if len(c) >= least]


# The paper's orders

ORDERS = [
    (("full", "move", "remove", "first"), 4),
    (("full", "remove"), 2),
    (("full", "first"), 1),
    (("swap2", "first2"), 2),
]

@pytest.mark.parametrize("orders, least", ORDERS)
def test_every_order_is_of_the_same_captions(tower, world, seen, orders, least):
    by_order, left_out = order_ranks(tower[0], TRANSFORM, tower[1], world, orders)
    index = of_length(world, least)
    assert left_out == 40 - len(index) and list(by_order) == list(orders)
    assert len(seen["images"]) == 1 and (seen["images"][0] == world.images[index]).all()
    want = [[" ".join(permute(world.captions[i], o)) for i in index] for o in orders]
    assert [texts for texts, _ in seen["texts"]] == want
    assert all(len(r[d]) == len(index) for r in by_order.values() for d in ("t2i", "i2t"))


def test_full_is_the_whole_caption(tower, world):
    model, tok = tower
    by_order, _ = order_ranks(model, TRANSFORM, tok, world)
    index = of_length(world, 4)
    texts = encode_captions(model, tok, [" ".join(world.captions[i]) for i in index])
    whole = ranks(encode_images(model, world, TRANSFORM)[index], texts, range(len(index)))
    assert equal(by_order["full"], whole) and not equal(by_order["full"], by_order["first"])


def test_cut_captions_are_counted(tower, world):
    model, tok = small_tower(tower[0].backbone, 30)
    tok.truncated = 7                                                   # of an earlier text
    by_order, left_out = order_ranks(model, TRANSFORM, tok, world)
    captions = [world.captions[i] for i in of_length(world, 4)]
    cut = {o: sum(len(tok.encode(" ".join(permute(c, o)))) > tok.room for c in captions) for o in by_order}
    assert {o: r["truncated"] for o, r in by_order.items()} == cut and cut["full"] > cut["first"]
    assert drops(by_order, left_out=left_out).truncated.tolist() == [*cut.values()]*2
    unknown = {o: {d: r[d] for d in ("t2i", "i2t")} for o, r in by_order.items()}
    assert drops(unknown).truncated.isna().all()                        # not known is not 0


def test_images_may_be_encoded_before(tower, world, seen):
    model, tok = tower
    images = encode_images(model, world, TRANSFORM)
    by_order, _ = order_ranks(model, TRANSFORM, tok, world, images=images)
    index = of_length(world, 4)
    texts = encode_captions(model, tok, [" ".join(world.captions[i]) for i in index])
    assert equal(by_order["full"], ranks(images[index], texts, range(len(index))))
    push_ranks(model, TRANSFORM, tok, world, images=images)
    order_matrix(model, TRANSFORM, tok, world, images=images)
    assert not seen["images"]
    for measure in (order_ranks, push_ranks, order_matrix):
        with pytest.raises(ValueError, match="39 image features for 40 records"):
            measure(model, TRANSFORM, tok, world, images=images[1:])


def test_period_captions_keep_their_full_stops(tower, world, seen):
    model, tok = tower
    captions = [split_sentences(" ".join(c), "period") for c in world.captions]
    period = Records("mixed", world.images, captions, splitter="period")
    order_ranks(model, TRANSFORM, tok, period, ("full", "move"))
    push_ranks(model, TRANSFORM, tok, period, (0, 1))
    full, move, first, _, pushed, _ = [texts for texts, _ in seen["texts"]]
    long = [c for c in world.captions if len(c) >= 4]
    assert full == [" ".join(c) for c in long]
    assert all(text.count(".") == len(c) for text, c in zip(move, long, strict=True))
    assert first[0] == ". ".join(next(c for c in captions if len(c) > 1)[:2]) and pushed[0] == f"{FILLER} {first[0]}"


# What is lost

def test_drops_by_hand():
    zero, worse = torch.zeros(8, dtype=torch.int64), torch.tensor([0, 0, 0, 0, 1, 1, 5, 5])
    by_order = {"full": dict(t2i=zero, i2t=worse), "move": dict(t2i=worse, i2t=zero), "same": dict(t2i=zero, i2t=worse)}
    table = drops(by_order, left_out=3).set_index(["direction", "variant"])
    columns = ["recall", "low", "high", "drop", "drop_low", "drop_high", "n", "left_out", "truncated"]
    assert list(table.columns) == columns and list(table.index) == [(d, o) for d in ("t2i", "i2t") for o in by_order]
    assert table.recall.tolist() == [100, 50, 100, 50, 100, 50] and table["drop"].tolist() == [0, 50, 0, 0, -50, 0]
    for variant in ("full", "same"):                                    # the same queries: nothing to doubt
        assert (table.xs(variant, level="variant")[["drop_low", "drop_high"]] == 0).all(axis=None)
    assert (table.low <= table.recall).all() and (table.recall <= table.high).all()
    assert (table.n == 8).all() and (table.left_out == 3).all()
    move = table.loc["t2i", "move"]
    assert 0 < move.drop_low < 50 < move.drop_high < 100


def test_the_base_loses_nothing(tower, world):
    by_order, left_out = order_ranks(tower[0], TRANSFORM, tower[1], world)
    table = drops(by_order, left_out=left_out)
    assert (table[table.variant == "full"][["drop", "drop_low", "drop_high"]] == 0).all(axis=None)
    assert (table.n + table.left_out == 40).all()


# Every order

@given(sentences, st.integers(1, 9))
def test_place_summary(s, place):
    if place > len(s):
        with pytest.raises(ValueError, match="no place"): place_summary(s, place)
        return
    moved = place_summary(s, place)
    assert moved[place - 1] == s[0] and moved[:place - 1] + moved[place:] == s[1:]


@given(sentences, st.integers(0, 9))
def test_leave_out(s, place):
    if not 1 <= place <= len(s) or len(s) == 1:
        with pytest.raises(ValueError): leave_out(s, place)
        return
    left = leave_out(s, place)
    assert left[:place - 1] == s[:place - 1] and left[place - 1:] == s[place:]


@given(sentences, st.integers(0, 99), st.integers(0, 9), st.integers(0, 999))
def test_shuffled(s, seed, draw, sample):
    once = shuffled(s, seed, draw, sample)
    assert sorted(once) == sorted(s) and once == shuffled(tuple(s), seed, draw, sample)


def test_every_order_is_equally_likely():
    orders = [tuple(shuffled("abcd", 0, draw, 3)) for draw in range(2400)]
    counts = [orders.count(o) for o in set(orders)]
    assert len(counts) == 24 and 60 < min(counts) and max(counts) < 145
    assert [shuffled("abcd", 0, 0, i) for i in range(9)] != [shuffled("abcd", 1, 0, i) for i in range(9)]


def test_all_changes_are_of_the_same_captions(tower, world, seen):
    by_change, left_out = order_matrix(tower[0], TRANSFORM, tower[1], world, places=3, shuffles=2, seed=5)
    index = of_length(world, 3)
    want = {("summary at", p): [place_summary(world.captions[i], p) for i in index] for p in (1, 2, 3)}
    want |= {("without", p): [leave_out(world.captions[i], p) for i in index] for p in (1, 2, 3)}
    want |= {("shuffle", d): [shuffled(world.captions[i], 5, d, i) for i in index] for d in (0, 1)}
    assert left_out == 40 - len(index) and list(by_change) == list(want)
    assert [texts for texts, _ in seen["texts"]] == [[" ".join(c) for c in captions] for captions in want.values()]
    assert all(len(r[d]) == len(index) for r in by_change.values() for d in ("t2i", "i2t"))


def test_the_matrix_agrees_with_the_papers_orders(tower, world):
    model, tok = tower
    by_change, _ = order_matrix(model, TRANSFORM, tok, world, places=4, shuffles=0)
    by_order, _ = order_ranks(model, TRANSFORM, tok, world, ("full", "move", "remove"))
    for change, known in ((("summary at", 1), "full"), (("without", 1), "remove")):
        assert equal(by_change[change], by_order[known])
        assert by_change[change]["truncated"] == by_order[known]["truncated"]


def test_captions_that_do_not_fit_are_left_out(tower, world):
    "Every order would cut other words from them."
    model, tok = small_tower(tower[0].backbone, 36)
    fits = [i for i in of_length(world, 2) if len(tok.encode(" ".join(world.captions[i]))) <= tok.room]
    assert 2 <= len(fits) < len(of_length(world, 2))
    by_change, left_out = order_matrix(model, TRANSFORM, tok, world, places=2, shuffles=2)
    assert left_out == 40 - len(fits)
    assert all(len(r["t2i"]) == len(r["i2t"]) == len(fits) and r["truncated"] == 0 for r in by_change.values())
    alone = Records("mixed", world.images[fits], [world.captions[i] for i in fits])
    of_alone, none = order_matrix(model, TRANSFORM, tok, alone, places=2, shuffles=0)
    assert none == 0 and all(equal(by_change[change], r) for change, r in of_alone.items())
    with pytest.raises(ValueError, match=r"mixed: [01] of the \d+ captions of 5 sentences or more fit 36 tokens"):
        order_matrix(model, TRANSFORM, tok, world, places=5)


def test_shuffle_hits_by_hand():
    draws = [dict(t2i=np.array(r), i2t=np.zeros(4)) for r in ([0, 0, 3, 9], [0, 2, 0, 9], [0, 0, 0, 9])]
    by_change = {("summary at", 1): draws[0]} | {("shuffle", d): r for d, r in enumerate(draws)}
    hits = shuffle_hits(by_change)["t2i"]
    assert np.allclose(hits["mean"], [1, 2/3, 2/3, 0])
    assert hits["worst"].tolist() == [True, False, False, False] and hits["best"].tolist() == [True, True, True, False]
    tensors = {change: {d: torch.as_tensor(r[d]) for d in r} for change, r in by_change.items()}
    assert shuffle_hits(tensors)["t2i"]["best"].tolist() == [True, True, True, False]


# Early tokens

def test_words_and_pads_push_the_same_captions_equally_far(tower, world, seen):
    model, tok = tower
    step, start = len(tok.encode(FILLER)), int(tok.sot is not None)
    tok.reset()
    by_push, left_out = push_ranks(model, TRANSFORM, tok, world, copies=(0, 1, 3))
    assert tok.truncated == 0 and all(r["truncated"] == 0 for r in by_push.values())
    index = of_length(world, 2)
    texts = [" ".join(world.captions[i][:2]) for i in index]
    assert left_out == 40 - len(index) and (seen["images"][0] == world.images[index]).all()
    assert list(by_push) == [(what, n*step) for n in (0, 1, 3) for what in ("words", "pads")]
    behind = [[" ".join([FILLER]*n + [text]) for text in texts] for n in (0, 1, 3)]
    assert seen["texts"][::2] == [(b, None) for b in behind]
    assert seen["texts"][1::2] == [(texts, n*step) for n in (0, 1, 3)]
    for n, pushed in zip((0, 1, 3), behind, strict=True):               # the words stand at the same places
        at = start + n*step
        for text, pads, words in zip(texts, tok(texts, n*step), tok(pushed), strict=True):
            ids = tok.encode(text)
            assert pads[at:at + len(ids)].tolist() == words[at:at + len(ids)].tolist() == ids
            assert pads[start:at].eq(tok.pad).all() and pads[at + len(ids)] == tok.eot
    assert equal(by_push["words", 0], by_push["pads", 0])
    assert not equal(by_push["words", 3*step], by_push["words", 0])


def test_captions_that_cannot_be_pushed_are_counted(tower, world, seen):
    model, tok = tower
    step = len(tok.encode(FILLER))
    lengths = {i: len(tok.encode(" ".join(world.captions[i][:2]))) for i in of_length(world, 2)}
    copies = (tok.room - int(np.median(list(lengths.values()))))//step
    index = [i for i, n in lengths.items() if n + copies*step <= tok.room]
    assert 2 <= len(index) < len(lengths)
    by_push, left_out = push_ranks(model, TRANSFORM, tok, world, copies=(0, copies))
    assert left_out == 40 - len(index) and all(len(r["t2i"]) == len(index) for r in by_push.values())
    assert (seen["images"][0] == world.images[index]).all()


def test_errors(tower, world):
    model, tok = tower
    def ask(measure, records=world, **more): return measure(model, TRANSFORM, tok, records, **more)
    one = Records("one-liners", world.images[:3], [c[:1] for c in world.captions[:3]])
    with pytest.raises(ValueError, match="one-liners: 0 of 3 captions have 4 sentences or more"): ask(order_ranks, one)
    with pytest.raises(ValueError, match="one-liners: 0 of 3 captions have 2 sentences"): ask(push_ranks, one)
    with pytest.raises(ValueError, match="one-liners: 0 of 3 captions have 2"): ask(order_matrix, one, places=2)
    six = Records("six", world.images[:6], [c[:1] for c in world.captions[:5]] + [["A.", "B.", "C.", "D."]])
    with pytest.raises(ValueError, match="1 of 6 captions have 4 sentences"): ask(order_ranks, six)
    with pytest.raises(ValueError, match="'moved'; did you mean move"): ask(order_ranks, orders=("full", "moved"))
    tokens = 40*len(tok.encode(FILLER))
    with pytest.raises(ValueError, match=f"0 of .. captions fit 88 tokens behind {tokens} tokens"):
        ask(push_ranks, copies=(0, 40))
    with pytest.raises(ValueError, match="at least two places"): ask(order_matrix, places=1)
    with pytest.raises(ValueError, match="0 of 40 captions have 50 sentences"): ask(order_matrix, places=50)
    with pytest.raises(ValueError, match="no shuffles"): shuffle_hits(ask(order_matrix, places=2, shuffles=0)[0])
