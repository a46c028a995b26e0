"""Arms: the plan of an experiment, one loop that trains and asks, and the answers as rows."""
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from debias_clip import arms as arms_module
from debias_clip.arms import (
    arms_of,
    attention_rows,
    embedding_rows,
    matrix_rows,
    measure_arms,
    order_rows,
    pair_rows,
    planned_models,
    protocol_cards,
    push_rows,
    score,
    shortsight_rows,
    similarity_rows,
    trained_arms,
)
from debias_clip.arms import test_records as records_of
from debias_clip.attention import by_sentence, read_captions
from debias_clip.config import RunOptions, arm_config, model_key, read_config
from debias_clip.core import read_yaml
from debias_clip.models import create_model
from debias_clip.order import order_matrix, order_ranks, push_ranks
from debias_clip.pairs import Normalize
from debias_clip.preset import notebook_defaults
from debias_clip.records import Records
from debias_clip.results import write_metrics
from debias_clip.scenes import scene_records
from debias_clip.similarity import added, alone, cosines, growth
from debias_clip.tables import as_rows, pick, summarise, table, with_counts
from debias_clip.tokens import get_tokenizer

REPO = Path(__file__).parents[1]
TRANSFORM = Normalize((.5, .5, .5), (.25, .25, .25))
FINE = dict(data="scenes", data_options=dict(split="train", n=16), backbone="scenes-clip", context_length=88, keep=8,
            epochs=1, batch_size=8, pca_dim=4, lr=1e-3, warmup=1)
PRE = dict(data="scenes", data_options=dict(split="web", text="short", n=16), recipe=None, short_weight=0.,
           context_length=28, keep=8, epochs=1, batch_size=8, lr=1e-3, warmup=1)
ONE_SENTENCE = {"short": ["drop_summary", {"draw": {"count": 1}}], "short_pads": "random_pads"}
ARMS = {"pre-trained": None, "DeBias recipe": {"recipe": "debias"}, "one sentence": {"recipe": ONE_SENTENCE},
        "pads not read": {"recipe": "debias", "read_pads": False}}
EXPERIMENT = dict(arms=ARMS, seeds=[0, 1], finetuning=FINE, pretraining=PRE)
TESTS = {"own": dict(data="scenes", options=dict(split="test", n=20))}


# ---- the plan

def test_arms_come_seed_by_seed_within_each_backbone():
    two = EXPERIMENT | dict(backbones={"scenes-clip": {}, "scenes-siglip": {"finetuning": {"batch_size": 16}}},
                            arms={"start": None, "new": {"recipe": "sampled"}})
    listed = arms_of(two, workers=3)
    assert [a.label for a in listed[:4]] == [f"scenes-clip, {n}, seed {s}" for s in (0, 1) for n in ("start", "new")]
    assert [a.start.batch_size for a in listed] == [8]*4 + [16]*4 and {a.options.workers for a in listed} == {3}
    assert listed[0].config is None and listed[1].config == listed[1].start
    assert listed[0].labels == dict(backbone="scenes-clip", arm="start", seed=0)
    assert arms_of(EXPERIMENT)[0].labels == dict(arm="pre-trained", seed=0)


def test_how_an_arm_is_trained_is_no_part_of_what_it_learns():
    told = EXPERIMENT | dict(finetuning=FINE | dict(root="here", save_every=5, micro_batch=4))
    assert [a.start for a in arms_of(told)] == [a.start for a in arms_of(EXPERIMENT)]
    assert arms_of(told)[0].options.micro_batch == 4 and arms_of(told)[0].options.root_of("scenes") == "here"


def test_starts_are_planned_once_and_before_what_starts_from_them():
    plan = planned_models(EXPERIMENT)
    assert list(plan)[:4] == ["start, seed 0", *(f"{arm}, seed 0" for arm in list(ARMS)[1:])] and len(plan) == 8
    assert plan["DeBias recipe, seed 0"].init == plan["start, seed 0"]


def test_starts_of_starts_have_labels_of_their_own():
    deep = PRE | {"init": {**PRE, "backbone": "scenes-clip", "init": {**PRE, "backbone": "scenes-clip", "lr": 5e-4}}}
    plan = planned_models(EXPERIMENT | dict(seeds=[0], pretraining=deep, arms={"a": {}, "b": {}}))
    assert list(plan) == ["start of the start of the start, seed 0", "start of the start, seed 0", "start, seed 0",
                          "a, seed 0", "b, seed 0"]
    chain = list(plan.values())
    assert [c.init for c in chain[1:4]] == chain[:3]


