"""Presets: everything that is wrong with one is told before anything runs, and a result knows what made it."""
import json
import os

import pytest
from checkouts import PARAMETERS, SMALL, Checkout, experiment, pretend_done
from PIL import Image

from debias_clip import preset
from debias_clip.preset import code_hash, find_preset, imports_of, job_state, like_default, read_preset
from debias_clip.runner import run_preset

@pytest.fixture
def checkout(tmp_path): return Checkout(tmp_path)


# ---- what is wrong

@pytest.mark.parametrize("text, told", [
    ("experiments: [one]\nparameter: {a: 1}\n", "parameter: no such key; did you mean parameters?"),
    ("experiments: [one, tow]\n", "there is no notebook 'tow'; did you mean two?"),
    ("experiments: [one]\ntwo: {a: 1}\n", "two: not in the list of experiments"),
    ("experiments: [one, one]\n", "listed twice"),
    ("experiments: one\n", "a list of notebooks is needed; known: one, two"),
    ("parameters: {a: 1}\n", "a list of notebooks is needed; known: one, two"),
    ("experiments: [one, two]\nparameters: {seed: [1]}\n", "two: it knows no parameter 'seed'; did you mean seeds?"),
    ("experiments: [one]\nparameters: [a]\n", "one: parameters: `name: value` lines are needed, not ['a']"),
    ("experiments: [one]\none: {a: 1.5}\n", "a is 1.5 (float), the notebook's default 2 is of type int"),
    ("experiments: [one]\none: {lr: fast}\n", "lr is 'fast' (str)"),
    ("experiments: [one]\none: {seeds: 3}\n", "seeds is 3 (int)"),
    ("experiments: [one]\none: {name: no}\n", "name is False (bool)"),
    ("experiments: [one]\none: {name: 2024-01-01}\n", "name is datetime.date(2024, 1, 1)"),
    ("experiments: [one]\none: {out: /tmp}\n", "`out` is set by the runner"),
    ("experiments: [one]\none: {workers: 2}\n", "`workers` is set by the runner"),
    ("experiments: [one]\none: {a: 1, a: 2}\n", "a given twice"),
    ("experiments: [one]\none: {a: [1}\n", "line 2"),
    ("- experiments\n", "`name: value` lines are needed"),
])
def test_a_wrong_preset_stops_before_the_first_notebook(checkout, text, told):
    checkout.notebook("one")
    checkout.notebook("two")
    checkout.preset(text)
    with pytest.raises(ValueError) as e: checkout.run()
    assert told in str(e.value) and "params.yaml" in str(e.value)
    assert checkout.left() == []


@pytest.mark.parametrize("bad, told", [
    (dict(tags=()), "two: 0 cells tagged `parameters`"),
    (dict(tags=("parameters", "parameters")), "two: 2 cells tagged"),
    (dict(parameters=PARAMETERS + "\nb = a * 2"), r"`b = a \* 2` in the parameters cell"),
    (dict(parameters="a = 2"), "two: it has no parameter `out`"),
])
def test_a_wrong_notebook_stops_before_the_first(checkout, bad, told):
    checkout.notebook("one")
    checkout.notebook("two", **bad)
    checkout.preset("experiments: [one, two]\n")
    with pytest.raises(ValueError, match=told): checkout.run()
    assert checkout.left() == []


def test_everything_wrong_is_told_at_once(checkout):
    checkout.notebook("one")
    checkout.notebook("two", tags=())
    checkout.preset("experiments: [one, two, three]\nparameters: {A: 1}\nextra: 1\n")
    with pytest.raises(ValueError) as e: checkout.run()
    for told in ("no notebook 'three'", "extra: no such key", "one: it knows no parameter 'A'; did you mean a?",
                 "two: 0 cells"):
        assert told in str(e.value)


