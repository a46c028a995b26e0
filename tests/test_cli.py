"""The command debias-clip: what it prints, what it refuses, and its exit codes."""
import json
import re
import shutil
import signal

import open_clip
import pytest
import torch
from checkouts import EXPERIMENT, Checkout
from PIL import Image
from typer.testing import CliRunner

from debias_clip import __version__, cli
from debias_clip.models import create_model, save_checkpoint
from debias_clip.step import Step

@pytest.fixture
def checkout(tmp_path): return Checkout(tmp_path)


@pytest.fixture
def here(checkout, monkeypatch, capsys):
    "The command in a checkout, in this process: (exit code, what it printed, what it complained)."
    monkeypatch.chdir(checkout.root)
    def command(*args):
        with pytest.raises(SystemExit) as end: cli.main([*map(str, args)])
        printed = capsys.readouterr()
        return end.value.code, printed.out, printed.err
    return command


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    "A folder with three captions of one's own, and a small model."
    folder = tmp_path_factory.mktemp("own")
    rows = ["image,caption"]
    for i, colour in enumerate(("red", "green", "blue")):
        Image.new("RGB", (48, 48), colour).save(folder/f"{i}.png")
        rows.append(f"{i}.png,A {colour} square. It fills the picture. Nothing else is there.")
    (folder/"captions.csv").write_text("\n".join(rows))
    torch.manual_seed(0)
    save_checkpoint(create_model("scenes-clip", keep=8), folder/"model.safetensors")
    return folder


def invoke(*args): return CliRunner().invoke(cli.app, [*map(str, args)])


# ---- run

def test_the_command_prints_the_main_table_and_where_things_are(checkout):
    checkout.notebook("main_table", "open(f'{out}/main_table.png', 'w').close()")
    checkout.notebook("one")
    checkout.preset("about: numbers that mean nothing\nexperiments: [one, main_table]\n")
    done = checkout.command("run", "demo")
    out, err = done.communicate(timeout=60)
    assert done.returncode == 0, err
    end = out[out.index("main_table:"):]
    files = "runs/demo/main_table.ipynb", "runs/demo/main_table.png"
    for told in ("model", "demo", "numbers that mean nothing", *files): assert told in end


def test_the_exit_code_says_that_a_notebook_failed(checkout, here):
    checkout.notebook("one", "1/0")
    checkout.preset("experiments: [one]\n")
    assert here("run", "demo", "--dry-run")[0] == 0
    code, out, err = here("run", "demo")
    assert code == 1 and "ZeroDivisionError" in out and "failed, see above: one. The same command" in err
    assert here("run", "demo", "--dry-run", "--slurm")[0] == 2


def test_outside_a_checkout_it_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end: cli.main(["run", "quick"])
    assert end.value.code == 1
    assert capsys.readouterr().err.startswith("debias-clip: no debias_clip checkout here or above")


def test_a_fault_keeps_its_traceback(monkeypatch):
    def fail(arguments): int("x")
    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(ValueError, match="invalid literal"): cli.main([])


def test_help_imports_nothing_heavy(checkout):
    "So it is quick. In one process for all commands."
    code = """
import sys
from debias_clip.cli import app
for command in ([], ["run"], ["train"], ["models"], ["eval"], ["diagnose"], ["data"]):
    try: app([*command, "--help"])
    except SystemExit as e: assert not e.code
heavy = {"torch", "papermill", "pandas", "open_clip", "matplotlib"} & set(sys.modules)
assert not heavy, heavy"""
    running = checkout.python(code)
    out, err = running.communicate(timeout=60)
    assert running.returncode == 0 and out.count("Usage") == 7, err
    assert out.count("--workers") == 4


# ---- train

def test_train_says_what_is_wrong(checkout, here):
    (checkout.root/"bad.yaml").write_text("data: scenes\nbackbone: scenes-clip\nlr: fast\n")
    (checkout.root/"field.yaml").write_text("data: scenes\nepoch: 1\n")
    (checkout.root/"twice.yaml").write_text("data: scenes\nlr: 1.0\nlr: 2.0\n")
    told = {"bad.yaml": "lr='fast' is text", "field.yaml": "no field 'epoch'", "none.yaml": "No such file",
            "twice.yaml": "lr given twice"}
    for file, words in told.items():
        code, out, err = here("train", file)
        assert code == 1 and out == "" and err.startswith("debias-clip: ") and file in err and words in err, err


