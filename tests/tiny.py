"""Tiny backbones, and what several test files need of them."""
import json
from contextlib import contextmanager

import open_clip
import torch

VISION = {"image_size": 16, "layers": 1, "width": 64, "patch_size": 8}
TEXT = {"context_length": 77, "vocab_size": 49408, "width": 64, "heads": 1, "layers": 2}
CLIP = {"embed_dim": 16, "vision_cfg": VISION, "text_cfg": TEXT}
PIECES = {"context_length": 64, "vocab_size": 3072, "hf_tokenizer_name": "scenes-siglip",
          "tokenizer_kwargs": {"clean": "canonicalize"}, "no_causal_mask": True, "proj_bias": True, "pool_type": "last"}
CONFIGS = {
    "tiny-clip": CLIP,
    "tiny-clip-quickgelu": CLIP | {"quick_gelu": True},
    # argmax pooling in .text, as EVA's and the release's
    "tiny-causal": CLIP | {"custom_text": True, "embed_dim": 24},
    "tiny-siglip": CLIP | {"custom_text": True, "init_logit_bias": -10, "text_cfg": TEXT | PIECES},
}
SOT, EOT = 49406, 49407


@contextmanager
def registered(configs, folder):
    "Makes backbones known to open_clip while it is entered; it keeps them, and equal shapes would be ambiguous."
    for name, config in configs.items(): (folder/f"{name}.json").write_text(json.dumps(config))
    open_clip.add_model_config(folder)
    try: yield
    finally:
        for name in configs: open_clip.factory._MODEL_CONFIGS.pop(name)
        open_clip.factory._MODEL_CONFIG_PATHS.remove(folder)


def captions(lengths, pads, length=248, vocab=(0, SOT)):
    "Token rows of captions of so many words behind so many pads, cut to what fits; a word may be 0, the pad's id."
    out = torch.zeros(len(lengths), length, dtype=torch.long)
    for row, n, n_pre in zip(out, lengths, pads, strict=True):
        n_pre = min(n_pre, length - 2)
        n = min(n, length - 2 - n_pre)
        row[0], row[1 + n_pre:1 + n_pre + n], row[1 + n_pre + n] = SOT, torch.randint(*vocab, (n,)), EOT
    return out


def five_captions(length, n=5):
    "Captions of different lengths, pads before some, one as long as can be."
    lengths = [1, 7, 3, length - 2, 12][:n]
    pads = [min(4*(i % 2), length - 2 - k) for i, k in enumerate(lengths)]
    return captions(lengths, pads, length, (1, SOT))


def text_names(model):
    return [name for name, _ in model.named_parameters() if not name.startswith(("visual", "logit"))]
