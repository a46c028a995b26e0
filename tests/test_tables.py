"""Tables: means, paired differences, what is said of them, and the paper's numbers apart."""
import json
import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from debias_clip.statistics import bootstrap_p, bootstrapped_means, holm, seed_p
from debias_clip.tables import (
    PAPER,
    PAPER_ABLATION,
    PAPER_DROPS,
    as_markdown,
    as_rows,
    clear,
    corrected,
    differences,
    gain_rows,
    headline,
    loss_rows,
    number,
    on_lines,
    pick,
    reading,
    step_differences,
    summarise,
    table,
    verdict,
    with_counts,
)

SHARED = Path(__file__).parents[2]/"shared"


def row(arm, seed, value, n=100, **more):
    "Scores of one arm on one test set; hits in the order that makes two arms agree most."
    scores = 100.*(np.arange(n) < round(value*n/100))
    labels = dict(arm=arm, seed=seed, test="t", text="whole caption", direction="t2i")
    return labels | dict(value=value, low=value - 3, high=value + 3, n=n, scores=scores) | more


def rows_of(values): return [row(arm, seed, value) for (arm, seed), value in values.items()]


# ---- means

def test_several_seeds_give_a_t_interval_over_seeds():
    s = summarise(rows_of({("a", 0): 50., ("a", 1): 52., ("a", 2): 54.}), ["arm"]).iloc[0]
    half = 4.302652729911275*2/math.sqrt(3)   # t quantile of 2 degrees of freedom
    assert (s.value, s.seeds, s.n, s.interval) == (52, 3, 100, "over seeds")
    assert (s.low, s.high) == pytest.approx((52 - half, 52 + half))


def test_one_seed_keeps_the_interval_over_images():
    s = summarise([row("a", 0, 50.)], ["arm"]).iloc[0]
    assert (s.low, s.high, s.interval) == (47, 53, "over images")


def test_one_seed_without_an_interval_gets_one_from_its_scores():
    s = summarise([row("a", 0, 50., low=None)], ["arm"]).iloc[0]
    assert 35 < s.low < 45 and 55 < s.high < 65
    bare = summarise([dict(arm="a", seed=0, value=1., low=None, high=None, n=3)], ["arm"]).iloc[0]
    assert bare.low is None and bare.high is None


def test_counts_are_the_most_of_any_seed():
    rows = [row("a", s, 50., left_out=s, cut=9 - s) for s in (1, 2)]
    s = summarise(rows, ["arm"]).iloc[0]
    assert (s.left_out, s.cut) == (2, 8)
    assert "cut" not in summarise([*rows, row("a", 3, 50., left_out=0)], ["arm"])


def test_a_seed_in_two_rows_is_refused():
    with pytest.raises(ValueError, match=r"\{'arm': 'a'\} holds seed 0 twice"):
        summarise([row("a", 0, 1.), row("a", 0, 2.)], ["arm"])


def test_nothing_measured_is_an_empty_table():
    assert summarise([], ["arm", "test"]).columns.tolist()[:3] == ["arm", "test", "value"]


# ---- differences

def test_differences_are_paired_by_seed():
    made = rows_of({("a", 0): 10., ("b", 0): 20., ("a", 1): 60., ("b", 1): 70., ("a", 2): 35., ("b", 2): 45.})
    d = differences(made, "a", ["test"]).iloc[0]
    assert (d.arm, d.value, d.low, d.high) == ("b", 10, 10, 10)   # however much the seeds differ
    more = [*made, row("a", 3, 0.), row("b", 9, 99.)]
    assert differences(more, "a", ["test"]).iloc[0].seeds == 3    # a seed that only one arm has is not compared


def test_steps_are_against_the_arm_before():
    made = rows_of({("a", 0): 40., ("b", 0): 45., ("c", 0): 43.})
    steps = step_differences(made, ["a", "b", "c"], ["test"])
    assert steps[["arm", "against", "value"]].values.tolist() == [["b", "a", 5.], ["c", "b", -2.]]


