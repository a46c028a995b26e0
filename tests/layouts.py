"""Copies of data sets in their real layouts, of made-up captions and pictures: whole, or with faults planted."""
import csv
import io
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

THINGS = "dog boat house lamp tree bicycle bird table".split()
COLOURS = "red green blue white black yellow".split()
DEEDS = "stands lies waits shines rests leans".split()
PLACES = ["near the door", "behind a low wall", "in the sun", "under the bridge", "at the left edge", "on wet ground"]


def made_up_caption(seed, sentences=5):
    "A caption of so many sentences; the same for the same seed, another for another."
    rng = np.random.default_rng(seed)

    def pick(words): return words[rng.integers(len(words))]

    summary = f"A picture of {seed} things around a {pick(COLOURS)} {pick(THINGS)}."
    rest = [f"The {pick(COLOURS)} {pick(THINGS)} {pick(DEEDS)} {pick(PLACES)}." for _ in range(sentences - 1)]
    return " ".join([summary, *rest])


def write_picture(file, seed):
    file.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (24, 24 + seed % 50, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, quality=90)


def write_json(file, value):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(value), encoding="utf-8")


def write_lines(file, lines):
    "Writes lines of str or bytes."
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines))


@dataclass
class Row:
    "A picture of a copy. damaged: whether its record is written so that it cannot be read."
    image: str
    texts: list
    split: str = "test"
    damaged: bool = False


class Layout:
    """A copy of a data set; its rows can be changed before `write` writes their captions.

    root: its folder; n: pictures, which are written at once
    folder: where in `root` the pictures lie; several: whether a picture has five short captions or a long one
    """
    folder, several = "images", False

    def __init__(self, root, n=16):
        self.root = Path(root)
        self.rows = [Row(self.image(i), self.texts(i)) for i in range(n)]
        for i, row in enumerate(self.rows): write_picture(self.path(row), i)

    def image(self, i): return f"{i}.jpg"
    def path(self, row): return self.root/self.folder/row.image

    def texts(self, i):
        if self.several: return [made_up_caption(5*i + k, 1) for k in range(5)]
        return [made_up_caption(i)]

    def write(self): raise NotImplementedError

    def vary(self):
        "Gives the rows the splits and the oddities of the real files."


class Urban1k(Layout):
    folder = "Urban1k/image"

    def write(self):
        for i, row in enumerate(self.rows):
            text = row.texts[0]
            lines = [b"\xff\xfe"] if row.damaged else [*[""]*(i == 3), text, *["A second line."]*bool(text.strip())]
            write_lines(self.root/"Urban1k/caption"/f"{Path(row.image).stem}.txt", lines)