def test_an_arm_with_a_start_of_its_own_has_it_planned():
    own = {"a": {}, "b": {"init": PRE | {"backbone": "scenes-clip", "lr": 5e-4}}}
    plan = planned_models(EXPERIMENT | dict(seeds=[0], arms=own))
    assert list(plan) == ["start, seed 0", "a, seed 0", "start of b, seed 0", "b, seed 0"]


def test_the_second_model_of_the_pictures_is_planned():
    judge = dict(backbone="scenes-clip", pretrained=None, seed=7)
    plan = planned_models(EXPERIMENT | dict(judge=judge))
    assert plan["second model"] == arm_config({"backbone": "scenes-clip"} | PRE, {}, 7, {})
    assert "second model" not in planned_models(EXPERIMENT | dict(judge=judge | dict(seed=0)))   # the arms' own start
    assert "second model" not in planned_models(EXPERIMENT | dict(judge=judge | dict(pretrained="openai")))


def test_a_notebook_without_arms_plans_nothing(): assert planned_models(dict(seeds=[0])) == {}


@pytest.mark.parametrize("fields, says", [
    ({"recipe": {"short": ["drop_sumary"]}}, "drop_summary"), ({"receipt": "debias"}, "recipe"),
    ({"recipe": {"short": ["draw"], "short_pads": {"random_pads": {"share": 2}}}}, "from 0 to 1")])
def test_what_is_wrong_is_said_before_anything_is_trained(fields, says, tmp_path, monkeypatch):
    monkeypatch.setattr(arms_module, "train", lambda *a: pytest.fail("trained"))
    wrong = EXPERIMENT | dict(arms=ARMS | {"x": fields})
    with pytest.raises(ValueError, match=says): measure_arms(score, wrong, TESTS, str(tmp_path))


# ---- the loop

@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    "(rows, keys, folder, names of the models in the order of training)."
    folder = tmp_path_factory.mktemp("measured")
    rows, keys = measure_arms(score, EXPERIMENT, TESTS, str(folder))
    made = sorted((folder/"models").iterdir(), key=lambda f: (f/"model.safetensors").stat().st_mtime_ns)
    return rows, keys, folder, [f.name for f in made]


def test_every_model_of_the_plan_is_trained_in_its_order(measured):
    keys, plan = measured[1], {name: model_key(config) for name, config in planned_models(EXPERIMENT).items()}
    assert keys == {name: key for name, key in plan.items() if not name.startswith("start")}
    assert measured[3] == list(plan.values())                     # so the first seed of all comes first


def test_a_second_run_trains_nothing(measured, monkeypatch):
    from debias_clip import train as trainer
    monkeypatch.setattr(trainer, "fit", lambda *a: pytest.fail("trained again"))
    rows, keys = measure_arms(score, EXPERIMENT | dict(seeds=[1]), TESTS, str(measured[2]))
    assert keys == {name: key for name, key in measured[1].items() if name.endswith("seed 1")}
    assert [r["value"] for r in rows] == [r["value"] for r in measured[0] if r["seed"] == 1]


def test_arms_are_scored_on_the_same_captions(measured):
    rows = measured[0]
    assert {(r["arm"], r["seed"]) for r in rows} == {(a, s) for a in ARMS for s in (0, 1)}
    assert len({(r["text"], r["direction"], r["n"]) for r in rows}) == len(rows)//8
    assert {r["text"] for r in rows} == {"whole caption", "short"} and {r["test"] for r in rows} == {"own"}


def test_models_that_are_there_can_be_looked_at(measured):
    found = trained_arms(EXPERIMENT | dict(out=str(measured[2])))
    assert [name for name, _ in found] == list(ARMS)
    one, two = (load()[0].positional_embedding for _, load in found[:2])
    assert not torch.equal(one, two)


def test_models_that_are_not_there_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"runs/x holds no trained model for start, seed 0; DeBias recipe, seed 0; .*"
                                         "`debias-clip run x` makes them"):
        trained_arms(EXPERIMENT | dict(out="runs/x"), tmp_path)