def test_one_seed_is_paired_by_image():
    d = differences([row("a", 0, 40.), row("b", 0, 45.)], "a", ["test"]).iloc[0]
    assert d.value == pytest.approx(5) and 0 < d.low < 5 < d.high < 11 and d.interval == "over images"


def test_texts_of_one_image_are_drawn_together():
    "Five copies of each caption are no more images than one: the interval must not become narrower."
    image_of = np.repeat(np.arange(100), 5)
    five = [r | dict(scores=np.repeat(r["scores"], 5), image_of=image_of) for r in (row("a", 0, 40.), row("b", 0, 45.))]
    once = differences([row("a", 0, 40.), row("b", 0, 45.)], "a", ["test"]).iloc[0]
    copied = differences(five, "a", ["test"]).iloc[0]
    assert (copied.value, copied.low, copied.high) == pytest.approx((once.value, once.low, once.high))


def test_values_of_another_column_are_compared_within_each_arm():
    made = [row(arm, 0, v, text=text) for arm, text, v in
            [("a", "full", 50.), ("a", "move", 40.), ("b", "full", 70.), ("b", "move", 65.)]]
    d = differences(made, "full", ["arm"], column="text")
    assert d[["text", "arm", "value"]].values.tolist() == [["move", "a", -10.], ["move", "b", -5.]]
    lost = loss_rows(made, "full", ["arm"], column="text")
    assert [r["value"] for r in lost] == [10., 5.] and lost[0]["scores"].mean() == pytest.approx(10)
    saved = differences(lost, "a", ["text"]).iloc[0]              # the difference of two losses
    assert saved.value == -5 and saved.low < -5 < saved.high


def test_what_cannot_be_paired_is_refused():
    a, b = row("a", 0, 40.), row("b", 0, 45.)
    with pytest.raises(ValueError, match="there is no arm 'c'; known: a, b"): differences([a, b], "c", ["test"])
    with pytest.raises(ValueError, match="there is no tokens 7"): gain_rows([a | dict(tokens=0)], 7, [], "tokens")
    with pytest.raises(ValueError, match="90 and 100 images cannot be paired"):
        differences([a, row("b", 0, 45., n=90)], "a", ["test"])
    with pytest.raises(ValueError, match="is there twice"): differences([a, a, b], "a", ["test"])
    with pytest.raises(ValueError, match="holds seed 0 twice"): differences([a, b, b], "a", ["test"])


# ---- many differences

def family(n_tests=12, seeds=5, real=3, seed=1):
    "Rows of two arms on many test sets, a few of which differ."
    g = np.random.default_rng(seed)
    return [row(arm, s, 50. + g.normal() + 6*(arm == "b" and t < real), test=f"t{t}")
            for t in range(n_tests) for s in range(seeds) for arm in "ab"]


@pytest.mark.parametrize("seeds", [5, 1])
def test_a_difference_is_clear_where_its_corrected_interval_leaves_out_zero(seeds):
    g = np.random.default_rng(0)
    made = family(seeds=seeds) if seeds > 1 else [
        row(arm, 0, 100*hits.mean(), n=300, test=f"t{t}") | dict(scores=100.*hits)
        for t in range(12) for arm, p in (("a", .5), ("b", .5 + .02*t)) for hits in [g.random(300) < p]]
    gains = differences(made, "a", ["test"])
    p = [seed_p([b["value"] - a["value"] for a, b in zip(*(pick(made, test=t, arm=arm) for arm in "ab"), strict=True)])
         for t in gains.test] if seeds > 1 else [
         bootstrap_p(bootstrapped_means(pick(made, test=t, arm="b")[0]["scores"]
                                        - pick(made, test=t, arm="a")[0]["scores"])) for t in gains.test]
    np.testing.assert_allclose(gains.p, p)
    np.testing.assert_allclose(gains.p_holm, holm(p)[0])
    ends = zip(gains.holm_low, gains.holm_high, strict=True)
    found = [verdict(low, high) != "no clear difference" for low, high in ends]
    assert found == (gains.p_holm <= .05).tolist() == [clear(r) for r in gains.to_dict("records")]
    plain = (gains.low > 0) | (gains.high < 0)
    assert plain.tolist() == (gains.p <= .05).tolist() and 0 < sum(found) < len(found) and sum(found) <= plain.sum()
    assert (gains.holm_low <= gains.low).all() and (gains.holm_high >= gains.high).all()


