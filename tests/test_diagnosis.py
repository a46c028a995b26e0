"""The diagnosis: what it says of models and data sets of every kind, and of what cannot be told."""
import json

import diagnosed
import pytest
import torch
from diagnosed import TRANSFORM, ask, asked_model
from PIL import Image

from debias_clip import diagnosis as diagnosis_module
from debias_clip.authors import scene_records
from debias_clip.diagnosis import (
    diagnose,
    diagnose_arms,
    fallen,
    index_table,
    long_enough,
    percent,
    rule,
    sample,
    verdict,
)
from debias_clip.models import create_model_and_transforms
from debias_clip.order import order_ranks
from debias_clip.records import ImageError, Records
from debias_clip.retrieval import encode_images

PARTS = ("index", "place", "sentence", "orders", "push", "matrix", "attention", "similarity", "worst", "falls")


def reasons(diagnosis): return {o["what"]: o["why"] for o in diagnosis["omitted"]}


def saved(world, folder, n, repeats=1):
    "Files of the first n pictures, each named so many times."
    files = []
    for i in range(n):
        Image.fromarray(world.images[i]).save(file := folder/f"{i}.png")
        files += [str(file)]*repeats
    return files


def test_every_part_is_there(one, siglip):
    for found in (one, siglip):
        assert all(found[part] is not None for part in PARTS) and found["index"]["n"] > 20
        json.dumps(found, allow_nan=False)
        assert found["card"]["seed"] == 0 and found["card"]["data"] == "scenes, val"
        assert found["card"]["backbone"].startswith("scenes-") and "scores" not in found["push"][0]
    assert one["card"]["images"] == 30 and siglip["card"]["images"] == 25


def test_the_same_seed_gives_the_same_numbers():
    few = scene_records("val", n=12)
    found, other = ask(few), ask(few, seed=1)
    assert ask(few) == found
    assert other["falls"] != found["falls"] and other["orders"] == found["orders"]   # the same captions, other orders


def test_another_seed_draws_other_captions(world):
    one, two = (sample(world, 20, seed)[:2] for seed in (1, 2))
    assert len(one[0]) == len(two[0]) == 20 and one[0] == sorted(one[0]) != two[0]
    assert one[1].captions == [world.captions[i] for i in one[0]]


def test_falls_name_the_captions_of_the_data_set(siglip, world):
    drawn = sample(world, 25, 0)[0]
    assert drawn != list(range(25)) and set(siglip["falls"]["sample"]) <= set(drawn)
    assert max(siglip["falls"]["sample"]) > 24


def test_less_than_all_is_not_shown_as_100(one):
    assert [percent(v) for v in (99.67065934, 99.997, 100., 41.2)] == ["99.7", "99.997", "100", "41"]
    index = one["index"] | dict(value=.1, low=.05, high=.2, why=None, asked=99.67065934)
    assert "99.7 % of their sentences" in verdict(one | dict(index=index))


@pytest.mark.parametrize("low, high, lean", [(.05, .2, "to the beginning"), (-.3, -.1, "to the end"),
                                             (-.1, .2, "cannot be told from an even reader")])
def test_an_index_is_read_as_it_came_out(one, low, high, lean):
    assert lean in verdict(one | dict(index=one["index"] | dict(value=.1, low=low, high=high, why=None)))


# ---- what cannot be measured is said

def test_one_sentence_captions():
    found = diagnosed.diagnosis("flat")
    missing = ["index", "place", "sentence", "push", "matrix", "worst", "falls"]
    assert [part for part in PARTS if found[part] is None] == missing and found["similarity"]["added"] is None
    why = reasons(found)
    assert "30 captions of one sentence" in why["index"] and "2 sentences" in why["order matrix"]
    assert "two sentences" in why["what each sentence adds"] and {"order: move", "order: remove"} <= why.keys()
    assert "no index" in verdict(found) and ".." not in verdict(found)


