"""Where results go: the same folder from wherever a notebook is opened."""
import ast

import pytest
from checkouts import Checkout
from hypothesis import given
from hypothesis import strategies as st

from debias_clip.results import (
    find_checkout,
    folded,
    laid_out,
    plain_data,
    read_record,
    run_folder,
    write_metrics,
)

def test_results_land_in_the_same_folder_from_anywhere(tmp_path, monkeypatch):
    checkout = Checkout(tmp_path)
    there = (checkout.root/"runs"/"demo").resolve()
    for folder in (checkout.root, checkout.root/"nbs"/"experiments"):
        monkeypatch.chdir(folder)
        assert run_folder("runs/demo").resolve() == there and not run_folder("runs/demo").is_absolute()
        assert write_metrics("runs/demo", "one", {"a": 1}).resolve().parent == there
    assert find_checkout(checkout.root/"runs"/"demo") == checkout.root.resolve()
    with pytest.raises(ValueError, match="no finished one: debias-clip run demo makes it"):
        read_record("runs/demo", "one")


@pytest.mark.parametrize("value, told", [
    ({"a": [float("inf")]}, r"m\['a'\]\[0\] is inf"),
    ({1: {"b": object()}}, r"m\[1\]\['b'\] is a object"),
])
def test_what_json_cannot_hold_is_named(value, told):
    with pytest.raises(ValueError, match=told): plain_data(value, "m")


# ---- executed notebooks as they open

def executed(source, *tags, kind="code"):
    return dict(cell_type=kind, source=source, metadata=dict(tags=list(tags)))


def test_settings_and_imports_are_folded_and_nothing_else():
    cells = [executed("a = 1", "parameters"), executed("# Parameters\na = 2\n", "injected-parameters"),
             executed("from x import y\ny()"), executed("y(a)"), executed("import this", kind="markdown")]
    hidden = [cell["metadata"].get("jupyter") for cell in folded(dict(cells=cells))["cells"]]
    assert hidden == [{"source_hidden": True}]*3 + [None]*2


@pytest.mark.parametrize("written", ["float('nan')", "-float('inf')"])
def test_what_is_no_literal_stays_as_papermill_wrote_it(written):
    cell = executed(f"# Parameters\na = {written}\n", "injected-parameters")
    folded(dict(cells=[cell]))
    assert cell["source"].endswith(f"a = {written}")


numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
plain = st.recursive(st.none() | st.booleans() | numbers | st.text(),
                     lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))


@given(plain, st.integers(8, 40))
def test_what_is_laid_out_is_the_same_value(value, width):
    assert ast.literal_eval(laid_out(value, width=width)) == value