def test_what_rounding_leaves_of_nothing_is_no_difference():
    "Losses of .3 − .2 and of .1 − 0 are equal, though not as floats."
    made = [row(arm, s, v, text=text) for s in range(3) for arm, text, v in
            (("a", "whole", .3), ("a", "move", .2), ("b", "whole", .1), ("b", "move", 0.))]
    more = differences(loss_rows(made, "whole", ["arm"], column="text"), "a", ["text"]).iloc[0]
    assert (.3 - .2) - .1 != 0 and (more.value, more.p) == (0, 1) and not clear(more)


def test_columns_can_be_families_of_their_own():
    made = [r | dict(direction=d) for d in ("t2i", "i2t") for r in family(4)]
    apart = differences(made, "a", ["test", "direction"], family=["direction"])
    together = differences(made, "a", ["test", "direction"])
    one = differences(pick(made, direction="i2t"), "a", ["test", "direction"])
    of_i2t = pick(apart, direction="i2t").reset_index(drop=True)
    pd.testing.assert_frame_equal(of_i2t, one)
    assert (pick(together, direction="i2t").p_holm.values >= one.p_holm.values).all()
    assert len(corrected([], ["arm"])) == 0


def test_steps_are_one_family():
    made = [r | dict(arm={"a": "b", "b": "c"}[r["arm"]]) for r in family(2)] + [r for r in family(2) if r["arm"] == "a"]
    steps = step_differences(made, ["a", "b", "c"], ["test"])
    np.testing.assert_allclose(steps.p_holm, holm(steps.p)[0])
    assert len(steps) == 4


def test_what_has_no_seed_is_shown_but_not_compared():
    "The ideal reader: one row however many seeds the others have."
    made = [*rows_of({(arm, s): 40. + s for arm in "ab" for s in range(5)}), row("ideal", None, 99.)]
    s = summarise(made, ["arm"]).set_index("arm")
    assert s.seeds.to_dict() == dict(a=5, b=5, ideal=0) and s.interval["ideal"] == "over images"
    assert (s.low["ideal"], s.high["ideal"]) == (96, 102)
    assert set(differences(made, "a", ["test"]).arm) == {"b"}
    assert step_differences(made, ["a", "ideal", "b"], ["test"])[["arm", "against"]].values.tolist() == [["b", "a"]]
    moved = [r | dict(text="move", value=r["value"] - 3, scores=r["scores"]*.97) for r in made]
    lost = loss_rows([*made, *moved], "whole caption", ["arm"], column="text")
    assert summarise(lost, ["arm"]).set_index("arm").value["ideal"] == 3


def test_without_scores_one_seed_has_a_difference_and_no_interval():
    bare = [dict(arm=arm, seed=0, value=v, low=None, high=None, n=3, test="t") for arm, v in (("a", 1.), ("b", 3.))]
    d = differences(bare, "a", ["test"]).iloc[0]
    assert d.value == 2 and np.isnan([d.low, d.p, d.p_holm, d.holm_low]).all() and not clear(d)
    assert loss_rows(bare, "a", ["test"])[0]["value"] == -2
    mixed = differences([*bare, *family(2)], "a", ["test"])
    np.testing.assert_allclose(mixed.p_holm[1:], holm(mixed.p[1:])[0])


# ---- sentences

def test_numbers():
    assert number(56.26, 54.04, 58.5) == "56.3 [54.0, 58.5]" and number(5., None, None) == "5.0"
    assert number(5., math.nan, math.nan) == "5.0" and number(None, None, None) == number(math.nan, 1, 2) == "–"
    assert number(-.0004, -.0012, .1, digits=3, sign="+") == "+0.000 [-0.001, 0.100]"