def test_orders_that_few_captions_bear_are_left_out(world):
    "Else all orders would be scored on those few alone."
    captions = [list(c) if i < 8 else list(c[:3]) for i, c in enumerate(world.captions)]
    records = Records("short ones", world.images, captions)
    found = ask(records)
    why = reasons(found)
    assert [r["variant"] for r in found["orders"]] == ["full", "remove", "first", "first2", "swap2"]*2
    assert f"{long_enough(records, 4)} of 30 captions have the 4 sentences it needs" in why["order: move"]
    assert "order: remove" not in why and found["worst_order"] == "swap2"
    assert found["orders"][0]["n"] == long_enough(records, 2)
    assert max(r["place"] or 0 for r in found["matrix"]) == 3


def test_a_context_too_short_for_two_sentences(world):
    found = ask(Records("long", world.images, [[" ".join(c)]*3 for c in world.captions]), 28, name="narrow")
    why = reasons(found)
    assert found["index"] is None and "context holds fewer than two sentences" in why["index"]
    assert found["push"] is None and "28 tokens" in why["early tokens"]
    cut = found["card"]["truncated texts"]
    assert cut > 25 and f"{cut} of 30 captions have more than the 26 tokens" in why["the end of long captions"]
    assert all(r["truncated"] > 20 for r in found["orders"] if r["variant"] == "full")


def test_a_model_that_notices_nothing(world):
    model, tok = asked_model()
    noise = torch.randn(30, 128, generator=torch.Generator().manual_seed(0))
    model.encode_image = lambda images: noise[:len(images)]
    found = diagnose(model, TRANSFORM, tok, world, "blind", shuffles=1)
    assert found["index"]["value"] is None and any("does not notice" in o["why"] for o in found["omitted"])
    assert "no index" in verdict(found)


def test_a_single_image_is_an_error(world):
    with pytest.raises(ValueError, match="scenes, val holds a single image"): ask(scene_records("val", n=1))


def test_two_images_are_little_but_no_error(world):
    ask(Records("two", world.images[:2], [list(c) for c in world.captions[:2]]))


def test_a_mistake_in_the_code_is_no_omission(world, monkeypatch):
    def broken(*given, **more): return int("x")
    monkeypatch.setattr(diagnosis_module, "push_rows", broken)
    with pytest.raises(ValueError, match="invalid literal"): ask(world)


@pytest.mark.parametrize("broken, what", [
    ("text_projection", "text"), ("transformer.resblocks.1.mlp.c_fc.weight", "text"), ("visual.proj", "image")])
def test_features_that_are_not_finite(world, broken, what):
    model, tok = asked_model()
    with torch.no_grad(): dict(model.named_parameters())[broken].view(-1)[0] = float("nan")
    says = f"diverged: the {what} features of 6 of 6 samples are not finite .*Look for NaN in its weights"
    with pytest.raises(ValueError, match=says): diagnose(model, TRANSFORM, tok, world, "diverged", n=6)


# ---- pictures from files

def test_an_unreadable_image_is_named(world, tmp_path):
    files = saved(world, tmp_path, 4)
    (tmp_path/"2.png").write_bytes(b"no picture")
    model, _, transform = create_model_and_transforms("scenes-clip", context_length=88, keep=8)
    records = Records("files", files, [list(c) for c in world.captions[:4]])
    with pytest.raises(ImageError, match="2.png"): diagnose(model, transform, asked_model()[1], records)