def test_unknown_preset_and_experiment(checkout):
    checkout.notebook("one")
    checkout.preset("experiments: [one]\n")
    with pytest.raises(ValueError, match="no preset 'dmo' in runs/; did you mean demo?"):
        run_preset("dmo", checkout.root)
    with pytest.raises(ValueError, match="no experiment 'on'; did you mean one?"): checkout.run(only=["on"])


def test_a_preset_is_found_by_name_and_by_folder(checkout, tmp_path_factory, monkeypatch):
    checkout.preset("experiments: [one]\n")
    monkeypatch.chdir(checkout.root)
    for name in ("demo", "runs/demo", "runs/demo/params.yaml"):
        assert find_preset(name, checkout.root) == checkout.root/"runs"/"demo"
    outside = tmp_path_factory.mktemp("other")
    (outside/"params.yaml").touch()
    with pytest.raises(ValueError, match="outside this checkout"): find_preset(outside, checkout.root)


# ---- settings

@pytest.mark.parametrize("value, default, is_", [
    ("1e-6", 0.1, 1e-6), (1, 0.5, 1.0), ("1e3", 10, 1000), (12345678901234567, 1, 12345678901234567),
    ([1, "1e-3"], [0.5], [1.0, 1e-3]), ([], [0], []), ({"a": 1}, None, {"a": 1}),
])
def test_numbers_become_the_defaults_type(value, default, is_):
    got = like_default(value, default, "x")
    assert got == is_ and json.dumps(got) == json.dumps(is_)


@pytest.mark.parametrize("value, default", [(True, 1), ("nan", 0.1), (1.5, 1), ({1: object()}, None), ("x", ["x"])])
def test_what_would_lose_something_is_refused(value, default):
    with pytest.raises(ValueError, match="^x is "): like_default(value, default, "x")


def test_what_notebooks_share_reaches_those_that_know_it(checkout):
    "Not every experiment has test sets; a name that none knows is still a mistake."
    checkout.notebook("one")
    checkout.notebook("two", parameters=PARAMETERS + "\nonly_two = 1")
    checkout.preset("experiments: [one, two]\nparameters: {only_two: 5, a: 3}\n")
    one, two = checkout.jobs()
    assert "only_two" not in one.parameters and two.parameters["only_two"] == 5
    assert one.parameters["a"] == two.parameters["a"] == 3
    for text in ("experiments: [one]\nparameters: {only_two: 5}\n", "experiments: [one, two]\none: {only_two: 5}\n"):
        checkout.preset(text)
        with pytest.raises(ValueError, match="one: it knows no parameter 'only_two'"): checkout.jobs()


def test_the_order_of_settings_counts(checkout):
    "An ablation compares each arm with the one before it."
    checkout.notebook("one", parameters=PARAMETERS + '\nlines = {"start": 1}')
    keys = []
    for order in ("{z: 1, a: {y: 1, b: 2}}", "{a: {y: 1, b: 2}, z: 1}"):
        checkout.preset(f"experiments: [one]\nparameters: {{lines: {order}}}\n")
        keys.append(checkout.job("one").key)
        assert list(checkout.job("one").parameters["lines"]) == ["z", "a"] if len(keys) == 1 else ["a", "z"]
    assert keys[0] != keys[1]


# ---- code

def test_comments_and_docstrings_make_no_result(checkout):
    checkout.preset("experiments: [one]\n")
    keys = []
    for cell in ("def f(x): return x", 'def f(x):\n    "Says x."\n    return x  # of course', "def f(x): return 2*x"):
        checkout.notebook("one", cell)
        keys.append(checkout.job("one").cells)
    assert keys[0] == keys[1] != keys[2]


def test_magics_are_code(checkout):
    checkout.preset("experiments: [one]\n")
    checkout.notebook("one", "%matplotlib inline\nx = 1")
    before = checkout.job("one").cells
    checkout.notebook("one", "%matplotlib inline\nx = 2")
    assert checkout.job("one").cells != before


