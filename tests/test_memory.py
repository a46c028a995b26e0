"""Memory of an index of ShareGPT4V's size over all ranks and workers: they hold it once.

Each rank is a process that opens the index for itself. Pages that processes share are counted once (PSS). What the
libraries and the batches take is measured with a small index, and taken off.
"""
import functools
import json
import multiprocessing
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

PUBLISHED, BOUND = 1_246_901, 1.5e9
BATCH, BATCHES = 32, 12
WORDS = ("a the of in on with and red wooden small person building sky two left standing background white table image "
         "tree water large holding near blue grass light street window").split()
pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(),
                                reason="memory that processes share is told apart by Linux alone")


def sentences(rng, n):
    "n sentences of about 21 tokens and 100 characters, as ShareGPT4V's."
    return [" ".join(rng.choice(WORDS, 19)).capitalize() + "." for _ in range(n)]


def write_sharegpt4v(root, n, pictures=64):
    "n records in the layout of the real file, and the pictures: a few that many records share."
    import numpy as np
    from PIL import Image
    rng, folder = np.random.default_rng(0), root/"data/sam/images"
    folder.mkdir(parents=True)
    for i in range(pictures):
        Image.fromarray(rng.integers(0, 256, (48, 64, 3), dtype=np.uint8)).save(folder/f"sa_{1_000_000 + i}.jpg")
    many = sentences(rng, 300)
    texts = ["\n\n".join(" ".join(rng.choice(many, k)) for k in (5, 4)) for _ in range(300)]
    with open(root/"share-captioner_coco_lcs_sam_1246k_1107.json", "w") as f:
        for i in range(n):
            turns = [{"from": "human", "value": "What do you see happening in this image?\n<image>"},
                     {"from": "gpt", "value": texts[i % 300]}]
            image = f"sam/images/sa_{1_000_000 + i % pictures}.jpg"
            f.write((", " if i else "[") + json.dumps({"id": f"sa_{i}", "image": image, "conversations": turns}))
        f.write("]")


# in the measured processes

def processes(pid):
    "A process and all that it started."
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try: found += [p for child in task.read_text().split() for p in processes(int(child))]
        except OSError: pass   # it has ended
    return found


def memory(folder):
    "[bytes that are no page of a file, bytes of the files under `folder`] of this process and those it started."
    private = files = 0
    for pid in processes(os.getpid()):
        try: rollup, maps = (Path(f"/proc/{pid}/{name}").read_text() for name in ("smaps_rollup", "smaps"))
        except OSError: continue
        private += sum(1024*int(kb) for kb in re.findall(r"^Pss_(?:Anon|Shmem): +(\d+)", rollup, re.M))
        mapped = re.findall(rf" {re.escape(str(folder))}/.*\n(?:[A-Z]\S+: .*\n)*?Pss: +(\d+)", maps)
        files += sum(1024*int(kb) for kb in mapped)
    return [private, files]


class Peak:
    "How far memory grew in a stretch of work, looked at all the time."
    def __init__(self, folder): self.folder = folder

    def __enter__(self):
        self.begin, self.most, self.done = sum(memory(self.folder)), 0, threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self):
        while not self.done.wait(.05): self.most = max(self.most, sum(memory(self.folder)))

    def __exit__(self, *error):
        self.done.set()
        self.thread.join()
        self.grown = self.most - self.begin


