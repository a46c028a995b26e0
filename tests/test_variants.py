"""Variants of the short caption that the trainer has no option for: each does what it says, and nothing else; and no model is taken for another."""
import itertools
import json
import math
import pickle
from dataclasses import asdict, fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.nn import functional as F

import debias_clip.models as models
import debias_clip.train as trainer
import debias_clip.variants as variants
from debias_clip.captions import DEBIAS, RECIPES, SAMPLED, ShortCaption
from debias_clip.data import PairDataset, TextStore
from debias_clip.models import create_model, encode_texts, save_checkpoint
from debias_clip.scenes import scene_records
from debias_clip.tokens import get_tokenizer
from debias_clip.train import TrainConfig, model_key, train
from debias_clip.variants import Variant, VariedPairs, check_variant, encode_unread, train_variant, variant_key, varied
from test_train import SMALL, Killed, same_bits, starts, steps_seen  # noqa: F401  (fixtures)

PAPER, LENGTH = Variant(), 88
EACH = [Variant(keep_order=True), Variant(count=1), Variant(count=99), Variant(pad_share=.5), Variant(read_pads=False), Variant(pad_long=True)]
short = lambda v: ", ".join(f"{k}={x}" for k, x in asdict(v).items() if x != asdict(PAPER)[k])


@pytest.fixture(scope="module")
def world():
    records, tok = scene_records("val", n=40), get_tokenizer("scenes-clip", LENGTH)
    return records, TextStore(records.captions, tok), tok


@pytest.fixture(scope="module")
def arm(starts): return TrainConfig(**SMALL | dict(epochs=1), init=starts["scenes-clip"], save_every=1)


@pytest.fixture(scope="module")
def ours(arm, tmp_path_factory): return train(arm, tmp_path_factory.mktemp("ours"))


def pairs(world, variant, recipe=DEBIAS, seed=0): return VariedPairs(variant, *world[:2], recipe, None, seed)
def lead(rows): return (rows[:, 1:] == 0).int().cumprod(1).sum(1)
def words(rows): return [[int(t) for t in r if t not in (0, 49406, 49407)] for r in rows]


# ---- the short caption

@given(st.integers(1, 9), st.integers(1, 12), st.sampled_from(["rest", "all", "summary"]), st.booleans(), st.integers(0, 2**32 - 1))
def test_a_counted_caption_draws_exactly_so_many(k, count, source, keep, seed):
    recipe, pool = ShortCaption(source, "subset", keep_order=keep), ShortCaption(source, "none")(range(k), None)
    drawn = Variant(count=count).caption(recipe)(range(k), np.random.default_rng(seed))
    assert len(drawn) == len(set(drawn)) == min(count, len(pool)) and set(drawn) <= set(pool)
    if keep: assert drawn == sorted(drawn)


@given(st.integers(1, 9), st.integers(0, 2**32 - 1), st.sampled_from(list(RECIPES)))
def test_an_ordered_caption_has_the_same_sentences(k, seed, recipe):
    draw = lambda v: v.caption(RECIPES[recipe])(range(k), np.random.default_rng(seed))
    assert sorted(draw(PAPER)) == draw(Variant(keep_order=True))
    assert draw(PAPER) == RECIPES[recipe](range(k), np.random.default_rng(seed))


def test_every_order_of_a_counted_caption_is_as_likely():
    rng, n = np.random.default_rng(0), 6000
    drawn = [tuple(Variant(count=2).caption(SAMPLED)(range(4), rng)) for _ in range(n)]
    counts = [drawn.count(p) for p in itertools.permutations((1, 2, 3), 2)]
    assert sum(counts) == n and all(abs(c - n/6) < 5*math.sqrt(n*5/36) for c in counts)


# ---- pads

@settings(max_examples=12, deadline=None)
@given(st.floats(0, 1), st.integers(0, 1000), st.integers(0, 5), st.booleans())
def test_no_caption_has_more_pads_than_its_share(world, share, seed, epoch, long):
    keys, tok = [(epoch, i) for i in range(40)], world[2]
    paper, got = pairs(world, PAPER, seed=seed).texts(keys), pairs(world, Variant(pad_share=share, pad_long=long), seed=seed).texts(keys)
    for kind in ("short", "long"):
        assert words(got[kind]) == words(paper[kind])                              # the same text, further back
        n_post = torch.tensor([tok.room - len(w) for w in words(got[kind])])
        bound = (share*n_post.double()).floor() if kind == "short" or long else torch.zeros(40)
        assert (lead(got[kind]) <= bound).all() and (got[kind][:, 0] == tok.sot).all() and ((got[kind] == tok.eot).sum(1) == 1).all()
    if not long: assert torch.equal(got["long"], paper["long"])