def test_of_several_rows_an_image_the_first_counts(world, tmp_path):
    "Or a perfect model would find one of two pictures that are the same, and have a recall of zero."
    files = saved(world, tmp_path, 8, repeats=2)
    captions = [list(world.captions[i//2 + 8*(i % 2)]) for i in range(16)]
    model, _, transform = create_model_and_transforms("scenes-clip", context_length=88, keep=8)
    tok = asked_model()[1]
    records = Records("rows", files, captions)
    found = diagnose(model, transform, tok, records, shuffles=1, about=dict(positions="new"))
    assert found["card"]["images"] == found["card"]["texts"] == 8 and found["card"]["positions"] == "new"
    assert found["card"]["text"] == "the first caption of each image"
    assert not any(i % 2 for i in found["falls"]["sample"])
    assert "8 rows name an image again" in reasons(found)["other captions of an image"]
    with pytest.raises(ValueError, match="single image"):
        diagnose(model, transform, tok, Records("rows", files[:2], captions[:2]))


def test_the_card_names_the_caption(world):
    "Of data sets with several independent captions an image, the long one is the first of them."
    short = [[" ".join(c), "Another."] for c in world.captions]
    assert rule(Records("coco", world.images, world.captions, short), 0) == "the first caption of each image"
    assert rule(world, 0) == "the whole caption"


# ---- the worst captions

def test_worst_captions_are_the_worst(world):
    "By random weights, which lose many."
    one, (model, tok) = ask(world, tag=None), asked_model(tag=None)
    orders = [r["variant"] for r in one["orders"] if r["direction"] == "t2i"]
    ranks, _ = order_ranks(model, TRANSFORM, tok, world, orders, encode_images(model, world, TRANSFORM))
    enough = [i for i, c in enumerate(world.captions) if len(c) >= 4]
    pairs = zip(enough, ranks["full"]["t2i"].tolist(), ranks["move"]["t2i"].tolist(), strict=True)
    lost = sorted((before > 0, before - after, i) for i, before, after in pairs if after > before)
    assert len(lost) > 3   # those that are found as written come first
    assert [(r["before"] > 1, r["before"] - r["after"], r["sample"]) for r in one["worst"]] == lost[:3]
    c = list(world.captions[one["worst"][0]["sample"]])
    assert one["worst"][0]["sentences"] == [c[3], *c[1:3], c[0], *c[4:]]


def test_captions_that_fall_are_not_hidden_by_those_that_do_not():
    ranks = dict(full=dict(t2i=[0]*6 + [1, 1]), move=dict(t2i=[0]*6 + [6, 7]))
    assert fallen(ranks, "move", 6) == [(7, 1, 7), (6, 1, 6)]


def test_pictures_of_files_are_small_and_name_no_folder(world, tmp_path):
    files = saved(world, tmp_path, 20)
    for file in files: Image.open(file).resize((700, 500)).convert("RGB").save(file, "jpeg")
    model, _, transform = create_model_and_transforms("scenes-clip", context_length=88, keep=8)
    records = Records("files", files, [list(c) for c in world.captions[:20]])
    found = diagnose(model, transform, asked_model()[1], records, shuffles=1)
    for r in found["worst"]:
        assert r["image"].startswith("data:image/jpeg") and len(r["image"]) < 20_000
        assert r["sample"] != r["instead"] and r["file"] == f"{r['sample']}.png"
    assert str(tmp_path) not in json.dumps(found)   # a page to pass on names no folder of this machine


# ---- arms

def test_arms_are_named_and_their_indices_stand_in_a_table(one, monkeypatch):
    def measure_arms(measure, parameters, tests, out, workers):
        rows = [dict(arm="new", seed=s, test="own") | one for s in parameters["seeds"]]
        return rows, {"new, seed 0": "key"}
    monkeypatch.setattr(diagnosis_module, "measure_arms", measure_arms)
    for seeds, names in (([0], ["new"]), ([0, 1], ["new, seed 0", "new, seed 1"])):
        found, keys = diagnose_arms(dict(seeds=seeds), {}, "out", 0, "toy")
        assert [d["name"] for d in found] == names and found[0]["card"]["model"] == "new, seed 0, own"
        assert "arm" not in found[0] and keys == {"new, seed 0": "key"}
        table = index_table(found)
        assert table.index.tolist() == names and set(table.n) == {one["index"]["n"]}
