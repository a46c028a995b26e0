"""`debias-clip data`: exit codes that scripts can use, and errors in a line."""
import json
import re
from dataclasses import replace

import pytest
from layouts import LAYOUTS
from test_downloads import published, serve, server
from typer.testing import CliRunner

from debias_clip import cli, downloads
from debias_clip.datasets import DATASETS
from debias_clip.downloads import data_table

__all__ = ["server"]   # a fixture


def invoke(*args): return CliRunner().invoke(cli.app, ["data", *map(str, args)])


@pytest.fixture
def docci(tmp_path, monkeypatch):
    monkeypatch.setitem(DATASETS, "docci", replace(DATASETS["docci"], images=16, texts=16))
    layout = LAYOUTS["docci"](tmp_path)
    layout.write()
    return layout


def test_check_ends_with_a_code_that_scripts_can_use(docci, tmp_path):
    where = ("docci", "--root", tmp_path)
    clean = invoke("check", *where)
    assert clean.exit_code == 0 and clean.output.rstrip().endswith("No faults.")
    docci.path(docci.rows[3]).unlink()
    faulty = invoke("check", *where, "--report", tmp_path/"findings.json")
    assert faulty.exit_code == 1 and "FAULT missing images" in faulty.output
    findings = json.loads((tmp_path/"findings.json").read_text())
    assert findings["faults"] == {"missing images": 1}
    assert findings["findings"]["missing images"] == ["in images: test_00003.jpg"]
    allowed = invoke("check", *where, "--max-missing", .1, "--quick")
    assert allowed.exit_code == 0 and "not opened" in allowed.output


@pytest.mark.parametrize("args,told", [
    (("docci", "--root", ".", "--max-missing", 2), "max-missing"), (("flickr30k", "--root", "."), "say one of"),
    (("docci", "--root", "no"), "no folder"), (("no/where",), "no table"), (("docci",), "--root"),
    ((), "NAME_OR_PATH")], ids=str)
def test_wrong_usage_of_check(args, told):
    wrong = invoke("check", *args)
    assert wrong.exit_code == 2 and told in wrong.output


def test_own_tables_and_folders_are_checked(tmp_path):
    layout = LAYOUTS["own csv"](tmp_path)
    layout.write()
    for what in (tmp_path, tmp_path/"captions.csv"): assert invoke("check", what).exit_code == 0
    layout.path(layout.rows[2]).write_bytes(b"")
    for args in ((tmp_path,), (tmp_path, "--quick")):                  # a size of 0 is seen without opening
        assert invoke("check", *args).exit_code == 1


def test_get_and_list(server, docci, tmp_path, monkeypatch):
    assert invoke("list").output.rstrip() == data_table()
    serve(server, monkeypatch, "docci", published("docci", tmp_path))
    done = invoke("get", "docci", "--root", tmp_path/"to")
    assert done.exit_code == 0 and "CC BY 4.0" in done.output
    assert invoke("check", "docci", "--root", tmp_path/"to").exit_code == 0
    assert invoke("get", "doci", "--root", tmp_path).exit_code == 2 and invoke("get", "docci").exit_code == 2
    monkeypatch.setitem(DATASETS, "docci", replace(DATASETS["docci"], by_hand=((("photos",), "ask her"),)))
    assert invoke("get", "docci", "--root", tmp_path/"to").exit_code == 1


def test_a_stopped_download_says_how_to_go_on(tmp_path, monkeypatch):
    def stop(*args, **more): raise KeyboardInterrupt
    monkeypatch.setattr(downloads, "fetch", stop)
    monkeypatch.setattr(downloads, "check_room", lambda *args: None)
    stopped = invoke("get", "docci", "--root", tmp_path)
    assert stopped.exit_code == 1 and "the same command goes on" in stopped.output


@pytest.mark.parametrize("args,code,told", [
    (["check", "nowhere.csv"], 2, "no table"), (["get", "flickr30k-1k", "--root", "f"], 1, "may not be fetched"),
    (["get", "flickr30k", "--root", "f"], 1, "may not be fetched"),
    (["get", "docci", "--root", "f"], 1, "cannot be fetched")], ids=str)
def test_errors_are_told_in_a_line_and_a_code(args, code, told, tmp_path, monkeypatch, capsys):
    def no_net(*args, **more): raise downloads.requests.ConnectionError("no net")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(downloads.requests, "get", no_net)
    monkeypatch.setattr(downloads.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(downloads, "check_room", lambda *args: None)
    with pytest.raises(SystemExit) as e: cli.main(["data", *args])
    error = capsys.readouterr().err
    assert e.value.code == code and error.startswith("debias-clip: ") and told in error and "Traceback" not in error


def test_show_works_for_each_kind_of_data(docci, tmp_path):
    own = LAYOUTS["own csv"](tmp_path/"own")
    own.write()
    for args in [("scenes",), (own.root,)]:
        shown = invoke("show", *args, "--n", 2)
        assert shown.exit_code == 0 and shown.output.count("long:") == 2 and shown.output.count("short:") == 4
        assert "pads before" in shown.output
    assert "tokens of 88" in invoke("show", "scenes").output
    assert "tokens of 60" in invoke("show", own.root, "--context", 60).output
    assert "sentences 2" in invoke("show", "docci", "--root", tmp_path, "--recipe", "no_summary").output


@pytest.mark.parametrize("command", ["list", "get", "check", "show"])
def test_help_reads_well(command):
    shown = invoke(command, "--help")
    assert shown.exit_code == 0 and re.search(r"(?m)^  [A-Z].*\.$", shown.output)