@pytest.mark.parametrize("share", [.25, .5, 1.])
def test_every_number_of_pads_up_to_the_share_is_drawn_as_often(world, share):
    i, n = 3, 8000
    rows = pairs(world, Variant(pad_share=share), ShortCaption("rest", "none", True, True)).texts([(epoch, i) for epoch in range(n)])["short"]
    bound = math.floor(share*(world[2].room - len(words(rows[:1])[0])))
    counts = torch.bincount(lead(rows), minlength=bound + 1)
    assert len(counts) == bound + 1 and (counts - n/(bound + 1)).abs().max() < 5*math.sqrt(n/(bound + 1))


def test_both_captions_are_padded_by_draws_of_their_own(world):
    keys = [(epoch, i) for epoch in range(20) for i in range(40)]
    paper, both = pairs(world, PAPER).texts(keys), pairs(world, Variant(pad_long=True)).texts(keys)
    assert torch.equal(both["short"], paper["short"])
    free = torch.tensor([world[2].room - len(w) for w in words(both["long"])])
    assert abs(np.corrcoef(lead(both["long"])/free.clamp(min=1), lead(both["short"])/(world[2].room - torch.tensor([len(w) for w in words(both["short"])])))[0, 1]) < .15
    assert (lead(both["long"]) > 0).sum() > .9*(free > 1).sum()
    again = pairs(world, Variant(pad_long=True)).texts(keys[13:17])
    assert torch.equal(again["long"], both["long"][13:17])                         # of seed, epoch and sample alone


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_papers_variant_makes_the_trainers_own_texts(world, recipe):
    keys = [(epoch, i) for epoch in range(3) for i in range(40)]
    for seed in (0, 7):
        got, want = pairs(world, PAPER, RECIPES[recipe], seed).texts(keys), PairDataset(*world[:2], RECIPES[recipe], None, seed).texts(keys)
        assert got.keys() == want.keys() and all(torch.equal(got[k], want[k]) for k in want)
    nothing = pairs(world, Variant(pad_share=0), RECIPES[recipe]).texts(keys)
    assert torch.equal(nothing["short"], PairDataset(*world[:2], replace(RECIPES[recipe], prefix_pad=False), None).texts(keys)["short"])


def test_workers_get_the_same_texts(world):
    for v in EACH:
        data = pairs(world, v)
        assert all(torch.equal(a, b) for a, b in zip(pickle.loads(pickle.dumps(data)).texts([(1, 4), (2, 5)]).values(), data.texts([(1, 4), (2, 5)]).values()))


# ---- pads that nobody reads

@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    return create_model("scenes-clip", context_length=LENGTH, keep=8)


def oracle(model, row, n_pre):
    "A row by open_clip's own tower, under a mask that hides n_pre pads behind SOT from everything but themselves."
    mask = model.attn_mask.clone()
    mask[:, 1:1 + n_pre] = -torch.inf
    mask.fill_diagonal_(0)
    with variants._instead(model, attn_mask=mask): return model.encode_text(row[None], normalize=True)[0]


def moved(model, row, n_pre):
    "The same by hand: the caption without its pads, its words at the positions they had."
    end = int(row.argmax())
    at = torch.tensor([0, *range(n_pre + 1, end + 1)])
    x = model.token_embedding(row[at]) + model.positional_embedding[at]
    x = model.transformer(x[None], attn_mask=model.attn_mask[:len(at), :len(at)])
    return F.normalize(model.ln_final(x)[0, -1] @ model.text_projection, dim=-1)


