"""Sweeps: arms and variants side by side, the plan of them, and long text drawn against short text."""
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot as plt

from debias_clip.report import planned_models, score_arms
from debias_clip.runs import notebook_defaults, read_yaml
from debias_clip.sweeps import planned_variants, plane, sweep_arms
from debias_clip.train import TrainConfig, arm_config, model_key
from debias_clip.variants import Variant, variant_key

REPO = Path(__file__).parents[1]
PRESETS = ["smoke", "toy", "paper-b16", "paper-l14"]
FINE = dict(data="scenes", data_options=dict(split="train", n=16), backbone="scenes-clip", context_length=88, keep=8, epochs=1, batch_size=8, pca_dim=4, lr=1e-3, warmup=1)
PRE = dict(data="scenes", data_options=dict(split="web", text="short", n=16), recipe=None, short_weight=0., context_length=28, keep=8, epochs=1, batch_size=8, pca_dim=4, lr=1e-3, warmup=1)
TESTS = {"own": dict(data="scenes", options=dict(split="test", n=20))}
ARMS = {"pre-trained": None, "λ_s 0": dict(recipe=None, short_weight=0.), "DeBias recipe": dict(recipe="debias")}
VARIANTS = {"one sentence": dict(count=1), "pads not read": dict(read_pads=False)}


@pytest.fixture(autouse=True)
def closed():
    with matplotlib.rc_context({"backend": "agg"}): yield
    plt.close("all")


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    "(rows, keys, folder, names in the order of training)."
    folder, order = tmp_path_factory.mktemp("swept"), []
    with pytest.MonkeyPatch.context() as patch:
        from debias_clip import report, train as trainer
        fit = trainer._fit
        patch.setattr(trainer, "_fit", lambda config, *more: (order.append((config.seed, config.recipe, Path(more[0]).name)), fit(config, *more))[1])
        return *sweep_arms(ARMS, VARIANTS, [0, 1], FINE, PRE, TESTS, str(folder)), folder, order


def test_a_sweep_is_score_arms_with_variants_beside(swept):
    rows, keys, folder, _ = swept
    want, found = score_arms(ARMS, [0, 1], FINE, PRE, TESTS, str(folder))
    plain = [{k: v for k, v in r.items() if k not in ("hits", "image_of")} for r in rows if r["arm"] in ARMS]
    assert plain == [{k: v for k, v in r.items() if k not in ("hits", "image_of")} for r in want]
    assert {k: v for k, v in keys.items() if k.split(",")[0] in ARMS} == found
    assert {(r["arm"], r["seed"]) for r in rows} == {(a, s) for a in (*ARMS, *VARIANTS) for s in (0, 1)}
    for name, given in VARIANTS.items():
        for seed in (0, 1): assert keys[f"{name}, seed {seed}"] == variant_key(arm_config(FINE, PRE, seed, {"recipe": "debias"}), Variant(**given))


def test_the_first_seed_of_everything_comes_first(swept):
    order = swept[3]
    assert [seed for seed, *_ in order] == sorted(seed for seed, *_ in order) and len(order) == 2*(1 + 2 + 2)    # a start, two arms, two variants a seed
    assert {name for *_, name in order} == {f.name for f in (swept[2]/"models").iterdir()}


def test_a_second_run_trains_nothing(swept, monkeypatch):
    from debias_clip import train as trainer
    monkeypatch.setattr(trainer, "_fit", lambda *a: pytest.fail("trained again"))
    rows, keys = sweep_arms(ARMS, VARIANTS, [1], FINE, PRE, TESTS, str(swept[2]))
    assert keys == {k: v for k, v in swept[1].items() if k.endswith("seed 1")}
    assert [r["value"] for r in rows] == [r["value"] for r in swept[0] if r["seed"] == 1]


@pytest.mark.parametrize("arms, variants, says", [(ARMS, {"x": dict(pads=1)}, "'x' has pads, and a variant knows count, keep_order, pad_long, pad_share, read_pads"), (ARMS, {"x": dict(pad_share=2)}, "from 0 to 1"),
                                                  (ARMS, {"DeBias recipe": dict(count=1)}, "DeBias recipe: an arm and a variant of one name")])
def test_what_is_wrong_is_said_before_anything_is_trained(arms, variants, says, tmp_path, monkeypatch):
    from debias_clip import train as trainer
    monkeypatch.setattr(trainer, "_fit", lambda *a: pytest.fail("trained"))
    with pytest.raises(ValueError, match=says): sweep_arms(arms, variants, [0], FINE, PRE, TESTS, str(tmp_path))