def test_train_and_torchrun_are_one_command(checkout, here):
    "Two files, of which the second is the first: trained once, and printed where the weights are."
    for name in ("one.yaml", "two.yaml"): (checkout.root/name).write_text(json.dumps(EXPERIMENT["finetuning"]))
    code, out, err = here("train", "one.yaml", "two.yaml", "--models", "here", "--workers", "0")
    first, second = out.split()
    assert code == 0 and first == second and first.startswith("here/") and (checkout.root/first).is_file(), err
    code = "import runpy; runpy.run_module('debias_clip.train', run_name='__main__', alter_sys=True)"
    running = checkout.python(code, "one.yaml", "--models", "here")
    assert running.communicate(timeout=100)[0].strip() == first
    running = checkout.python(code, "none.yaml")
    assert "debias-clip: " in running.communicate(timeout=100)[1] and running.returncode == 1


def test_ctrl_c_saves_as_sigterm_does(checkout, here, monkeypatch):
    "And the same command goes on; afterwards Ctrl-C is what it was."
    (checkout.root/"one.yaml").write_text(json.dumps(EXPERIMENT["finetuning"] | {"epochs": 2}))
    take, before = Step.__call__, signal.getsignal(signal.SIGINT)
    def pressed(self, *args):
        signal.raise_signal(signal.SIGINT)
        return take(self, *args)
    monkeypatch.setattr(Step, "__call__", pressed)
    code, out, err = here("train", "one.yaml", "--workers", "0")
    assert code == 143 and out == "" and "ended after step 1 of " in err and "the same call or command goes on" in err
    assert signal.getsignal(signal.SIGINT) is before
    code, out, err = here("models")
    assert code == 0 and " begun " in out, err
    monkeypatch.setattr(Step, "__call__", take)
    code, out, err = here("train", "one.yaml", "--workers", "0", "--watch", "scenes")
    assert code == 0, err
    (row,) = cli.models_there(["models"])
    assert row["state"] == "trained" and row["key"] in out and row["recipe"] == "debias" and row["folder"] == "models"
    code, out, err = here("models")
    assert code == 0 and row["key"] in out and " trained " in out and "scenes-clip" in out, err


def test_no_models_are_said_with_where_they_were_looked_for(checkout, here):
    code, out, err = here("models")
    assert code == 1 and out == "" and "no model has been trained in models" in err and "name its folder" in err


def test_the_version_is_the_packages(): assert invoke("--version").output == f"debias-clip {__version__}\n"


# ---- eval

def card(output, name): return re.search(rf"(?m)^{name} +(.+)$", output)[1]


def test_eval_of_a_checkpoint(own):
    "It tells its backbone, or is told."
    shown = [invoke("eval", *model, "--pretrained", own/"model.safetensors", "--data", own, "--workers", 0)
             for model in (("--model", "scenes-clip"), ())]
    for one in shown: assert one.exit_code == 0, (one.output, one.exception)
    out = shown[0].output
    assert out == shown[1].output and "t2i_R@1" in out and "long" in out
    told = {"backbone": "scenes-clip", "images": "3", "truncated texts": "0", "splitter": "default"}
    assert {name: card(out, name) for name in told} == told
    assert invoke("eval", "--model", "scenes-clip", "--data", own).exit_code == 2
    shown = invoke("eval", "--pretrained", "openai", "--data", own)
    assert "name the backbone (--model NAME), or mend the path" in str(shown.exception)


TABLE_COMMANDS = {   # on a folder of one's own
    "eval": lambda folder: ("eval", "--pretrained", folder/"model.safetensors", "--workers", 0, "--data", folder/"own"),
    "diagnose": lambda folder: ("diagnose", "--pretrained", folder/"model.safetensors", "--workers", 0, "--out",
                                folder/"report", "--data", folder/"own"),
    "check": lambda folder: ("data", "check", folder/"own"),
    "show": lambda folder: ("data", "show", folder/"own"),
}


@pytest.fixture
def named_otherwise(own, tmp_path):
    "The captions of `own` under other names of columns, one picture gone and one damaged; a function that says so."
    shutil.copytree(own, tmp_path/"own")
    shutil.copy(own/"model.safetensors", tmp_path)
    captions = (tmp_path/"own"/"captions.csv").read_text().replace("image,caption", "filepath,title")
    more = [f"{i}.png,A square of number {i}. It is small. It is red." for i in (3, 4)]
    (tmp_path/"own"/"captions.csv").write_text("\n".join([captions, *more]))
    (tmp_path/"own"/"4.png").write_bytes(b"no picture")
    return tmp_path