def measure(folder, ranks, workers, lists):
    """What the large index of `folder` takes more than the small one, as plain data.

    Returns "captions" and "tokens", bytes while these are made; and for each number of ranks and workers, and for
    captions held in lists where that is wanted, what `memory` tells while all ranks are in an epoch.
    """
    import torch

    from debias_clip import readers
    from debias_clip.benchmarks import load_records
    from debias_clip.store import text_store
    from debias_clip.tokens import get_tokenizer
    torch.set_num_threads(1)
    readers.split_sentences = functools.lru_cache(None)(readers.split_sentences)   # 300 captions come many times
    tok = get_tokenizer("ViT-B-16-quickgelu")
    text_store(load_records("sharegpt4v", folder/"few"), tok)                      # so that the libraries are loaded
    with Peak(folder/"many") as captions: records = load_records("sharegpt4v", folder/"many")
    with Peak(folder/"many") as tokens: text_store(records, tok)
    found = {"captions": captions.grown, "tokens": tokens.grown}
    for name, how in [(f"{r} ranks, {w} workers", (r, w, False)) for r, w in zip(ranks, workers, strict=True)] + [
            ("lists", (ranks[0], workers[0], True))]*lists:
        many, few = (held(folder/size, tok, *how) for size in ("many", "few"))
        found[name] = [a - b for a, b in zip(many, few, strict=True)]
    return found


def held(root, tok, ranks, workers, in_lists):
    "Memory of all processes while some ranks are in an epoch."
    fork = multiprocessing.get_context("fork")
    ready, done = fork.Barrier(ranks + 1, timeout=300), fork.Event()
    running = [fork.Process(target=rank, args=(root, tok, workers, in_lists, ready, done)) for _ in range(ranks)]
    for process in running: process.start()
    ready.wait()
    found = memory(root)
    done.set()
    for process in running: process.join()
    return found


def rank(root, tok, workers, in_lists, ready, done):
    "One rank in an epoch: has opened the data set for itself, used all of it, and draws batches."
    import numpy as np
    import torch

    from debias_clip.benchmarks import load_records
    from debias_clip.captions import DEBIAS
    from debias_clip.pairs import GlobalBatches, PairDataset, make_loader
    from debias_clip.records import Records
    from debias_clip.store import text_store
    records = load_records("sharegpt4v", root)
    if in_lists: records = Records("lists", list(records.images), list(records.captions))
    store = text_store(records, tok)
    for ids, starts in store.tables: ids.max(), starts.max()
    for _ in records.images: pass
    data = PairDataset(records, store, DEBIAS, lambda image: torch.from_numpy(np.array(image)))
    batches = iter(make_loader(data, GlobalBatches(len(data), BATCH), workers))
    for _ in range(BATCHES): next(batches)
    ready.wait()
    done.wait()


# the tests

def measured(folder, n, ranks, workers, lists=False):
    "`measure` in a process of its own."
    for name, size in (("many", n), ("few", 1000 + BATCH*BATCHES)): write_sharegpt4v(folder/name, size)
    task = json.dumps([str(folder), ranks, workers, lists])
    done = subprocess.run([sys.executable, "-W", "ignore", __file__, task], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stdout)
    return json.loads(done.stdout.splitlines()[-1])


def test_ranks_and_workers_hold_the_captions_once(tmp_path):
    n = 40_000
    bound = BOUND*n/PUBLISHED + 16e6                                       # what reading a list of any length leaves
    found = measured(tmp_path, n, [3], [1], lists=True)
    in_processes = 80e6*(os.cpu_count() or 1)                              # libraries and the words that each keeps
    assert max(found["captions"], found["tokens"]) < bound + in_processes
    private, files = found["3 ranks, 1 workers"]
    assert private + files < bound and private < .4*bound and files > .2*BOUND*n/PUBLISHED
    assert sum(found["lists"]) > 1.5*bound, "the bound must refuse captions held in memory"


@pytest.mark.slow
def test_four_ranks_hold_the_published_captions_once(tmp_path):
    found = measured(tmp_path, PUBLISHED, [1, 4], [0, 2])
    assert max(found["captions"], found["tokens"]) < BOUND
    for name in ("1 ranks, 0 workers", "4 ranks, 2 workers"):
        assert sum(found[name]) < BOUND and found[name][0] < .15*BOUND*int(name[0]), name


if __name__ == "__main__":
    folder, *rest = json.loads(sys.argv[1])
    print(json.dumps(measure(Path(folder), *rest)))
