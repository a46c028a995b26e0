"""Figures show what they are given: points, lines and a plane."""
import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot as plt

from debias_clip.figures import LOOKS, counted_panels, curves, dots, looks, plane, rests_on

@pytest.fixture(autouse=True)
def closed():
    with matplotlib.rc_context({"backend": "agg"}): yield
    plt.close("all")


def legend(fig): return [t.get_text() for t in fig.legends[0].get_texts()]


def fits(fig):
    "Whether all entries of the legend lie within the figure."
    fig.canvas.draw()
    boxes = [t.get_window_extent() for t in fig.legends[0].get_texts()]
    return all(0 <= b.x0 and b.x1 <= fig.bbox.x1 for b in boxes)


# ---- dots

SCORES = pd.DataFrame([dict(arm=a, test=t, text=x, value=v, low=v - 3, high=v + 3) for a, v in (("b", 40.), ("a", 45.))
                       for t in ("own", "other") for x in ("whole caption", "short")])


def points(ax): return [c.lines[0].get_xdata().tolist() for c in ax.containers]


def test_dots_stand_where_the_numbers_are(tmp_path):
    "A line of panels for each text, a panel for each test set; an arm has its place and its colour in all."
    fig = dots(SCORES, str(tmp_path), "fig", zero=True)
    assert (tmp_path/"fig.png").stat().st_size > 3000
    assert [ax.get_title() for ax in fig.axes] == [f"{t}: {x}" for x in ("whole caption", "short text")
                                                   for t in ("own", "other")]
    assert [t.get_text() for t in fig.axes[0].get_yticklabels()] == ["b", "a"] and fig.axes[0].get_ylim() == (1.5, -.5)
    assert all(points(ax) == [[40], [45]] for ax in fig.axes)
    assert [c.lines[0].get_ydata().tolist() for c in fig.axes[0].containers] == [[0], [1]]
    spans = [c.lines[2][0].get_segments()[0][:, 0].tolist() for c in fig.axes[0].containers]
    assert spans == [[37, 43], [42, 48]] and len({ax.get_xlim() for ax in fig.axes}) == 1
    assert len({tuple(c.lines[0].get_color() for c in ax.containers) for ax in fig.axes}) == 1


def test_dots_without_intervals():
    fig = dots(SCORES.assign(low=None, high=None).query("text == 'short'"))
    assert [ax.get_title() for ax in fig.axes] == ["own", "other"]
    assert not fig.axes[0].containers[0].has_xerr


def test_an_arm_looks_the_same_everywhere():
    names = ["DeBias recipe", "one detail", "Long-CLIP recipe"]
    assert looks(pd.DataFrame(dict(arm=names)), "arm")["DeBias recipe"] == looks(
        pd.DataFrame(dict(arm=names[::-1])), "arm")["DeBias recipe"]
    colours = [LOOKS[name][0] for name in ("pre-trained", "Long-CLIP recipe", "DeBias recipe")]
    assert len(set(colours)) == 3 and LOOKS["DeBias recipe"] == LOOKS["+ prefix padding"]       # one model


def test_what_is_all_of_one_arm_looks_like_it():
    of = looks(pd.DataFrame(dict(arm="DeBias recipe", text=["move", "remove"])), "text")
    assert {(look["color"], look["marker"]) for look in of.values()} == {LOOKS["DeBias recipe"]}


@pytest.mark.parametrize("seeds, said", [
    ([5, 5], "means of 5 seeds, 95 % intervals over seeds"),
    ([1, 1], "95 % intervals over images, one seed"),
    ([5, 0], "means of 5 seeds, 95 % intervals over seeds; of what has one or none, over images"),
    ([3, 5, 1], "means of 3 to 5 seeds, 95 % intervals over seeds; of what has one or none, over images")])
def test_a_figure_says_what_its_points_and_bars_are(seeds, said):
    over = ["over seeds" if n > 1 else "over images" for n in seeds]
    summary = pd.DataFrame(dict(arm=[f"arm {i}" for i in range(len(seeds))], test="own", text="move", value=4., low=3.,
                                high=5., seeds=seeds, interval=over))
    assert rests_on(summary) == said and dots(summary).get_supxlabel().endswith(f"\n{said}")
    assert curves(summary, "text", hue="arm").get_supxlabel() == said
    assert rests_on(summary.assign(low=None)) == rests_on(summary.drop(columns="interval")) == ""


def test_the_ideal_reader_is_a_line_through_each_panel():
    ideal = SCORES.query("arm == 'a'").assign(arm="ideal reader", value=99., low=98., high=100., seeds=0)
    fig = dots(pd.concat([SCORES.assign(seeds=5), ideal]))
    for ax in fig.axes:
        dashed, = [line for line in ax.lines if line.get_linestyle() == "--"]
        assert set(dashed.get_xdata()) == {99} and points(ax) == [[40], [45], [99]]


# ---- curves

LINES = pd.DataFrame([dict(arm=a, test=t, by=b, x=x, value=float(x), low=x - 1., high=x + 1.) for a in ("one", "two")
                      for t in ("own", "other") for b in ("words", "pads") for x in (0, 5, 20)])
PADS = LINES.query("by == 'pads'")