@pytest.mark.parametrize("low, high, said", [
    (1., 3., "better"), (-3., -1., "worse"), (-1., 3., "no clear difference"), (math.nan, math.nan, "no interval")])
def test_a_difference_is_read_as_it_came_out(low, high, said):
    row = dict(arm="a", against="b", test="t", value=2., low=low, high=high, seeds=3, n=5, interval="over seeds")
    line = reading(pd.DataFrame([row]))
    assert line.startswith("- **a** against b, t: +2.0") and line.endswith(f" points over 3 seeds: {said}.")
    assert "nan" not in line


# ---- tables

def test_tables_keep_order():
    made = rows_of({("z", 0): 40., ("Long-CLIP recipe", 0): 45., ("a", 0): 3.})
    t = table(summarise(made, ["arm", "text", "direction"]), ["arm", "text"])
    assert t.index.tolist() == [(arm, "whole caption") for arm in ("z", "Long-CLIP recipe", "a")]
    assert t.columns.tolist() == ["text→image R@1"]
    assert t["text→image R@1"].tolist() == ["40.0 [37.0, 43.0]", "45.0 [42.0, 48.0]", "3.0 [0.0, 6.0]"]
    json.dumps(as_rows(t), allow_nan=False)


def test_what_is_clear_is_bold_and_what_is_not_is_not():
    gains = differences([row(arm, s, v + .1*s*s) for s in range(3) for arm, v in (("a", 10.), ("b", 20.))]
                        + [row("c", s, 10. + s*(s - 1)) for s in range(3)], "a", ["test"])
    shown = table(gains, ["arm"], columns="test")
    assert shown["t"].tolist() == ["**+10.0 [10.0, 10.0]**", "+0.5 [-1.9, 2.9]"]
    assert as_markdown(shown).splitlines()[-1] == "| c | +0.5 [-1.9, 2.9] |"


def test_markdown_leaves_out_what_the_row_above_has():
    made = [r | dict(test=t, text=x) for r in rows_of({("a", 0): 1., ("b", 0): 2.}) for t in "xy" for x in "uv"]
    text = as_markdown(table(summarise(made, ["test", "text", "arm", "direction"]), ["test", "text", "arm"]))
    labels = [tuple(cell.strip() for cell in line.split("|")[1:4]) for line in text.splitlines()[2:]]
    assert labels == [("x", "u", "a"), ("", "", "b"), ("", "v", "a"), ("", "", "b"),
                      ("y", "u", "a"), ("", "", "b"), ("", "v", "a"), ("", "", "b")]


def test_a_table_of_nothing_is_its_head():
    "Of arms that were not there to be compared."
    gains = differences([row("a", 0, 1.)], "a", ["test", "text"])
    assert as_markdown(table(gains, ["test", "arm"], columns="text")).splitlines()[0].startswith("| test | arm |")


def test_the_papers_numbers_are_a_table_of_their_own():
    assert PAPER.table().loc[("DeBias recipe", "short text")].tolist() == ["43.0 / 61.3 (COCO)"]
    assert PAPER_ABLATION.table().index.names == ["arm"] and len(PAPER_DROPS.table()) == 4
    for quoted in (PAPER, PAPER_ABLATION, PAPER_DROPS):
        assert quoted.source.startswith("Quoted from") and quoted.markdown().endswith(f" |\n\n{quoted.source}")


@pytest.mark.parametrize("seeds, said", [
    ([3], "seed 3"), ([0, 1], "seeds 0 and 1"), ([0, 2, 5], "seeds 0, 2 and 5"), ([0, 1, 2, 3], "seeds 0 to 3")])
def test_a_headline_names_the_seeds(seeds, said):
    assert headline("toy", seeds) == f"Preset *toy*, {said}."
    assert headline("toy", [7], {"a": {}, "b": {"seeds": seeds}}) == f"Preset *toy*: a seed 7; b {said}."