def test_a_notebook_without_variants_plans_none(): assert planned_variants(dict(arms=ARMS, seeds=[0], finetuning=FINE, pretraining=PRE)) == {} == planned_variants({})


# ---- the figure

SUMMARY = pd.DataFrame([dict(test=t, text=x, arm=a, value=w + i, low=w + i - 1, high=w + i + 2) for t, v in (("A", 10.), ("B", 50.)) for x, i in (("short", 0), ("whole caption", 3)) for a, w in (("zero", v), ("one", v + 5), ("two", v + 7))])
LINES, PLANES = {"first": {"zero": "0", "one": "0.1"}, "second": {"zero": "0", "two": "1"}}, {"A": [["A", "short"], ["A", "whole caption"]], "A against B": [["B", "short"], ["A", "whole caption"]]}


def test_points_lie_where_the_numbers_are():
    fig = plane(SUMMARY, LINES, PLANES)
    a, b = fig.axes
    data = lambda ax: [line.get_xydata().tolist() for line in ax.lines if line.get_label() in LINES]
    assert data(a) == [[[10, 13], [15, 18]], [[10, 13], [17, 20]]] and data(b) == [[[50, 13], [55, 18]], [[50, 13], [57, 20]]]
    assert sorted(t.get_text() for t in a.texts) == ["0", "0.1", "1"]              # an arm on two lines is marked once
    assert b.get_xlabel().startswith("B, short") and b.get_ylabel().startswith("A, whole caption") and a.get_xlabel().startswith("short")
    bars = np.concatenate([s for c in a.collections for s in c.get_segments()])    # one below, two above each
    assert bars.min(0).tolist() == [9, 12] and bars.max(0).tolist() == [19, 22]


def test_gains_start_at_the_origin(tmp_path):
    gains = SUMMARY[SUMMARY.arm != "zero"].assign(low=None, high=None)
    fig = plane(gains, LINES, PLANES, out=str(tmp_path), name="gains", origin="zero")
    assert [line.get_xydata()[0].tolist() for line in fig.axes[0].lines if line.get_label() in LINES] == [[0, 0], [0, 0]]
    assert (tmp_path/"gains.png").is_file()
    with pytest.raises(ValueError, match="no 'short' of 'zero' on 'A'"): plane(gains, LINES, PLANES)
    with pytest.raises(ValueError, match="no 'short' of 'one' on 'C'"): plane(SUMMARY, {"x": {"one": ""}}, {"C": [["C", "short"], ["A", "short"]]})


# ---- the presets

def parameters(preset, experiment):
    "All parameters of an experiment in a preset, without the checks of `read_preset`, which take seconds."
    settings, defaults = read_yaml(REPO/"runs"/preset/"params.yaml"), notebook_defaults(REPO/"nbs"/"experiments"/f"{experiment}.ipynb")
    return defaults | {k: v for k, v in settings["parameters"].items() if k in defaults} | settings.get(experiment, {})


@pytest.mark.parametrize("preset", PRESETS)
def test_every_name_in_a_preset_is_there(preset):
    p = parameters(preset, "tradeoff")
    assert {a for names in p["lines"].values() for a in names} <= p["arms"].keys() and "DeBias recipe" in p["arms"] and not p["arms"].keys() & p["variants"].keys()
    assert len({names[0] for names in p["lines"].values()}) == 1                   # where all lines start
    weights = [[p["arms"][a].get("short_weight", TrainConfig.short_weight) for a in names] for names in p["lines"].values()]
    assert all(w == sorted(w) and w[0] == 0 for w in weights)
    assert {test for kinds in p["planes"].values() for test, _ in kinds} <= p["tests"].keys()
    assert len(planned_variants(p)) == len(p["seeds"])*len(p["variants"])


@pytest.mark.parametrize("preset", PRESETS)
def test_a_sweep_shares_its_models(preset):
    "The paper's own arms are those of the other experiments."
    keys = lambda experiment: {model_key(c): name.rsplit(", seed", 1)[0] for name, c in planned_models(parameters(preset, experiment)).items()}
    shared = {name for key, name in keys("tradeoff").items() if key in keys("main_table") | keys("ablation")}
    assert {"DeBias recipe", "Long-CLIP recipe"} <= shared
    if preset != "smoke": assert {"Long-CLIP recipe, λ_s 0.5", "no prefix pads"} <= shared


def test_the_toy_sweep_asks_what_the_issue_asks():
    p = parameters("toy", "tradeoff")
    seen = {k for v in p["variants"].values() for k in v} | {k for a in p["arms"].values() for k in a}
    assert seen >= {"keep_order", "count", "pad_share", "read_pads", "pad_long", "pca_dim", "label_smoothing", "short_weight"} and len(p["seeds"]) == 3
