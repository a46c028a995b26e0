"""What a model is asked, as rows: a mean, its interval, the captions it is of."""
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from debias_clip import measures
from debias_clip.attention import by_sentence, read_captions
from debias_clip.authors import scene_records
from debias_clip.measures import (
    attention_rows,
    claim_rows,
    embedding_rows,
    matrix_rows,
    order_rows,
    pair_rows,
    push_rows,
    score,
    shortsight_rows,
    similarity_rows,
)
from debias_clip.models import create_model
from debias_clip.order import order_matrix, order_ranks, push_ranks
from debias_clip.pairs import Normalize
from debias_clip.records import Records
from debias_clip.results import write_metrics
from debias_clip.similarity import added, alone, cosines, growth
from debias_clip.tables import as_rows, pick, summarise, table, with_counts
from debias_clip.tokens import get_tokenizer

TRANSFORM = Normalize((.5, .5, .5), (.25, .25, .25))


@pytest.fixture(scope="module")
def asked():
    torch.manual_seed(0)
    model = create_model("scenes-clip", context_length=88, keep=8).eval()
    return model, TRANSFORM, get_tokenizer("scenes-clip", 88), scene_records("val", n=40)


def recall(ranked, direction): return 100*float((np.asarray(ranked[direction]) < 1).mean())


def test_push_rows(asked):
    rows, (found, left_out) = push_rows(*asked, copies=(0, 2)), push_ranks(*asked, copies=(0, 2))
    want = {(*name, d): recall(ranked, d) for name, ranked in found.items() for d in ("t2i", "i2t")}
    assert {(r["by"], r["tokens"], r["direction"]): r["value"] for r in rows} == want
    for r in rows:
        assert r["left_out"] == left_out and len(r["scores"]) == r["n"]
        assert np.isclose(r["scores"].mean(), r["value"]) and r["low"] <= r["value"] <= r["high"]


def test_words_alone_can_push(asked):
    words = push_rows(*asked, copies=(0, 2), kinds=("words",))
    assert [r["value"] for r in words] == [r["value"] for r in pick(push_rows(*asked, copies=(0, 2)), by="words")]


def values(rows, *names): return {(*(r[n] for n in names), r["direction"]): r["value"] for r in rows}


def test_the_main_experiment_asks_what_its_parts_ask(asked, monkeypatch):
    "One encoding of the pictures, and the numbers of `score` and `push_rows`."
    encoded, encode = [], measures.encode_images
    monkeypatch.setattr(measures, "encode_images", lambda *a, **k: encoded.append(1) or encode(*a, **k))
    rows = claim_rows(*asked, copies=(0, 2))
    assert encoded == [1]
    scored = score(*asked, orders=("full", "move", "remove", "first"))
    pushed = pick(push_rows(*asked, copies=(0, 2)), by="words")
    text, farthest = pick(rows, what="text"), max(r["tokens"] for r in pushed)
    moved = ["move", "remove", "first sentence", "short"]
    assert values(pick(text, text=moved), "text") == values(pick(scored, text=moved), "text")
    assert values(pick(text, text="whole caption"), "text") == values(score(*asked, short=False), "text")
    behind = f"behind {farthest} tokens of filler"
    assert values(pick(text, text=behind), "tokens") == values(pick(pushed, tokens=farthest), "tokens")
    assert list(dict.fromkeys(r["text"] for r in text)) == [
        "whole caption", "move", "remove", "first sentence", "short", behind]
    assert values(pick(rows, what="order"), "text") == values(pick(scored, text=[
        "whole caption", "move", "remove", "first sentence"]), "text")
    assert values(pick(rows, what="filler"), "tokens") == values(pushed, "tokens")


def test_the_whole_caption_is_scored_for_every_image(asked):
    "Also of those that are too short for Move, which are not among the captions that orders are compared on."
    model, transform, tok, world = asked
    some = Records("some short", world.images, [c if i % 4 else c[:2] for i, c in enumerate(world.captions)],
                   world.short)
    rows = pick(claim_rows(model, transform, tok, some, copies=(0, 1)), direction="t2i")
    long = sum(len(c) >= 4 for c in some.captions)
    counts = {r["text"]: (r["n"], r["left_out"]) for r in pick(rows, what="text")}
    assert counts["whole caption"] == (40, 0) and counts["short"] == (sum(map(len, world.short)), 0)
    assert {counts[text] for text in ("move", "remove", "first sentence")} == {(long, 40 - long)} and 1 < long <= 30
    assert {r["n"] for r in pick(rows, what="order")} == {long}