@settings(max_examples=10, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), st.floats(0, 1)), min_size=1, max_size=12))
def test_unread_pads_are_masked_pads(model, captions):
    tok = get_tokenizer("scenes-clip", LENGTH)
    texts = [" ".join(["a", "small", "red", "ring", "above", "it"][k % 6] for k in range(n)) for n, _ in captions]
    n_pre = [int(share*tok.free(len(tok.encode(t)))) for t, (_, share) in zip(texts, captions)]
    rows = tok(texts, n_pre=n_pre)
    with torch.no_grad():
        got = encode_unread(model, rows, normalize=True)
        for one, row, n in zip(got, rows, n_pre):
            torch.testing.assert_close(one, oracle(model, row, n), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(one, moved(model, row, n), rtol=1e-4, atol=1e-5)


def test_their_gradients_are_those_under_the_mask(model):
    tok = get_tokenizer("scenes-clip", LENGTH)
    n_pre = [0, 30, 5, 60]
    rows, direction = tok(["red ring", "a small blue box", "", "two discs"], n_pre=n_pre), torch.randn(4, 128, generator=torch.Generator().manual_seed(0))
    def gradients(features):
        model.zero_grad()
        (features*direction).sum().backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    mine, want = gradients(encode_unread(model, rows, normalize=True)), gradients(torch.stack([oracle(model, r, n) for r, n in zip(rows, n_pre)]))
    assert mine.keys() == want.keys()
    for name in want: torch.testing.assert_close(mine[name], want[name], rtol=1e-3, atol=1e-5, msg=name)
    assert (mine["token_embedding.weight"][0] == 0).all()                          # the pad's own row: nobody read it


def test_without_pads_nothing_changes_and_the_pieces_go_back(model):
    tok = get_tokenizer("scenes-clip", LENGTH)
    rows, plan = tok(["a red ring", "", "word " * 200]), models._plan
    with torch.no_grad(): assert torch.equal(encode_unread(model, rows), encode_texts(model, rows))
    with pytest.raises(ValueError, match="fit this model"): encode_unread(model, rows[:, :50])
    assert models._plan is plan
    with pytest.raises(ValueError, match="scenes-siglip: pads can be left unread in CLIP's own"): encode_unread(create_model("scenes-siglip", context_length=88, keep=8), rows)


# ---- trained

def test_with_the_papers_variant_the_weights_are_the_trainers(arm, ours, tmp_path):
    assert train_variant(arm, PAPER, ours.folder.parent) == ours                   # found, not trained again
    with varied(PAPER, "by-the-pieces"): pieces = train(arm, tmp_path)
    assert pieces.key == "by-the-pieces" and same_bits(pieces.weights, ours.weights)


def test_pads_up_to_nothing_are_the_recipe_without_padding(arm, tmp_path):
    none, sampled = train_variant(arm, Variant(pad_share=0), tmp_path), train(replace(arm, recipe="sampled"), tmp_path)
    assert none.key != sampled.key and same_bits(none.weights, sampled.weights)


@pytest.mark.parametrize("variant", EACH, ids=short)
def test_each_variant_is_trained_and_found_again(arm, ours, variant, tmp_path, monkeypatch):
    done = train_variant(arm, variant, tmp_path)
    assert done.key == variant_key(arm, variant) == done.folder.name and not same_bits(done.weights, ours.weights)
    assert Variant(**json.loads((done.folder/"variant.json").read_text())) == variant
    assert trainer.PairDataset is PairDataset and trainer.encode_texts is encode_texts and trainer.model_key is model_key
    monkeypatch.setattr(trainer, "_fit", lambda *a: pytest.fail("trained again"))
    assert train_variant(arm, variant, tmp_path) == done and done.load()[0].context_length == 88


@pytest.mark.parametrize("variant", [Variant(read_pads=False), Variant(count=1, pad_long=True)], ids=short)
def test_a_killed_variant_goes_on(arm, variant, tmp_path, monkeypatch):
    whole = train_variant(arm, variant, tmp_path/"whole")
    with monkeypatch.context() as patch:
        steps_seen(patch, stop=2)
        with pytest.raises(Killed): train_variant(arm, variant, tmp_path/"killed")
        assert trainer.PairDataset is PairDataset and trainer.model_key is model_key
    seen = steps_seen(monkeypatch)
    assert same_bits(train_variant(arm, variant, tmp_path/"killed").weights, whole.weights) and len(seen) == 1


def test_memory_saved_changes_no_variant(arm, tmp_path):
    "Layers computed again, or samples encoded part by part, read no pads either."
    v, whole = Variant(read_pads=False), None
    for more in ({}, dict(grad_checkpointing=True), dict(micro_batch=5)):
        done = train_variant(replace(arm, epochs=1, lr=0., weight_decay=0., **more), v, tmp_path)
        log = done.log()[-1]
        if whole is not None: assert abs(log["short"] - whole["short"]) < 1e-4 and abs(log["loss"] - whole["loss"]) < 1e-4
        whole = log


def test_what_a_variant_starts_from_is_the_arms(arm, tmp_path):
    "Trained by the trainer as it is, once, under the key it has anyway."
    web = TrainConfig(**SMALL | dict(epochs=1, data_options=dict(split="web", text="short", n=32), recipe=None, short_weight=0., context_length=28))
    config = replace(arm, init=web)
    train_variant(config, Variant(count=1), tmp_path)
    assert {f.name for f in tmp_path.iterdir()} == {model_key(web), variant_key(config, Variant(count=1))}
    from_file = replace(config, init=str(tmp_path/model_key(web)/"model.safetensors"))
    assert same_bits(train_variant(from_file, Variant(count=1), tmp_path/"file").weights, tmp_path/variant_key(config, Variant(count=1))/"model.safetensors")


# ---- keys

def test_no_two_models_share_a_key(arm):
    values = dict(keep_order=True, count=2, pad_share=.25, read_pads=False, pad_long=True)
    assert values.keys() == {f.name for f in fields(Variant)}                      # a new field belongs here
    some = [Variant(**dict(c)) for n in range(6) for c in itertools.combinations(values.items(), n)]
    keys = [variant_key(c, v) for c in (arm, replace(arm, seed=1), replace(arm, short_weight=.5)) for v in some]
    assert len(set(keys)) == len(keys) == 3*32
    assert variant_key(arm, PAPER) == model_key(arm) and variant_key(arm, Variant(pad_share=1)) == model_key(arm)


def test_other_code_is_another_model(arm, monkeypatch):
    before = variant_key(arm, Variant(count=1)), variant_key(arm, PAPER)
    monkeypatch.setattr(variants, "_code", lambda: "changed")
    assert variant_key(arm, Variant(count=1)) != before[0] and variant_key(arm, PAPER) == before[1]
    monkeypatch.undo(); monkeypatch.setattr(trainer, "_code", lambda: "changed")
    assert variant_key(arm, Variant(count=1)) != before[0] and variant_key(arm, PAPER) != before[1]


# ---- what stops before it starts

@pytest.mark.parametrize("field, value, says", [("pad_share", 1.1, "from 0 to 1"), ("pad_share", -.1, "from 0 to 1"), ("pad_share", True, "from 0 to 1"), ("pad_share", float("nan"), "from 0 to 1"), ("count", 0, "1 or more"),
                                                ("count", 1.5, "whole number"), ("count", True, "whole number"), ("keep_order", 1, "true or false"), ("read_pads", None, "true or false"), ("pad_long", "no", "true or false")])
def test_values_that_cannot_be_meant(field, value, says):
    with pytest.raises(ValueError, match=f"{field} .*{says}"): Variant(**{field: value})


@pytest.mark.parametrize("recipe, variant, says", [(None, Variant(count=1), "no short caption to vary"), ("no_summary", Variant(keep_order=True), "draws none"), ("long_clip", Variant(count=2), "draws none"),
                                                   ("sampled", Variant(pad_share=.5), "has none"), ("sampled", Variant(read_pads=False), "has none")])
def test_a_variant_that_would_change_nothing_is_refused(arm, recipe, variant, says, tmp_path):
    config = replace(arm, recipe=recipe, short_weight=arm.short_weight if recipe else 0.)
    with pytest.raises(ValueError, match=says): train_variant(config, variant, tmp_path)
    assert not list(tmp_path.iterdir())
    check_variant(config, PAPER)


def test_siglip_reads_its_pads(starts, arm, tmp_path):
    config = replace(arm, backbone="scenes-siglip", init=starts["scenes-siglip"])
    with pytest.raises(ValueError, match="scenes-siglip reads all its pads by nature"): train_variant(config, Variant(read_pads=False), tmp_path)
    for v in (Variant(pad_share=.5), Variant(pad_long=True)): assert train_variant(config, v, tmp_path).weights.is_file()
    check_variant(replace(arm, recipe="sampled"), Variant(pad_long=True, read_pads=False))