def test_the_loop_asks_everything_once(monkeypatch, tmp_path):
    "Every arm, seed, backbone and test set, in that order; nothing is trained for the start; workers reach both."
    trained = []

    class Model:
        def __init__(self, name): self.name = name
        def to(self, device): return self

    class Found:
        def __init__(self, config): self.key = f"{config.recipe and 'new'} {config.seed} {config.backbone}"
        def load(self): return Model(self.key), None, None

    def fake_train(config, models, options):
        trained.append(options.workers)
        return Found(config)

    monkeypatch.setattr(arms_module, "train", fake_train)
    monkeypatch.setattr(arms_module, "starting_model", lambda *a: (Model("start"), None, None))
    monkeypatch.setattr(arms_module, "images_transform", lambda *a: None)
    monkeypatch.setattr(arms_module, "test_records", lambda source: source)
    def ask(model, transform, tok, records, workers): return [dict(model=model.name, of=records["data"], w=workers)]
    told = dict(arms={"old": None, "new": {}}, seeds=[0, 1], finetuning=FINE, pretraining={},
                backbones={"scenes-clip": {}, "scenes-siglip": {}})
    rows, keys = measure_arms(ask, told, dict(a=dict(data="x"), b=dict(data="y")), str(tmp_path), workers=2)
    want = [dict(backbone=b, arm=arm, seed=s, test=t, model="start" if arm == "old" else f"new {s} {b}", of=of, w=2)
            for b in told["backbones"] for s in (0, 1) for arm in ("old", "new") for t, of in (("a", "x"), ("b", "y"))]
    assert rows == want and trained == [2]*4
    assert keys == {f"{b}, new, seed {s}": f"new {s} {b}" for b in told["backbones"] for s in (0, 1)}


def test_a_test_set_with_a_typo_is_refused():
    with pytest.raises(ValueError, match="did you mean options"): records_of({"data": "scenes", "option": {}})


def test_cards_are_of_each_backbone_and_test_set():
    cards = protocol_cards(TESTS, EXPERIMENT | dict(backbones={"scenes-clip": {}, "scenes-siglip": {}}))
    assert list(cards) == ["scenes-clip, own", "scenes-siglip, own"] and cards["scenes-clip, own"]["texts"] == 20
    assert list(protocol_cards(TESTS, EXPERIMENT)) == ["own"]


# ---- the presets

PRESETS = ["smoke", "toy", "paper-b16", "paper-l14"]


def parameters(preset, experiment):
    "All parameters of an experiment in a preset, without the checks of `read_preset`, which take seconds."
    settings = read_yaml(REPO/"runs"/preset/"params.yaml")
    defaults = notebook_defaults(REPO/"nbs"/"experiments"/f"{experiment}.ipynb")
    common = {name: value for name, value in settings["parameters"].items() if name in defaults}
    return defaults | common | settings.get(experiment, {})


@pytest.mark.parametrize("preset", PRESETS)
def test_every_name_in_a_preset_is_there(preset):
    p = parameters(preset, "tradeoff")
    on_a_line = [arm for names in p["lines"].values() for arm in names]
    assert set(on_a_line) <= p["arms"].keys() and "DeBias recipe" in p["arms"]
    assert len({names[0] for names in p["lines"].values()}) == 1                   # where all lines start
    weights = {arm.arm: arm.start.short_weight for arm in arms_of(p)}
    for names in p["lines"].values():
        along = [weights[name] for name in names]
        assert along == sorted(along) and along[0] == 0
    assert {test for kinds in p["planes"].values() for test, _ in kinds} <= p["tests"].keys()


@pytest.mark.parametrize("preset", PRESETS)
def test_a_sweep_shares_its_models(preset):
    "The paper's own arms are those of the other experiments."
    others = [c for name in ("main_table", "ablation") for c in planned_models(parameters(preset, name)).values()]
    sweep = planned_models(parameters(preset, "tradeoff"))
    shared = {label.rsplit(", seed", 1)[0] for label, config in sweep.items() if config in others}
    assert {"DeBias recipe", "Long-CLIP recipe"} <= shared
    if preset != "smoke": assert {"Long-CLIP recipe, λ_s 0.5", "no prefix pads"} <= shared