def test_a_module_counts_with_what_it_imports_but_for_training(tmp_path, monkeypatch):
    "And with the assets it names. What only training needs makes a model, which counts by its key."
    monkeypatch.setattr(preset, "_package", lambda: tmp_path)
    def write(**sources):
        for name, source in sources.items(): (tmp_path/f"{name}.py").write_text(source)
    write(arms="from .train import train\ndef f():\n    from .ranks import r", ranks="r = 'names.json'")
    write(train="from .losses import loss\nx = 1", losses="loss = 1")
    (tmp_path/"assets").mkdir()
    (tmp_path/"assets/names.json").write_text("{}")
    (tmp_path/"assets/other.json").write_text("{}")
    assert imports_of("import debias_clip.arms, json") == {"arms"}
    hashes = [code_hash(["arms"])]
    for file, text in [("losses.py", "loss = 2"), ("assets/other.json", "[]"), ("ranks.py", "r = 'names.json'  # x")]:
        (tmp_path/file).write_text(text)
        assert code_hash(["arms"]) == hashes[0], file
    for file, text in [("train.py", "x = 2"), ("assets/names.json", "[]"), ("ranks.py", "r = 'names.json', 1")]:
        (tmp_path/file).write_text(text)
        hashes.append(code_hash(["arms"]))
    assert len(set(hashes)) == 4


# ---- models and files

FILES = dict(captions="mine/captions.csv", table="test.csv", weights="weights/start.pt")


@pytest.mark.parametrize("changed", FILES)
def test_a_file_that_changes_makes_a_result_stale(checkout, changed):
    "Captions, named by their folder or table, and weights; a file that is gone, or only touched, does not."
    for name in FILES.values():
        (checkout.root/name).parent.mkdir(exist_ok=True)
        (checkout.root/name).write_text("image,caption\na.png,A. B.\n")
    checkout.notebook("one", parameters=PARAMETERS + "\nreads = {}")
    checkout.preset("experiments: [one]\none: {reads: {data: mine, init: weights/start.pt, t: [{data: test.csv}]}}\n")
    job = checkout.job("one")
    pretend_done(job)
    file = checkout.root/FILES[changed]
    os.utime(file, (1, 1))
    assert len(checkout.record("one")["reads"]) == 3 and job_state(job) == "done"
    file.write_text("image,caption\na.png,A. C.\n")
    assert job_state(job) == f"stale: files changed: {'mine' if changed == 'captions' else FILES[changed]}"
    file.unlink()
    assert job_state(job) == "done"


def test_a_model_that_learns_from_something_else_makes_a_result_stale(checkout):
    "A picture is replaced: no setting and no table tells of it, the model's key does."
    fields = SMALL | dict(data="mine", pca_dim=4)
    experiment(checkout, "one", arms={"A": {"recipe": "debias"}}, pretraining={}, finetuning=fields)
    (checkout.root/"mine").mkdir()
    for i in range(16): Image.new("RGB", (64, 64), (10*i, 0, 0)).save(checkout.root/f"mine/{i}.png")
    rows = [f"{i}.png,A thing {i}. It is red. It is {i} wide.\n" for i in range(16)]
    (checkout.root/"mine/captions.csv").write_text("image,caption\n" + "".join(rows))
    checkout.preset("experiments: [one]\n")
    pretend_done(checkout.job("one"))
    assert job_state(checkout.job("one")) == "done"
    Image.new("RGB", (32, 32), "blue").save(checkout.root/"mine/3.png")
    assert job_state(checkout.job("one")) == "stale: models changed: A, seed 0"
    for file in (checkout.root/"mine").iterdir(): file.unlink()   # what cannot be known is not stale
    job = checkout.job("one")
    assert job_state(job) == "done" and job.models == {"A, seed 0": None} and "A, seed 0" in job.missing


def test_the_installed_package_must_be_the_checkouts(tmp_path):
    checkout = Checkout(tmp_path)
    (checkout.root/"debias_clip").mkdir()
    with pytest.raises(ValueError, match="pip install -e"): read_preset("demo", checkout.root)
