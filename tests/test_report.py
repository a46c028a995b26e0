"""Tables and figures: means, paired differences, and the paper's numbers apart."""
import math, re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from debias_clip import report
from debias_clip.report import PAPER, PAPER_ABLATION, PAPER_DROPS, differences, dots, number, reading, score_arms, summarise, table, test_records as records_of

SHARED = Path(__file__).parents[2]/"shared"


def rows(values, n=100):
    "Scores of {(arm, seed): percent} on one test set; hits in the order that makes two arms agree most."
    return [dict(arm=arm, seed=seed, test="t", text="whole caption", direction="t2i", value=v, low=v - 3, high=v + 3, n=n, left_out=0, hits=np.arange(n) < round(v*n/100), image_of=None)
            for (arm, seed), v in values.items()]


def test_several_seeds_give_a_t_interval_over_seeds():
    s = summarise(rows({("a", 0): 50., ("a", 1): 52., ("a", 2): 54.}), ["arm"]).iloc[0]
    half = 4.302652729911275*2/math.sqrt(3)   # t quantile of 2 degrees of freedom
    assert (s.value, s.seeds, s.interval) == (52, 3, "over seeds")
    assert (s.low, s.high) == pytest.approx((52 - half, 52 + half))


def test_one_seed_keeps_the_interval_over_images():
    s = summarise(rows({("a", 0): 50.}), ["arm"]).iloc[0]
    assert (s.low, s.high, s.interval) == (47, 53, "over images")


def test_differences_are_paired_by_seed():
    made = rows({("a", 0): 10., ("b", 0): 20., ("a", 1): 60., ("b", 1): 70., ("a", 2): 35., ("b", 2): 45.})
    d = differences(made, "a", ["test"]).iloc[0]
    assert (d.arm, d.value, d.low, d.high) == ("b", 10, 10, 10)   # every seed gains ten, however much the seeds differ
    alone = differences(made + rows({("a", 3): 0.}), "a", ["test"]).iloc[0]
    assert alone.seeds == 3   # a seed that only one arm has is not compared


def test_one_seed_is_paired_by_image():
    d = differences(rows({("a", 0): 40., ("b", 0): 45.}), "a", ["test"]).iloc[0]
    assert d.value == pytest.approx(5) and 0 < d.low < 5 < d.high and d.interval == "over images"
    with pytest.raises(ValueError, match="no arm 'c'"): differences(rows({("a", 0): 40.}), "c", ["test"])


def test_a_seed_in_two_rows_is_refused():
    with pytest.raises(ValueError, match="seed 0 twice"): summarise(rows({("a", 0): 1.}) + rows({("a", 0): 2.}), ["arm"])


def test_tables_keep_order_and_quote_apart():
    made = rows({("z", 0): 40., ("Long-CLIP recipe", 0): 45., ("a", 0): 3.})
    t = table(summarise(made, ["arm", "text", "direction"]), ["arm", "text"], PAPER)
    assert t.arm.tolist() == ["z", "Long-CLIP recipe", "a"]
    assert t.columns.tolist() == ["arm", "text", "text→image R@1", "paper, real data (quoted)"]
    assert t["paper, real data (quoted)"].tolist() == ["–", "71.4 / 63.1 (DOCCI)", "–"]
    assert t["text→image R@1"].tolist() == ["40.0 [37.0, 43.0]", "45.0 [42.0, 48.0]", "3.0 [0.0, 6.0]"]


def test_rows_are_grouped_by_their_first_label_whatever_the_order_of_the_scores():
    made = [r | {"test": test} for r in rows({("z", 0): 40., ("b", 0): 45., ("a", 0): 3.}) for test in ("own", "other")]
    t = table(summarise(made, ["test", "arm", "direction"]), ["test", "arm"])
    assert list(zip(t.test, t.arm)) == [(test, arm) for test in ("own", "other") for arm in ("z", "b", "a")]


def test_a_missing_cell_is_a_dash_not_a_number():
    made = rows({("a", 0): 40.}) + [rows({("b", 0): 30.})[0] | {"text": "move"}]
    t = table(summarise(made, ["arm", "text", "direction"]), ["arm"], columns="text")
    assert t.loc[0].tolist() == ["a", "40.0 [37.0, 43.0]", "–"]


@pytest.mark.parametrize("low, high, verdict", [(1., 3., "better"), (-3., -1., "worse"), (-1., 3., "not told apart"), (float("nan"), float("nan"), "no interval")])
def test_a_difference_is_read_as_it_came_out(low, high, verdict):
    gains = pd.DataFrame([dict(arm="a", test="t", value=2., low=low, high=high, seeds=3, interval="over seeds")])
    assert reading(gains, "b").endswith(f": {verdict}.")


def test_numbers():
    assert number(56.26, 54.04, 58.5) == "56.3 [54.0, 58.5]" and number(5., None, None) == "5.0"


def test_figures_are_saved_in_the_runs_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "run_folder", lambda out: tmp_path)
    fig = dots(summarise(rows({("a", 0): 40., ("b", 0): 45.}), ["arm", "test", "text"]), "runs/x", "fig")
    assert (tmp_path/"fig.png").stat().st_size > 3000 and [t.get_text() for t in fig.axes[0].get_yticklabels()] == ["a", "b"]


def test_a_test_set_with_a_typo_is_refused():
    with pytest.raises(ValueError, match="not option"): records_of({"data": "scenes", "option": {}})


def test_arms_share_their_start_and_are_scored_on_the_same_captions(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "run_folder", lambda out: tmp_path)
    start = dict(data="scenes", data_options=dict(split="web", text="short", n=40), recipe=None, short_weight=0., epochs=1, batch_size=40, lr=1e-3, warmup=0, context_length=28, keep=8)
    shared = dict(data="scenes", data_options=dict(n=40), backbone="scenes-clip", epochs=1, batch_size=40, lr=1e-3, warmup=0, context_length=88, keep=8)
    found, keys = score_arms({"start": None, "debias": {"recipe": "debias"}}, [0], shared, start, {"t": {"data": "scenes", "options": dict(split="val", n=20)}}, "x", ("full", "move"))
    assert sorted(p.name for p in (tmp_path/"models").iterdir() if p.name in keys.values()) == sorted(keys.values()) and list(keys) == ["debias, seed 0"]
    assert len({(r["text"], r["direction"], r["n"]) for r in found}) == len(found)//2


@pytest.mark.skipif(not SHARED.is_dir(), reason="../shared is not there")
def test_quoted_numbers_stand_in_the_papers_facts():
    facts = (SHARED/"paper.md").read_text()
    for quoted in [PAPER, PAPER_ABLATION, PAPER_DROPS]:
        for cell in quoted.values():
            for figure in re.findall(r"\d+\.\d", cell): assert figure in facts, cell