def test_a_row_says_how_many_differences_are_corrected_with_it():
    rows = rows_of({(a, s): 40. + s for a in "ab" for s in (0, 1)} | {("a", 2): 1.})
    gains = differences([r | dict(text=t) for r in rows for t in ("move", "remove")], "b", ["text", "direction"],
                        family=["direction"])
    assert gains.family.tolist() == [2]*len(gains)


def test_labels_are_shown_by_their_names():
    t = table(summarise([row("a", 0, 40., text=t) for t in ("move", "short", "behind 40 tokens of filler")],
                        ["arm", "text", "direction"]), ["arm", "text"])
    assert t.index.get_level_values("text").tolist() == ["Move", "short text", "behind 40 tokens of filler"]
    assert t.columns.tolist() == ["text→image R@1"]


def test_rows_are_grouped_by_their_first_label_whatever_the_order_of_the_scores():
    made = [r | {"test": test} for r in rows_of({("z", 0): 40., ("b", 0): 45.}) for test in ("own", "other")]
    t = table(summarise(made, ["test", "arm", "direction"]), ["test", "arm"])
    assert t.index.tolist() == [(test, arm) for test in ("own", "other") for arm in ("z", "b")]


def test_a_missing_cell_is_a_dash_and_a_missing_row_is_none():
    made = [row("a", 0, 40.), row("b", 0, 30., text="move")]
    t = table(summarise(made, ["arm", "text", "test"]), ["arm"], columns="text")
    assert t.values.tolist() == [["40.0 [37.0, 43.0]", "–"], ["–", "30.0 [27.0, 33.0]"]]
    assert table(summarise(made, ["arm", "text", "test"]), ["arm", "text"], columns="test").shape == (2, 1)


def test_counts_stand_beside_the_row():
    rows = [row("a", 0, 40., left_out=2, cut=1), row("a", 0, 30., text="move", left_out=2, cut=5)]
    summary = summarise(rows, ["arm", "text"])
    shown = with_counts(table(summary, ["arm"], columns="text"), summary)
    assert shown[["n", "left out", "cut"]].values.tolist() == [[100, 2, 5]]


def test_arms_lie_on_lines():
    made = [*rows_of({("zero", 0): 1., ("a", 0): 2., ("b", 0): 3., ("c", 0): 4.}), row("a", 1, 5.)]
    lines = {"one": ["zero", "a"], "two": ["zero", "b"]}
    found = on_lines(made, lines, dict(zero=0., a=.1, b=.5))
    assert [(r["recipe"], r["λ_s"], r["value"]) for r in found] == [
        ("one", 0, 1), ("one", .1, 2), ("one", .1, 5), ("two", 0, 1), ("two", .5, 3)]
    ideal = on_lines([row("ideal reader", None, 99.)], lines, dict(zero=0., a=.1, b=.5))
    assert [(r["recipe"], r["λ_s"]) for r in ideal] == [("ideal reader", w) for w in (0, .1, .5)]


def test_rows_are_picked_and_kept():
    made = rows_of({("a", 0): 1., ("a", 1): 2., ("b", 0): 3.})
    assert [r["value"] for r in pick(made, arm="a", seed=[1, 2])] == [2.] and pick(made, arm="c") == []
    assert pick(pd.DataFrame(made), arm="a", seed=[1, 2]).value.tolist() == [2.]
    assert as_rows(pd.DataFrame(dict(x=[1, 2], y=[.5, None]))) == [dict(x=1, y=.5), dict(x=2, y=None)]


@pytest.mark.skipif(not SHARED.is_dir(), reason="../shared is not there")
def test_quoted_numbers_stand_in_the_papers_facts():
    facts = (SHARED/"paper.md").read_text()
    for quoted in [PAPER, PAPER_ABLATION, PAPER_DROPS]:
        figures = [f for cell in quoted.cells.values() for f in re.findall(r"\d+\.\d", cell)]
        assert figures and all(f in facts for f in figures)
