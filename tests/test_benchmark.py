"""The benchmark of a training step: the two ways are one step, and what it reports follows from what it measured."""
import importlib.util
import json
import statistics
import sys
from pathlib import Path

import pytest
import torch

TOOL = Path(__file__).parents[1]/"tools"/"benchmark.py"
FEW = dict(backbone="scenes-clip", keep=8, batch=4, pca_dim=2)


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("benchmark", TOOL)
    module = sys.modules["benchmark"] = importlib.util.module_from_spec(spec)   # dataclasses look it up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["benchmark"]


def run(benchmark, monkeypatch, capsys, **options):
    "What `benchmark.py step` prints; its two processes are run in this one."
    def in_process(s, variant):
        benchmark.worker(s, variant)
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    monkeypatch.setattr(benchmark, "ask", in_process)
    given = [f"--{name.replace('_', '-')}={value}" for name, value in (FEW | options).items()]
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "step", *given, "--repeats=2", "--json"])
    benchmark.main()
    return json.loads(capsys.readouterr().out)


def test_the_two_ways_are_the_same_step_with_fewer_operations(benchmark, monkeypatch, capsys):
    result = run(benchmark, monkeypatch, capsys)
    assert result["loss"]["ours"] == pytest.approx(result["loss"]["plain"], rel=1e-5)
    for flops in result["flops"].values(): assert flops["needed"] < flops["ours"] < flops["plain"]
    tokens = result["tokens"]
    assert tokens["each once"] <= tokens["up to the pooled one"] < tokens["every position"] == 8*88


def test_the_table_follows_from_what_was_measured(benchmark, monkeypatch, capsys):
    result = run(benchmark, monkeypatch, capsys)
    rows = {row["quantity"]: row for row in result["table"]}
    seconds = {v: statistics.median(of) for v, of in result["seconds"]["step"].items()}
    assert [len(of) for of in result["seconds"]["step"].values()] == [2, 2]
    assert rows["step: images/s"]["plain"] == pytest.approx(4/seconds["plain"])
    assert rows["step: images/s"]["ratio"] == pytest.approx(seconds["plain"]/seconds["ours"])
    assert rows["step: peak memory, GB"]["ratio"] == result["peak"]["ours"]/result["peak"]["plain"]
    assert any("images/s" in line for line in benchmark.told(result))


def test_a_stopped_run_goes_on(benchmark, monkeypatch, tmp_path):
    s, asked, going_on = benchmark.Setting(**FEW), [], []
    def ask(s, variant):
        if len(asked) == 3 and not going_on: raise KeyboardInterrupt
        asked.append(variant)
        return [{"what": "step", "seconds": 1.0}]
    monkeypatch.setattr(benchmark, "ask", ask)
    with pytest.raises(KeyboardInterrupt): benchmark.measure(s, 2, tmp_path/"cache"/"rows.jsonl")
    going_on.append(True)
    assert len(benchmark.measure(s, 2, tmp_path/"cache"/"rows.jsonl")) == 4 and asked == ["plain", "ours"]*2


def test_counted_operations_are_those_of_the_matrix_products(benchmark):
    "Of the plain text branch, by hand: 4 weights of d² for attention, 8 for the feed-forward layer, both attentions."
    s = benchmark.Setting(**FEW)
    batch, _ = benchmark.make_batch(s)
    d, layers, length, rows, embed = 128, 3, 88, 8, 128
    block = length*12*d*d + 2*length*length*d
    forward = 2*rows*(layers*block + d*embed)
    assert benchmark.count_operations(s, batch)["text"]["plain"] == pytest.approx(3*forward, rel=0.01)


@pytest.mark.parametrize("fields, message", [
    (dict(backbone="scenes-siglip"), "CLIP backbone"),
    (dict(precision="fp16"), "precision is fp32 or bf16, not 'fp16'"),
    (dict(kernels="fast"), "kernels is trainer or torch"), (dict(batch=2), "needs a batch of 3")], ids=str)
def test_what_cannot_be_measured_is_said_first(benchmark, fields, message):
    with pytest.raises(SystemExit, match=message): benchmark.Setting(**FEW | fields)


def test_own_captions_are_read(benchmark, tmp_path):
    lines = [json.dumps({"caption": f"Number {i}. It is small."}) + "\n" for i in range(4)]
    (tmp_path/"captions.jsonl").write_text("".join(lines))
    s = benchmark.Setting(**FEW, captions=str(tmp_path))
    batch, what = benchmark.make_batch(s)
    assert what == f"the first 4 captions of {tmp_path.name}" and batch["long"].dtype == torch.int64
    five = benchmark.Setting(**FEW | dict(batch=5, captions=str(tmp_path)))
    with pytest.raises(SystemExit, match="fewer captions"): benchmark.make_batch(five)


@pytest.mark.slow
def test_each_variant_has_a_process_of_its_own(benchmark):
    rows = benchmark.ask(benchmark.Setting(**FEW), "ours")
    assert [row["what"] for row in rows] == ["step", "text"] and rows[0]["peak"] > 0