@pytest.mark.parametrize("command", TABLE_COMMANDS)
def test_each_command_that_reads_a_table_takes_the_remedies_that_it_names(named_otherwise, command):
    "Every option in its messages can be typed, one after the other, until the command succeeds."
    typed = TABLE_COMMANDS[command](named_otherwise)
    remedies = {"--image-column": "filepath", "--caption-column": "title", "--max-missing": .2, "--max-unreadable": .25}
    for _ in range(4):
        shown = invoke(*typed)
        said = f"{shown.output} {shown.exception}"
        options = [option for option in remedies if option in re.findall(r"--[a-z-]+", said)]
        if shown.exit_code == 0 or not options: break
        for option in options: typed = (*typed, option, remedies.pop(option))
    if command == "check": assert "2 faults of 2 kinds" in said and "FAULT unreadable" in said, said   # it counts them
    else: assert shown.exit_code == 0, said
    assert ("--max-unreadable" in typed) == (command in ("eval", "diagnose"))   # show opens no picture


def test_eval_says_where_positions_were_stretched(own, tmp_path):
    "And measures them as they are where it is told to."
    short = create_model("scenes-clip", context_length=28, keep=8)
    save_checkpoint(short, tmp_path/"start.safetensors")
    def ask(*more):
        return invoke("eval", "--model", "scenes-clip", "--pretrained", tmp_path/"start.safetensors", "--data", own,
                      "--workers", 0, *more).output
    assert card(ask(), "positions") == "stretched from 28 to 52, not trained since; --context 28 leaves them"
    assert card(ask(), "context length") == "52"
    assert "stretched" not in ask("--context", 28) and card(ask("--context", 28), "context length") == "28"


def test_eval_writes_what_it_prints(own, tmp_path):
    shown = invoke("eval", "--pretrained", own/"model.safetensors", "--data", own, "--workers", 0, "--json",
                   tmp_path/"made"/"eval.json")
    assert shown.exit_code == 0, shown.output
    written = json.loads((tmp_path/"made"/"eval.json").read_text())
    (row,) = written["recalls"]
    assert row["text"] == "long" and row["images"] == 3 and 0 <= row["t2i_R@1"] <= 100
    assert written["protocol"]["long"]["backbone"] == "scenes-clip"
    assert f"{row['t2i_R@1']:.1f}" in shown.output


@pytest.mark.parametrize("file", ["file/below.json", "folder", "gone/to/nowhere/file/x"])
@pytest.mark.parametrize("command", [
    ("eval", "--data", "no_data", "--pretrained", "no_model", "--json"), ("data", "check", "no_data", "--report"),
    ("diagnose", "--data", "no_data", "--pretrained", "no_model", "--out"),
])
def test_what_cannot_be_written_is_said_first(command, file, tmp_path):
    "Before data and model are looked for, which are not there either; and nothing is left behind."
    (tmp_path/"file").write_text("")
    (tmp_path/"folder").mkdir()
    there = sorted(tmp_path.rglob("*"))
    refused = not file.startswith("gone") and (command[0], file) != ("diagnose", "folder")   # --out is a folder
    shown = invoke(*command, tmp_path/file)
    said = f"{shown.output} {shown.exception}"
    assert shown.exit_code and ("cannot be written" in said) == refused, said
    assert sorted(tmp_path.rglob("*")) == there


def test_eval_reads_the_offline_world(own, monkeypatch):
    "Its pictures are one array; its card has a column for the short texts."
    from debias_clip import authors, benchmarks
    few = authors.scene_records("test", n=6)
    monkeypatch.setattr(benchmarks, "open_data", lambda data, root, options: few)
    shown = invoke("eval", "--pretrained", own/"model.safetensors", "--data", "scenes")
    assert shown.exit_code == 0, shown.exception
    assert re.search(r"short +6 +30", shown.output) and re.search(r"texts +6 +30", shown.output)


TINY = dict(embed_dim=16, quick_gelu=True, vision_cfg=dict(image_size=16, layers=1, width=64, patch_size=8),
            text_cfg=dict(context_length=77, vocab_size=49408, width=64, heads=1, layers=2))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    "State dict, at 248 tokens, of a backbone so small that a test can load it."
    folder = tmp_path_factory.mktemp("configs")
    (folder/"runs-tiny-quickgelu.json").write_text(json.dumps(TINY))
    open_clip.add_model_config(folder)
    yield create_model("runs-tiny-quickgelu").state_dict()
    open_clip.factory._MODEL_CONFIGS.pop("runs-tiny-quickgelu")
    open_clip.factory._MODEL_CONFIG_PATHS.remove(folder)