def test_captions_of_one_sentence_are_asked_what_they_can_be(asked):
    "As COCO's: no order to change, nothing to push back, and both are said."
    model, transform, tok, world = asked
    one = Records("one-liners", world.images, [list(c[:1]) for c in world.captions], world.short)
    with pytest.warns(UserWarning) as said: rows = claim_rows(model, transform, tok, one)
    assert [str(w.message).split(",")[0] for w in said] == [
        "one-liners: too few sentences for move", "one-liners: nothing is pushed back"]
    assert {r["text"] for r in pick(rows, what="text")} == {"whole caption", "first sentence", "short"}
    assert not pick(rows, what="filler")


def test_pair_rows(asked):
    rows, (found, _) = pair_rows(*asked), order_ranks(*asked, ("first2", "swap2", "first"))
    names = dict(first2="First 2", swap2="Swap 2", first="First only")
    want = [(name, recall(found[order], "t2i")) for order, name in names.items()]
    assert [(r["order"], r["value"]) for r in pick(rows, direction="t2i")] == want


def test_matrix_rows(asked):
    rows = matrix_rows(*asked, places=3, shuffles=3)
    found, left_out = order_matrix(*asked, places=3, shuffles=3)
    want = {(*name, d): recall(ranked, d) for name, ranked in found.items() if name[0] != "shuffle"
            for d in ("t2i", "i2t")}
    assert {(r["change"], r["place"], r["direction"]): r["value"] for r in rows if r["place"]} == want
    for d in ("t2i", "i2t"):
        names = [f"shuffled, {name}" for name in ("mean", "worst", "best")]
        mean, worst, best = (pick(rows, order=name, direction=d)[0] for name in names)
        each = [recall(found["shuffle", s], d) for s in range(3)]
        assert np.isclose(mean["value"], np.mean(each)) and mean["n"] == 40 - left_out
        assert worst["value"] <= min(each) and best["value"] >= max(each)
    assert not pick(matrix_rows(*asked, places=3, shuffles=0), change="shuffled")


def test_what_was_not_read_stands_beside_every_mean(asked):
    "Of long captions, by a model that reads 45 tokens: in the summary, and in a table of several columns."
    model, tok = create_model("scenes-clip", context_length=45, keep=8).eval(), get_tokenizer("scenes-clip", 45)
    few = asked[3]
    first, second, *rest = few.captions[0]
    few = replace(few, captions=[[first, " ".join([second]*3), *rest], *few.captions[1:]])
    rows = [r | dict(arm="x", seed=s) for r in order_rows(model, TRANSFORM, tok, few, 2, 2) for s in (0, 1)]
    summary = pick(summarise(rows, ["arm", "change", "order", "direction"]), direction="t2i")
    by_order = summary.set_index("order")
    cut = sum(len(tok.encode(" ".join(c[:2]))) > tok.room for c in few.captions)
    mean = by_order.loc["shuffled, mean"]
    assert by_order.cut["First 2"] == cut > 0 == mean.cut and mean.n + mean.left_out == 40
    assert mean.left_out > by_order.left_out["First 2"] == 0
    shown = with_counts(table(summary, ["arm", "change"], columns="order"), summary)
    assert shown.loc["x", "two sentences"][["n", "left out", "cut"]].tolist() == [40, 0, cut]
    assert shown.loc["x", "shuffled"][["n", "left out", "cut"]].tolist() == [mean.n, mean.left_out, 0]


def test_all_rows_can_be_summarised_and_kept(asked, tmp_path, monkeypatch):
    "Also over seeds, and whatever is None or NaN on the way."
    found, told = measures.falls(*asked)
    noticed = found.assign(fall=.1 + .05*(found.place == 1))   # random weights notice nothing, and would give no rows
    monkeypatch.setattr(measures, "falls", lambda *a, **k: (noticed, told))
    rows = dict(attention=attention_rows(*asked), embedding=embedding_rows(*asked), order=order_rows(*asked, 2, 2))
    assert {"index", "place", "sentence"} <= {r["what"] for r in rows["embedding"]}
    by = dict(attention=["what", "layer", "x"], embedding=["what", "x"], order=["change", "order", "direction"])
    for name in rows:
        for seeds in ([0], [0, 1]):
            summary = summarise([r | dict(seed=s) for r in rows[name] for s in seeds], by[name])
            assert summary.value.notna().all()
            write_metrics(str(tmp_path), name, {"table": as_rows(summary)})


