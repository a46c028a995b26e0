"""The loader's benchmark: what it reports follows from what it measured, and says what was measured and what was not."""
import importlib.util, json, statistics, sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[1]/"tools"/"benchmark.py"
FEW = ["loader", "--backbone", "scenes-clip", "--keep", "8", "--batch", "4", "--seconds", ".1", "--repeats", "2", "--workers", "0"]


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("benchmark", TOOL)
    module = sys.modules["benchmark"] = importlib.util.module_from_spec(spec)   # dataclasses look it up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["benchmark"]


def run(benchmark, monkeypatch, capsys, *args):
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *FEW, *args])
    benchmark.main()
    return capsys.readouterr().out


def test_a100s_are_computed_from_counted_operations_and_said_to_be(benchmark, monkeypatch, capsys):
    found = json.loads(run(benchmark, monkeypatch, capsys, "--images", "8", "--sizes", "64x48,48x64", "--json"))
    eaten = .4*312e12/found["operations a sample"]
    assert found["samples/s of an A100, computed"] == pytest.approx(eaten) and found["A100s fed, computed"] == pytest.approx(statistics.median(found["samples/s"])/eaten)
    assert len(found["samples/s"]) == 2 and {k: len(v) for k, v in found["µs a sample"].items()} == dict(whole=2, decode=2, transform=2, text=2)
    assert "8 JPEG files of 64x48,48x64 made on the spot" in found["setting"]["what"]
    assert found["cores an A100 needs, computed"] == pytest.approx(eaten*sum(statistics.median(found["µs a sample"][k]) for k in ("decode", "transform", "text"))/1e6)
    lines = list(benchmark.told(found | {"samples/s by the stages": 1.5*statistics.median(found["samples/s"])}))
    assert [line.split(":")[0] for line in lines[1:4]] == ["measured, loader alone", "measured, µs of one core a sample", "computed, not measured"]
    assert "312·10¹² bf16 operations/s (data sheet)" in lines[4] and "assumed 40 %" in lines[4] and f"would feed {found['A100s fed, computed']:.2f} A100s of scenes-clip training" in lines[5]
    crowded = list(benchmark.told(found | {"samples/s by the stages": 1e9}))
    assert len(crowded) == len(lines) + 1 and "other programs take the cores" in crowded[3]


def test_own_pictures_are_loaded(benchmark, monkeypatch, capsys, tmp_path):
    for i in range(5): benchmark.photograph(40, 30, i).save(tmp_path/f"{i}.jpg")
    (tmp_path/"captions.jsonl").write_text("".join(json.dumps(dict(image=f"{i}.jpg", caption=f"A picture numbered {i}. It is small.")) + "\n" for i in range(5)))
    out = run(benchmark, monkeypatch, capsys, "--data", str(tmp_path), "--images", "0", "--workers", "1")
    assert f"5 pictures of {tmp_path.name}" in out and "1 workers" in out and "one A100 needs" in out


@pytest.mark.parametrize("args,message", [(["--sizes", "640"], "WIDTHxHEIGHT"), (["--sizes", "0x4"], "WIDTHxHEIGHT"), (["--images", "0"], "1 or more"), (["--images", "3"], "batch of 4 cannot be drawn from 3"),
                                          (["--utilisation", "0"], "percentage"), (["--workers", "-1"], "0 or more"), (["--data", "/nowhere"], "/nowhere"), (["--backbone", "scenes-siglip"], "CLIP backbone")])
def test_what_cannot_be_measured_is_said_first(benchmark, monkeypatch, capsys, args, message):
    with pytest.raises(SystemExit, match=message): run(benchmark, monkeypatch, capsys, *args)


def test_made_up_pictures_weigh_what_photographs_do(benchmark, tmp_path):
    benchmark.photograph(640, 480, 0).save(tmp_path/"x.jpg", quality=90)
    assert .3 < (tmp_path/"x.jpg").stat().st_size/(640*480) < .7            # COCO's val2017: 0.55


def test_the_options_are_the_same_step(benchmark, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "OPTIONS", {name: how for name, how in benchmark.OPTIONS.items() if not how[1]})   # compiling wants a compiler, and half a minute
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "options", "--backbone", "scenes-clip", "--keep", "8", "--batch", "4", "--pca-dim", "2", "--repeats", "2"])
    benchmark.main()
    fused, other = capsys.readouterr().out.splitlines()
    assert fused.startswith("fused ") and "1.00 times the speed" in fused and other.startswith("not fused ")
    assert fused.rpartition("loss ")[2] == other.rpartition("loss ")[2] and float(fused.rpartition("loss ")[2]) > 0
