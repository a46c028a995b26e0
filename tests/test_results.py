"""Where results go: the same folder from wherever a notebook is opened."""
import pytest
from checkouts import Checkout

from debias_clip.results import find_checkout, plain_data, read_record, run_folder, write_metrics

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