def test_shortsight_rows_of_a_model_that_notices_nothing(asked, monkeypatch):
    found, told = measures.falls(*asked)
    monkeypatch.setattr(measures, "falls", lambda *a, **k: (found.assign(fall=0.), told))
    assert shortsight_rows(*asked) == []


def test_attention_rows(asked):
    rows = attention_rows(*asked, text="A red ring. A blue cross.")
    strip = rows.pop()
    assert strip["what"] == "strip" and abs(sum(w for _, w, _ in strip["strip"]) - 1) < 1e-5
    parts = ["start", "words", "end", "pads"]
    assert {r["what"] for r in rows} == {"position", "sentence", "layers", "centre", *parts}
    assert {r["layer"] for r in pick(rows, what=["position", "sentence"])} == {3}
    for layer in (1, 2, 3):
        assert np.isclose(sum(r["value"] for r in pick(rows, x=layer, what=parts)), 100, atol=1e-3)


@pytest.mark.parametrize("layer", [1, 3])
def test_attention_rows_of_a_layer(asked, layer):
    want = by_sentence(read_captions(asked[0], asked[2], asked[3].captions), layer - 1)
    want = list(zip(want.sentence, want.value, want.n, strict=True))
    for what in ("layers", "sentence"):
        rows = pick(attention_rows(*asked, layer=layer - 1), what=what, layer=layer)
        assert [(r["x"], r["value"], r["n"]) for r in rows] == want


def test_similarity_rows(asked):
    rows, found = similarity_rows(*asked), cosines(*asked)
    for what, ask in (("alone", alone), ("added", added), ("growth", growth)):
        names = ("value", "low", "high", "n", "left_out", "cut")
        assert [[r[k] for k in names] for r in pick(rows, what=what)] == [[r[k] for k in names] for r in ask(found)]
    assert [r["x"] for r in pick(rows, what="alone")] == [r["x"] for r in pick(rows, what="words")]
    assert np.isclose(sum(r["value"] for r in pick(rows, what="words")), 100)


def test_similarity_of_one_liners_omits_what_sentences_add(asked):
    model, transform, tok, world = asked
    one = Records("one-liners", world.images, [list(c[:1]) for c in world.captions])
    rows = similarity_rows(model, transform, tok, one)
    assert {r["what"] for r in rows} == {"cosine", "growth", "length", "margin", "slope", "omitted"}
    omitted, = pick(rows, what="omitted")
    assert (omitted["x"], omitted["n"]) == ("added", 40) and "two sentences" in omitted["why"]


@pytest.mark.parametrize("length", [48, 28])
def test_similarity_where_captions_are_cut(asked, length):
    "Many or all of them: each group of lengths has a name of its own, and what no caption can tell is said."
    model, tok = create_model("scenes-clip", context_length=length, keep=8).eval(), get_tokenizer("scenes-clip", length)
    rows = similarity_rows(model, TRANSFORM, tok, asked[3])
    summarise([r | dict(seed=0) for r in rows], ["what", "x"])
    cut = pick(rows, x="whole caption")[0]["cut"]
    assert cut > 10 and pick(rows, what="length")[-1]["x"].endswith(f"{length - 2}+")
    assert all(r["n"] + r["left_out"] <= 40 for r in pick(rows, what=["growth", "slope"]))
    fitting = pick(rows, what=["alone", "added", "share", "growth", "slope"])
    assert all(r["left_out"] >= cut == r["cut"] for r in fitting)
    if length == 28:
        omitted = pick(rows, what="omitted")
        assert cut == 40 and {r["x"] for r in omitted} == {"growth", "slope", "added"}
        assert all("40" in r["why"] for r in omitted)


def test_short_captions_are_scored_by_image(asked):
    rows = score(*asked, orders=("full", "move"))
    short = {r["direction"]: r for r in pick(rows, text="short")}
    assert short["t2i"]["n"] == sum(map(len, asked[3].short)) and short["i2t"]["n"] == 40
    assert np.unique(short["t2i"]["image_of"]).size == 40 and short["i2t"]["image_of"] is None
    assert not pick(score(*asked, short=False), text="short")


def test_rows_are_plain_numbers_and_scores(asked):
    frame = pd.DataFrame(score(*asked)).drop(columns=["scores", "image_of"])
    assert frame.isna().sum().sum() == 0 and {"cut", "left_out"} <= set(frame)