def test_curves(tmp_path):
    fig = curves(LINES, out=str(tmp_path), name="c", style="by", even=1)
    assert (tmp_path/"c.png").stat().st_size > 1000 and len(fig.axes) == 2
    lines = fig.axes[0].lines[:4]
    assert [line.get_xdata().tolist() for line in lines] == [[0, 5, 20]]*4
    assert [line.get_label() for line in lines] == ["one, words", "one, pads", "two, words", "two, pads"]
    assert legend(fig) == ["one", "two", "words", "pads"] and fits(fig)


def test_an_axis_of_texts_keeps_their_order():
    fig = curves(PADS.assign(x=PADS.x.map({0: "z", 5: "b", 20: "c"})))
    assert [t.get_text() for t in fig.axes[0].get_xticklabels()] == ["z", "b", "c"]
    assert fig.axes[0].lines[0].get_xdata().tolist() == [0, 1, 2]


def test_a_line_goes_from_left_to_right():
    assert curves(PADS.iloc[::-1]).axes[0].lines[0].get_xdata().tolist() == [0, 5, 20]


def test_bands_end_at_what_is_possible():
    bands = [c.get_paths()[0].vertices[:, 1] for limits in ((None, None), (0, 15))
             for c in curves(PADS.query("test == 'own' and arm == 'one'"), limits=limits).axes[0].collections]
    assert (bands[0].min(), bands[0].max()) == (-1, 21) and (bands[1].min(), bands[1].max()) == (0, 15)


def test_panels_go_on_in_a_second_line():
    fig = curves(PADS.assign(panel=PADS.test + PADS.arm), panels="panel")
    assert [ax.get_title() for ax in fig.axes] == ["ownone", "otherone", "owntwo", "othertwo"]
    assert len({ax.get_subplotspec().rowspan.start for ax in fig.axes}) == 2


def test_long_names_stay_in_the_figure():
    names = {"one": "a model with a name that is long", "two": "another with a long one too"}
    assert fits(curves(LINES.query("test == 'own'").assign(arm=LINES.arm.map(names)), style="by"))


def test_curves_without_intervals_or_panels_or_rows():
    fig = curves(PADS.query("test == 'own'").assign(low=None, high=None), panels=None)
    assert len(fig.axes) == 1 and not fig.axes[0].collections
    assert curves(LINES.iloc[:0]) is None


def test_titles_count_the_captions_of_the_first_point():
    counted = counted_panels(PADS.assign(n=[300, 20, 10]*4, left_out=1., cut=0.))
    assert counted.panel.unique().tolist() == ["own\nn = 300, left out 1 (cut 0)", "other\nn = 300, left out 1 (cut 0)"]


# ---- the plane

PLANE = pd.DataFrame([dict(test=t, text=x, arm=a, value=w + i, low=w + i - 1, high=w + i + 2)
                      for t, v in (("A", 10.), ("B", 50.)) for x, i in (("short", 0), ("whole caption", 3))
                      for a, w in (("one", v + 5), ("two", v + 7), ("near two", v + 7.125))])
ARMS = {"first": ["zero", "one"], "second": ["zero", "two", "near two"]}
WEIGHTS = {"zero": 0., "one": .1, "two": 1., "near two": .9}
PLANES = {"A": [["A", "short"], ["A", "whole caption"]], "A against B": [["B", "short"], ["A", "whole caption"]]}


def joined(ax): return [line.get_xydata().tolist() for line in ax.lines if line.get_label() in ARMS]


def test_points_lie_where_the_gains_are(tmp_path):
    a, b = plane(PLANE, "zero", ARMS, WEIGHTS, PLANES, str(tmp_path), "gains").axes
    assert (tmp_path/"gains.png").is_file()
    assert joined(a) == [[[0, 0], [15, 18]], [[0, 0], [17, 20], [17.125, 20.125]]]
    assert joined(b) == [[[0, 0], [55, 18]], [[0, 0], [57, 20], [57.125, 20.125]]]
    assert b.get_xlabel().startswith("B, short text: gain") and b.get_ylabel().startswith("A, whole caption: gain")
    bars = np.concatenate([s for c in a.collections for s in c.get_segments()])    # one below, two above each
    assert bars.max(0).tolist() == [19.125, 22.125] and bars.min(0).tolist() == [0, 0]


def test_points_on_one_spot_share_their_text():
    a, _ = plane(PLANE, "zero", ARMS, WEIGHTS, PLANES).axes
    assert sorted(t.get_text() for t in a.texts) == ["0.1", "1, 0.9"]              # and the origin has none


def test_a_point_that_is_not_there_is_an_error():
    with pytest.raises(ValueError, match="no 'short' of 'one' on 'C'"):
        plane(PLANE, "zero", {"x": ["one"]}, WEIGHTS, {"C": [["C", "short"], ["A", "short"]]})


# ---- the ideal reader

def test_what_has_no_seed_is_a_dashed_line_with_its_band():
    ideal = PADS.assign(arm="ideal reader", value=99., low=98., high=100., seeds=0).drop_duplicates(["test", "x"])
    fig = curves(pd.concat([PADS.assign(seeds=5), ideal]))
    looks = {line.get_label(): (line.get_linestyle(), line.get_marker()) for line in fig.axes[0].lines}
    assert looks == {"one": ("-", "o"), "two": ("-", "s"), "ideal reader": ("--", "None")}
    assert len(fig.axes[0].collections) == 3
    shown = {h.get_label(): h.get_linestyle() for h in fig.legends[0].legend_handles}
    assert shown == {"one": "-", "two": "-", "ideal reader": "--"}


def test_no_differences_are_no_figure(): assert dots(SCORES.iloc[:0]) is None