def test_the_toy_sweep_asks_for_every_detail():
    p = parameters("toy", "tradeoff")
    seen = {name for arm in p["arms"].values() for name in arm}
    assert seen >= {"recipe", "read_pads", "pca_dim", "label_smoothing", "short_weight"} and len(p["seeds"]) == 3
    recipes = {arm.start.recipe for arm in arms_of(p)}
    assert {tuple(map(str, r.short)) for r in recipes if r} >= {("drop_summary", "draw", "in_order"),
                                                                ("drop_summary", "draw(count=1)")}
    assert {str(r.short_pads) for r in recipes if r} >= {"random_pads", "random_pads(share=0.5)"}
    assert any(r and r.long_pads for r in recipes)


@pytest.mark.parametrize("preset", ["paper-b16", "paper-l14"])
def test_the_papers_pca_is_of_64_samples(preset):
    for arm in arms_of(parameters(preset, "main_table")): assert arm.start.pca_group == 64


def test_the_configuration_for_torchrun_is_the_presets_arm():
    config, options = read_config(REPO/"runs"/"paper-b16"/"debias.yaml")
    arm = next(arm for arm in arms_of(parameters("paper-b16", "main_table")) if arm.arm == "DeBias recipe")
    assert config == arm.config and isinstance(options, RunOptions)
    assert options.save_every == arm.options.save_every == 500
    assert options.root_of("sharegpt4v") == arm.options.root_of("sharegpt4v") == "data/sharegpt4v"


# ---- what is asked, as rows

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
        mean, worst, best = (pick(rows, change="shuffled", order=o, direction=d)[0] for o in ("mean", "worst", "best"))
        each = [recall(found["shuffle", s], d) for s in range(3)]
        assert np.isclose(mean["value"], np.mean(each)) and mean["n"] == 40 - left_out
        assert worst["value"] <= min(each) and best["value"] >= max(each)
    assert not pick(matrix_rows(*asked, places=3, shuffles=0), change="shuffled")


def test_what_was_not_read_stands_beside_every_mean(asked):
    "Of long captions, by a model that reads 36 tokens: in the summary, and in a table of several columns."
    model, tok = create_model("scenes-clip", context_length=36, keep=8).eval(), get_tokenizer("scenes-clip", 36)
    rows = [r | dict(arm="x", seed=s) for r in order_rows(model, TRANSFORM, tok, asked[3], 2, 2) for s in (0, 1)]
    summary = pick(summarise(rows, ["arm", "change", "order", "direction"]), direction="t2i")
    by_order = summary.set_index("order")
    cut = sum(len(tok.encode(" ".join(c[:2]))) > tok.room for c in asked[3].captions)
    assert by_order.cut["First 2"] == cut > 0 == by_order.cut["mean"]
    assert by_order.n["mean"] + by_order.left_out["mean"] == 40
    assert by_order.left_out["mean"] > by_order.left_out["First 2"] == 0
    shown = with_counts(table(summary, ["arm", "change"], columns="order"), summary)
    assert shown.loc["x", "two sentences"][["n", "left out", "cut"]].tolist() == [40, 0, cut]
    assert shown.loc["x", "shuffled"][["n", "left out", "cut"]].tolist() == [by_order.n["mean"],
                                                                              by_order.left_out["mean"], 0]


def test_all_rows_can_be_summarised_and_kept(asked, tmp_path, monkeypatch):
    "Also over seeds, and whatever is None or NaN on the way."
    found, told = arms_module.falls(*asked)
    noticed = found.assign(fall=.1 + .05*(found.place == 1))   # random weights notice nothing, and would give no rows
    monkeypatch.setattr(arms_module, "falls", lambda *a, **k: (noticed, told))
    rows = dict(attention=attention_rows(*asked), embedding=embedding_rows(*asked), order=order_rows(*asked, 2, 2))
    assert {"index", "place", "sentence"} <= {r["what"] for r in rows["embedding"]}
    by = dict(attention=["what", "layer", "x"], embedding=["what", "x"], order=["change", "order", "direction"])
    for name in rows:
        for seeds in ([0], [0, 1]):
            summary = summarise([r | dict(seed=s) for r in rows[name] for s in seeds], by[name])
            assert summary.value.notna().all()
            write_metrics(str(tmp_path), name, {"table": as_rows(summary)})


def test_shortsight_rows_of_a_model_that_notices_nothing(asked, monkeypatch):
    found, told = arms_module.falls(*asked)
    monkeypatch.setattr(arms_module, "falls", lambda *a, **k: (found.assign(fall=0.), told))
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
    assert all(r["left_out"] >= cut == r["cut"] for r in pick(rows, what=["alone", "added", "share", "growth", "slope"]))
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
