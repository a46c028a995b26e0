"""A headless Chromium that tests drive over its devtools protocol."""
import json
import os
import shutil
import subprocess
import time
from contextlib import contextmanager
from urllib.request import urlopen

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
missing = f"none of {', '.join(NAMES)} is installed, and CHROMIUM names none"
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason=missing)
# No name is looked up: a page that asks for one outside this machine gets an error.
OPTIONS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
           "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]


class Tab:
    "One tab. asked: addresses it asked for; faults: what its console said of errors and warnings."
    def __init__(self, socket):
        self.socket, self.sent, self.loads, self.asked, self.faults = socket, 0, 0, [], []
        for domain in ("Page", "Network", "Runtime", "Log"): self.call(f"{domain}.enable")

    def call(self, method, **options):
        "The answer to a command; what else is heard on the way is noted."
        self.sent += 1
        self.socket.send(json.dumps(dict(id=self.sent, method=method, params=options)))
        while True:
            heard = json.loads(self.socket.recv())
            if heard.get("id") == self.sent:
                assert "error" not in heard, heard
                return heard["result"]
            self.note(heard.get("method"), heard.get("params", {}))

    def note(self, event, told):
        if event == "Page.loadEventFired": self.loads += 1
        if event == "Network.requestWillBeSent": self.asked.append(told["request"]["url"])
        bad = ("error", "warning", "assert")
        said = event == "Runtime.consoleAPICalled" and told["type"] in bad
        logged = event == "Log.entryAdded" and told["entry"]["level"] in bad
        if said or logged or event == "Runtime.exceptionThrown": self.faults.append(told)

    def run(self, script):
        "The value of a JavaScript expression, a promise's too."
        done = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def until(self, script, seconds=60):
        "Waits for an expression to be true, and returns its value."
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            value = self.run(script)
            if value: return value
            time.sleep(.1)
        pytest.fail(f"never true: {script}")

    def open(self, address, width=1280):
        "Loads a page into a window of that many CSS pixels."
        screen = dict(width=width, height=900, deviceScaleFactor=1, mobile=width < 500)
        self.call("Emulation.setDeviceMetricsOverride", **screen)
        before = self.loads
        self.call("Page.navigate", url=address)
        self.until("document.readyState == 'complete'")
        end = time.monotonic() + 60
        while self.loads == before and time.monotonic() < end: self.run("new Promise(done => setTimeout(done, 50))")
        assert self.loads > before, address

    def type(self, text): self.call("Input.insertText", text=text)


@contextmanager
def tab(folder):
    "A tab of a browser of its own, which keeps its files in `folder`."
    import websocket  # comes with JupyterLab
    command = [CHROMIUM, *OPTIONS, "--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"]
    browser = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        told, end = folder/"DevToolsActivePort", time.monotonic() + 60
        while not (told.is_file() and told.read_text().count("\n")) and time.monotonic() < end: time.sleep(.1)
        with urlopen(f"http://127.0.0.1:{told.read_text().split()[0]}/json", timeout=60) as answer:
            page = next(target for target in json.load(answer) if target["type"] == "page")
        socket = websocket.create_connection(page["webSocketDebuggerUrl"], suppress_origin=True, timeout=60)
        yield Tab(socket)
        socket.close()
    finally:
        browser.terminate()
        browser.wait(timeout=60)
