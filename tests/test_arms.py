"""Arms: the plan of an experiment, one loop that trains and asks, and the answers as rows."""
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from debias_clip import arms as arms_module
from debias_clip.arms import arms_of, load_arm, measure_arms, planned_models, protocol_cards, trainable, trained_arms
from debias_clip.arms import test_records as records_of
from debias_clip.config import RunOptions, arm_config, model_key, read_config
from debias_clip.core import read_yaml
from debias_clip.measures import claim_rows, score
from debias_clip.pairs import Normalize
from debias_clip.preset import notebook_defaults
from debias_clip.tables import differences, pick, summarise
from debias_clip.tokens import get_tokenizer

REPO = Path(__file__).parents[1]
TRANSFORM = Normalize((.5, .5, .5), (.25, .25, .25))
FINE = dict(data="scenes", data_options=dict(split="train", n=16), backbone="scenes-clip", context_length=88, keep=8,
            epochs=1, batch_size=8, pca_dim=4, lr=1e-3, warmup=1)
PRE = dict(data="scenes", data_options=dict(split="web", text="web", n=16), recipe=None, short_weight=0.,
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


# ---- the ideal reader

class Reader(nn.Module):
    "Stands in for the ideal reader: features without sense, by no transformer."
    context_length = 88
    visual = SimpleNamespace(preprocess_cfg=dict(mean=(0., 0., 0.), std=(1., 1., 1.)))

    def __init__(self):
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(1))

    def encode_image(self, images): return images.float().flatten(1)[:, :4] + 1
    def encode_text(self, rows, normalize=False): return rows.float()[:, 1:5]


@pytest.fixture
def ideal(monkeypatch):
    "The module that has the ideal reader; counts how often it is loaded."
    loads = []
    def load_ideal():
        loads.append(1)
        return Reader().eval(), None, get_tokenizer("scenes-clip", 88)
    monkeypatch.setitem(sys.modules, "debias_clip.ideal", SimpleNamespace(load_ideal=load_ideal))
    return loads


WITH_IDEAL = EXPERIMENT | dict(arms={"ideal reader": "ideal"} | ARMS)

def test_the_ideal_reader_is_asked_once_and_never_trained():
    assert planned_models(WITH_IDEAL) == planned_models(EXPERIMENT) and arms_of(WITH_IDEAL) == arms_of(EXPERIMENT)
    asked = [arm for arm in arms_of(WITH_IDEAL, ideal=True) if arm.arm == "ideal reader"]
    assert [(arm.label, arm.labels) for arm in asked] == [("ideal reader", dict(arm="ideal reader", seed=None))]
    assert trainable(WITH_IDEAL["arms"]) == list(ARMS)
    two = WITH_IDEAL | dict(arms={"ideal reader": "ideal"}, backbones={"scenes-clip": {}, "scenes-siglip": {}})
    assert sum(arm.arm == "ideal reader" for arm in arms_of(two, ideal=True)) == 2


def test_the_ideal_reader_is_loaded_and_not_trained(ideal):
    arm = arms_of(WITH_IDEAL, ideal=True)[0]
    (model, transform, tok), key = load_arm(arm, "nowhere")
    assert isinstance(model, Reader) and transform is None and key is None and tok.context_length == 88


def test_a_misspelt_ideal_is_named():
    with pytest.raises(ValueError, match="arm best: there is no kind of arm 'ideel'; did you mean ideal"):
        arms_of(EXPERIMENT | dict(arms={"best": "ideel"}))


def test_the_ideal_reader_stands_beside_arms_of_several_seeds(measured, ideal):
    "One row of it and two of each arm: all are summarised, and only the arms are compared."
    rows, keys = measure_arms(claim_rows, WITH_IDEAL, TESTS, str(measured[2]))
    assert ideal == [1] and keys == measured[1]
    assert [r["seed"] for r in pick(rows, arm="ideal reader", what="text", text="whole caption")] == [None, None]
    texts = pick(rows, what="text")
    summary = summarise(texts, ["test", "text", "arm", "direction"])
    of_ideal = pick(summary, arm="ideal reader")
    assert (of_ideal.seeds == 0).all() and (of_ideal.interval == "over images").all() and of_ideal.low.notna().all()
    assert set(pick(summary, arm="pre-trained").seeds) == {2}
    gains = differences(texts, "pre-trained", ["test", "text", "direction"])
    assert set(gains.arm) == set(ARMS) - {"pre-trained"} and np.isfinite(gains.p_holm).all()
    without, _ = measure_arms(claim_rows, WITH_IDEAL, TESTS, str(measured[2]), ideal=False)
    assert "ideal reader" not in {r["arm"] for r in without}


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


@pytest.mark.parametrize("preset, seeds, fields, pads", [
    ("toy", 3, {"recipe", "read_pads", "short_weight"}, {"random_pads"}),
    ("paper-b16", 1, {"recipe", "read_pads", "short_weight", "pca_dim", "label_smoothing"},
     {"random_pads", "random_pads(share=0.5)"}),
])
def test_the_sweep_asks_for_every_detail(preset, seeds, fields, pads):
    p = parameters(preset, "tradeoff")
    assert {name for arm in p["arms"].values() for name in arm} >= fields and len(p["seeds"]) == seeds
    recipes = {arm.start.recipe for arm in arms_of(p)}
    assert {tuple(map(str, r.short)) for r in recipes if r} >= {("drop_summary", "draw", "in_order"),
                                                                ("drop_summary", "draw(count=1)")}
    assert {str(r.short_pads) for r in recipes if r} >= pads
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
