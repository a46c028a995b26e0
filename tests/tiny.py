"""Tiny backbones, and what several test files need of them."""
import copy
import json
from contextlib import contextmanager

import open_clip
import torch
from safetensors.torch import save_file

from debias_clip.models import encode_texts

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


# checkpoints

def block_shapes(width):
    "Names and shapes of a residual block."
    return {
        "attn.in_proj_weight": (3*width, width), "attn.in_proj_bias": (3*width,),
        "attn.out_proj.weight": (width, width), "attn.out_proj.bias": (width,),
        "ln_1.weight": (width,), "ln_1.bias": (width,), "ln_2.weight": (width,), "ln_2.bias": (width,),
        "mlp.c_fc.weight": (4*width, width), "mlp.c_fc.bias": (4*width,),
        "mlp.c_proj.weight": (width, 4*width), "mlp.c_proj.bias": (width,),
    }


def openai_state(length=77, width=64, embed=16, vocab=49408):
    "OpenAI's names, as listed for CLIP's released archives, with random tensors in the sizes of tiny-clip."
    shapes = {
        "positional_embedding": (length, width), "text_projection": (width, embed), "logit_scale": (),
        "token_embedding.weight": (vocab, width), "ln_final.weight": (width,), "ln_final.bias": (width,),
        "visual.class_embedding": (width,), "visual.positional_embedding": (5, width), "visual.proj": (width, embed),
        "visual.conv1.weight": (width, 3, 8, 8),
        "visual.ln_pre.weight": (width,), "visual.ln_pre.bias": (width,),
        "visual.ln_post.weight": (width,), "visual.ln_post.bias": (width,),
    }
    for name in ("transformer.resblocks.0", "transformer.resblocks.1", "visual.transformer.resblocks.0"):
        shapes |= {f"{name}.{part}": shape for part, shape in block_shapes(width).items()}
    return {name: torch.randn(shape)*.1 for name, shape in shapes.items()}


def save(tree, path, kind):
    path = path.with_suffix(f".{kind}")
    save_file(tree, path) if kind == "safetensors" else torch.save(tree, path)
    return path


@torch.no_grad()
def same_as_open_clip(model, state, quick_gelu=True):
    "Asserts that a model gives what open_clip's own class gives with these tensors."
    config = copy.deepcopy(CLIP)
    config["text_cfg"]["context_length"] = len(state["positional_embedding"])
    plain = open_clip.CLIP(**config, quick_gelu=quick_gelu).eval()
    plain.load_state_dict({name: v.float() for name, v in state.items()})
    image, text = torch.randn(2, 3, 16, 16), five_captions(model.context_length, 4)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    torch.testing.assert_close(model.eval().encode_image(image), plain.encode_image(image), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(encode_texts(model, text), plain.encode_text(text), rtol=1e-5, atol=1e-5)
    assert torch.equal(model.logit_scale, plain.logit_scale)