class Dci(Layout):
    inside = "densely_captioned_images"
    folder = f"{inside}/photos"

    def image(self, i): return f"sa_{i + 100}.jpg"

    def write(self):
        for i, row in enumerate(self.rows):
            first, _, extra = row.texts[0].partition(". ")
            short = f"{first}." if first.strip() and extra else first
            text = json.dumps({"image": row.image, "short_caption": short, "extra_caption": extra, "mask_data": {}})
            file = self.root/self.inside/"annotations"/f"{i}-data.json"
            write_lines(file, [text[:len(text)//2] if row.damaged else text])

    def vary(self):
        for i, row in enumerate(self.rows):
            if i % 2: row.texts = [made_up_caption(i, 1)]                            # no extra caption
        self.rows[2].texts = [made_up_caption(2, 60)]


class Docci(Layout):
    def image(self, i): return f"test_{i:05}.jpg"

    def write(self):
        lines = []
        for row in self.rows:
            line = json.dumps({"example_id": Path(row.image).stem, "split": row.split, "image_file": row.image,
                               "description": row.texts[0]})
            lines.append(line[:30] if row.damaged else line)
        other = {"example_id": "q", "split": "qual_dev", "image_file": "q.jpg", "description": "Not of this split."}
        write_lines(self.root/"docci_descriptions.jsonlines", [*lines, json.dumps(other)])

    def vary(self):
        splits = ["test", "train", "test", "train", "qual_dev", "qual_test", "test", "train"]
        for i, row in enumerate(self.rows): row.split = splits[i % len(splits)]


class Iiw(Layout):
    def write(self):
        for k, part in enumerate(("IIW-400", "DCI_Test", "DOCCI_Test")):
            write_lines(self.root/part/"data.jsonl", [self.line(k, row) for row in self.rows[k::3]])

    def line(self, k, row):
        "The first part calls the picture by another field; the first and the last leave out its ending."
        name = row.image.removesuffix(".jpg") if k != 1 else row.image
        return "[1, 2]" if row.damaged else json.dumps({"image" if k else "image/key": name, "IIW": row.texts[0]})


class Coco(Layout):
    folder, several = "val2017", True

    def image(self, i): return f"{i:012}.jpg"

    def write(self):
        images = [{"id": i} if row.damaged else {"id": i, "file_name": row.image} for i, row in enumerate(self.rows)]
        notes = [{"id": 100*i + k, "image_id": i, "caption": text}
                 for i, row in enumerate(self.rows) if not row.damaged for k, text in enumerate(row.texts)]
        content = {"images": images, "annotations": notes[::2] + notes[1::2]}
        write_json(self.root/"annotations/captions_val2017.json", content)

    def vary(self):
        self.rows[0].texts.append(made_up_caption(99_999, 1))
        for row in self.rows: row.texts = [f" {text}\n" for text in row.texts]


class CocoKarpathy(Layout):
    folder, several, file, inside = "val2014", True, "dataset_coco.json", {"filepath": "val2014"}

    def write(self):
        rows = []
        for row in self.rows:
            name = {} if row.damaged else {"filename": row.image}
            rows.append({**name, **self.inside, "split": row.split, "sentences": [{"raw": t} for t in row.texts]})
        other = {"filename": "other.jpg", **self.inside, "split": "restval", "sentences": []}
        write_json(self.root/self.file, {"images": [*rows, other]})

    def vary(self):
        for i, row in enumerate(self.rows): row.split = ["test", "train", "val"][i % 3]


class FlickrKarpathy(CocoKarpathy):
    folder, file, inside = "flickr30k-images", "dataset_flickr30k.json", {}


class FlickrToken(Layout):
    folder, several = "flickr30k-images", True
    file, head, line = "results_20130124.token", [], "{}#{}\t{}"

    def write(self):
        lines = list(self.head)
        for row in self.rows:
            whole = [self.line.format(row.image, k, text) for k, text in enumerate(row.texts)]
            lines += ["no caption at all"]*len(whole) if row.damaged else whole
        write_lines(self.root/self.file, lines)


class FlickrCsv(FlickrToken):
    folder = "flickr30k_images"
    file, head, line = "results.csv", ["image_name| comment_number| comment"], "{}| {}| {}"


class ShareGpt4v(Layout):
    folder = "data"

    def image(self, i):
        folders = ("sam/images/sa_", "coco/train2017/", "llava/llava_pretrain/images/0/")
        return f"{folders[i % 3]}{i}.jpg"

    def write(self):
        records = []
        for row in self.rows:
            turns = [{"from": "human", "value": "What?"}, {"from": "gpt", "value": row.texts[0]}]
            records.append({"image": row.image, "conversations": turns[:1 if row.damaged else 2]})
        write_json(self.root/"share-captioner_coco_lcs_sam_1246k_1107.json", records)


class OwnCsv(Layout):
    folder = "pictures"

    def image(self, i): return f"deep/{i}.png"

    def write(self):
        rows = [[f"pictures/{row.image}", row.texts[0], *["cut at a comma"]*row.damaged] for row in self.rows]
        text = io.StringIO(newline="")
        csv.writer(text).writerows([["image", "caption"], *rows])
        (self.root/"captions.csv").write_bytes(text.getvalue().encode())


class OwnJsonl(OwnCsv):
    several = True

    def write(self):
        lines = []
        for row in self.rows:
            line = json.dumps({"image": f"pictures/{row.image}", "captions": row.texts}).encode()
            lines.append(line[:-5] + b"\xff" if row.damaged else line)
        write_lines(self.root/"captions.jsonl", lines)


LAYOUTS = {
    "urban1k": Urban1k, "urban1k-whole": Urban1k, "dci": Dci, "long-dci": Dci, "docci": Docci, "docci-5100": Docci,
    "iiw": Iiw, "coco": Coco, "coco-first5": Coco, "coco-karpathy": CocoKarpathy, "flickr30k-1k": FlickrKarpathy,
    "flickr30k-karpathy-all": FlickrKarpathy, "flickr30k-full": FlickrToken, "flickr30k-full (csv)": FlickrCsv,
    "sharegpt4v-val": ShareGpt4v, "own csv": OwnCsv, "own jsonl": OwnJsonl,
}
HELD_OUT = 1_000   # of ShareGPT4V's records, the first are for validation


def write_data(name, root, n=16):
    """Writes a data set, for all protocols that read it, with the splits and the oddities of the real files.

    name: of a protocol; root: its folder, as `load_records` takes it; n: records (ShareGPT4V: behind those held out)
    """
    if name.startswith("flickr30k"): kinds = (FlickrKarpathy, FlickrToken)
    else: kinds = (LAYOUTS["sharegpt4v-val" if name == "sharegpt4v" else name],)
    for kind in kinds:
        layout = kind(root, n + HELD_OUT if kind is ShareGpt4v else n//3 + 1 if kind.several else n)
        layout.vary()
        layout.write()