def test_eval_of_published_layouts_needs_no_model(own, tiny, tmp_path):
    two = tiny | dict(positional_embedding_res=torch.randn(248, 64)*.1)
    mask = {"mask_net.block.ln_1.weight": torch.ones(4), "mask_net.proj": torch.randn(4, 16)}
    towers = {("" if k.startswith(("visual", "logit")) else "text.") + k: v for k, v in two.items()}
    files = dict(long_clip=two, smartclip=dict(model=two | mask, epoch=2),
                 release=dict(state_dict={"module." + k: v for k, v in towers.items()}, epoch=3))
    for name, tree in files.items():
        torch.save(tree, tmp_path/f"{name}.pt")
        shown = invoke("eval", "--pretrained", tmp_path/f"{name}.pt", "--data", own, "--workers", 0)
        assert shown.exit_code == 0, (name, shown.exception)
        assert card(shown.output, "backbone") == "runs-tiny-quickgelu" and card(shown.output, "context length") == "248"


@pytest.mark.parametrize("layout", ["rotary positions", "extra heads"])
def test_eval_of_an_unreadable_layout_says_so_and_no_more(own, tiny, tmp_path, layout):
    "TULIP's text tower has no position table; FineLIP's checkpoint has heads that no CLIP has."
    if layout == "extra heads": state = tiny | {"token_refine.proj.weight": torch.randn(16, 16)}
    else: state = {k: v for k, v in tiny.items() if k != "positional_embedding"} | {"cls_emb": torch.randn(64)}
    torch.save(dict(state_dict=state), tmp_path/"odd.pt")
    for model in ((), ("--model", "runs-tiny-quickgelu")):
        shown = invoke("eval", *model, "--pretrained", tmp_path/"odd.pt", "--data", own)
        assert isinstance(shown.exception, ValueError) and "odd.pt" in str(shown.exception) and shown.output == ""


# ---- diagnose

def test_diagnose_writes_a_page_of_two_models(own, tmp_path):
    save_checkpoint(create_model("scenes-clip", keep=8), tmp_path/"model.safetensors")
    shown = invoke("diagnose", "--pretrained", own/"model.safetensors", "--against", tmp_path/"model.safetensors",
                   "--data", own, "--out", tmp_path/"report", "--workers", 0)
    assert shown.exit_code == 0, (shown.output, shown.exception)
    numbers = json.loads((tmp_path/"report/diagnosis.json").read_text())
    names = [model["name"] for model in numbers["models"]]
    assert names == [f"{own.name}/model", f"{tmp_path.name}/model"] and (tmp_path/"report/diagnosis.html").is_file()
    assert [model["card"]["weights"] for model in numbers["models"]] == ["model.safetensors"]*2


def test_diagnose_needs_weights_or_a_preset_that_has_run(own, checkout, here):
    assert here("diagnose", "--model", "scenes-clip")[0] == 2
    with pytest.raises(ValueError, match="are the same: give another --against"): cli.short_names(["openai", "openai"])
    assert cli.short_names(["openai", str(own/"model.safetensors")]) == ["openai", "model"]


# ---- data

def test_data_show_tells_both_captions(own):
    shown = invoke("data", "show", own, "--n", 1, "--recipe", "no_summary")
    assert shown.exit_code == 0, shown.output
    assert "long:  A red square. It fills the picture. Nothing else is there." in shown.output
    assert "short: It fills the picture. Nothing else is there." in shown.output
    for args, told in [((own, "--recipe", "debia"), "did you mean debias?"), (("doci",), "did you mean docci"),
                       (("docci",), "data docci: where does it lie")]:
        assert told in str(invoke("data", "show", *args).exception)


def test_data_check_counts_faults(own, tmp_path):
    report = tmp_path/"faults.json"
    assert invoke("data", "check", own, "--report", report).exit_code == 0 and json.loads(report.read_text())
    (tmp_path/"captions.csv").write_text("image,caption\nno.png,A. B.\n")
    assert invoke("data", "check", tmp_path).exit_code == 1
    assert invoke("data", "check", "docic", "--root", tmp_path).exit_code == 2


def test_data_list_and_get(tmp_path):
    assert "docci" in invoke("data", "list").output
    assert invoke("data", "get", "docic", "--root", tmp_path).exit_code == 2
